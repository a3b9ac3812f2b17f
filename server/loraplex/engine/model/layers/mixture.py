"""A layer's mixture: a router, the experts that it chooses for each row, and perhaps one that all rows go through."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from loraplex.engine.model.base import ForwardBatch
from loraplex.engine.model.layer_kinds import MixtureKind
from loraplex.engine.model.layers.adapted_linears import AdaptedLinears, Linear
from loraplex.engine.model.layers.gated import GatedWeights, gated_groups, read_gated, run_gated
from loraplex.engine.model.layers.tensors import LayerTensors
from loraplex.kernels.experts.lora_types import ExpertSiteGroup
from loraplex.kernels.experts.types import ExpertActivation, PackedExperts
from loraplex.kernels.lora.site_groups import SiteGroup

_GATE_UP, _DOWN = "experts.gate_up", "experts.down"


@dataclass(frozen=True, slots=True)
class ResidualNorms:
    """The norms [H] of a mixture that reads the residual, and `scales` [E] float32, by which weights of experts are
    multiplied."""

    router: torch.Tensor
    experts: torch.Tensor
    shared_out: torch.Tensor
    experts_out: torch.Tensor
    scales: torch.Tensor


@dataclass(frozen=True, slots=True)
class MixtureWeights:
    """Gate and up of an expert are one linear. `correction` [E] float32 is added where experts are chosen. Biases are
    [E, N], or None."""

    router: Linear
    correction: torch.Tensor | None
    gate_up: PackedExperts
    gate_up_bias: torch.Tensor | None
    down: PackedExperts
    down_bias: torch.Tensor | None
    shared: GatedWeights | None
    shared_gate: Linear | None
    norms: ResidualNorms | None


def mixture_groups(kind: MixtureKind, hidden: int) -> tuple[SiteGroup, ...]:
    """The router, and the linears of what all rows go through."""
    router = SiteGroup("router", (kind.gate.rpartition(".")[2],), hidden, (kind.router.num_experts,))
    shared = () if kind.shared is None else gated_groups(kind.shared, hidden)
    gate = (SiteGroup("shared_gate", (kind.shared_gate,), hidden, (1,)),) if kind.shared_gate else ()
    return router, *shared, *gate


def mixture_expert_groups(
    hidden: int, size: int, count: int, layers: tuple[int, ...]
) -> tuple[ExpertSiteGroup, ...]:
    """The linears of `count` routed experts of these layers. An adapter has gate and up apart, or as one."""
    columns = ((0, size), (size, 2 * size), (0, 2 * size))
    return (
        ExpertSiteGroup(_GATE_UP, ("gate", "up", "gate_up"), hidden, columns, count, layers),
        ExpertSiteGroup(_DOWN, ("down",), size, ((0, hidden),), count, layers),
    )


def read_mixture(
    kind: MixtureKind,
    tensors: LayerTensors,
    prefix: str,
    module: str,
    layer: int,
    router: SiteGroup,
    *others: SiteGroup,
) -> MixtureWeights:
    """`prefix`: of the names of a layer's tensors; `module`: the name of the feed-forward's module. Raises
    ModelUnsupported for tensors that do not fit."""
    hidden, count, whole = router.in_features, kind.router.num_experts, f"{prefix}{module}."
    own = whole if kind.routed is None else f"{prefix}{kind.routed}." if kind.routed else prefix
    gate_up_bias = down_bias = shared = None
    if kind.shared is not None:
        names = whole if kind.routed is not None else f"{whole}{kind.shared_name}."
        shared = read_gated(kind.shared, tensors, names, layer, *others[:2])
    *gate_and_up, down = kind.sites
    experts = f"{own}experts."
    if kind.bias:
        in_turns = tensors.tensor(f"{experts}gate_up_proj_bias", count, 2 * kind.size)
        gate_up_bias = torch.cat((in_turns[:, ::2], in_turns[:, 1::2]), 1)
        down_bias = tensors.tensor(f"{experts}down_proj_bias", count, hidden)
    in_float32 = torch.float32 if kind.router.scores == "sigmoid" else None
    of_router = own + kind.gate.removesuffix(router.sites[0])
    return MixtureWeights(
        router=tensors.linear(of_router, layer, router, kind.bias, in_float32),
        correction=None
        if kind.router.scores != "sigmoid"
        else tensors.tensor(f"{own}{kind.gate}.e_score_correction_bias", count, dtype=torch.float32),
        gate_up=tensors.experts(experts, count, dict.fromkeys(gate_and_up, kind.size), hidden),
        gate_up_bias=gate_up_bias,
        down=tensors.experts(experts, count, {down: hidden}, kind.size),
        down_bias=down_bias,
        shared=shared,
        shared_gate=tensors.linear(whole, layer, others[2], bias=False) if kind.shared_gate else None,
        norms=_read_norms(tensors, prefix, of_router, hidden, count) if kind.from_residual else None,
    )


def _read_norms(tensors: LayerTensors, prefix: str, of_router: str, hidden: int, count: int) -> ResidualNorms:
    scale = tensors.tensor(f"{of_router}scale", hidden, dtype=torch.float32)
    return ResidualNorms(
        router=scale.mul_(hidden**-0.5),
        experts=tensors.norm(f"{prefix}pre_feedforward_layernorm_2", hidden),
        shared_out=tensors.norm(f"{prefix}post_feedforward_layernorm_1", hidden),
        experts_out=tensors.norm(f"{prefix}post_feedforward_layernorm_2", hidden),
        scales=tensors.tensor(f"{of_router}per_expert_scale", count, dtype=torch.float32),
    )


def run_mixture(
    kind: MixtureKind,
    weights: MixtureWeights,
    x: torch.Tensor,
    batch: ForwardBatch,
    linears: AdaptedLinears,
    residual: torch.Tensor,
) -> torch.Tensor:
    """[T, C]; `residual` [T, C] is what x is the norm of."""
    ops, norms, layer = linears.experts, weights.norms, weights.router.layer
    scored = routed = x
    if norms is not None:
        scored, routed = (linears.rms_norm(residual, norm) for norm in (norms.router, norms.experts))
    elif kind.router.scores == "sigmoid":
        scored = linears.to_float32(x)
    scales = None if norms is None else norms.scales
    logits = linears.apply(weights.router, scored, batch)
    routes = ops.route(logits, kind.router, weights.correction, scales=scales)
    rows = ops.group(routes, kind.router.num_experts)
    ops.keep_starts(rows, linears.expert_starts[layer])
    inputs = ops.gather(routed, rows)
    gate_up = weights.gate_up(inputs, rows, weights.gate_up_bias)
    if batch.expert_lora is not None:
        batch.expert_lora.apply(layer, _GATE_UP, inputs, gate_up, rows)
    inner = ops.act(gate_up, kind.clamped or ExpertActivation(kind.activation))
    down = weights.down(inner, rows, weights.down_bias)
    if batch.expert_lora is not None:
        batch.expert_lora.apply(layer, _DOWN, inner, down, rows)
    out = ops.combine(down, routes, rows)
    if kind.shared is not None and weights.shared is not None:
        shared = run_gated(kind.shared, weights.shared, x, batch, linears)
        if norms is not None:
            out, shared = linears.rms_norm(out, norms.experts_out), linears.rms_norm(shared, norms.shared_out)
        if weights.shared_gate is None:
            linears.add(out, shared)
        else:
            ops.add_gated(out, shared, linears.apply(weights.shared_gate, x, batch))
    return out
