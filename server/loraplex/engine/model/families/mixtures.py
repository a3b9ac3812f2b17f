"""The parts of the configs of mixtures that no other family has."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec

from loraplex.adapters.store.files import shown
from loraplex.engine.model.base import ModelUnsupported
from loraplex.engine.model.layer_kinds import GatedKind, MixtureKind
from loraplex.kernels.experts.types import ExpertActivation, RouterKind
from loraplex.kernels.lora.site_groups import SHARED_GATE

FIELDS = frozenset(
    {
        "num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob",
        "decoder_sparse_step", "mlp_only_layers", "output_router_logits", "router_aux_loss_coef",
        "router_jitter_noise",
    }
)  # fmt: skip
"""Config fields beside those that other families have too. Some are of training alone."""
SHARED_FIELDS = frozenset({"shared_expert_intermediate_size"})
GLM4_FIELDS = FIELDS | {
    "n_routed_experts", "n_shared_experts", "routed_scaling_factor", "n_group", "topk_group", "first_k_dense_replace",
    "num_nextn_predict_layers", "num_mtp_layers", "partial_rotary_factor",
}  # fmt: skip
GPT_OSS_FIELDS = FIELDS | {"swiglu_alpha", "swiglu_limit"}
QWEN3_5_FIELDS = SHARED_FIELDS | {
    "num_experts", "num_experts_per_tok", "moe_intermediate_size", "output_router_logits", "router_aux_loss_coef",
}  # fmt: skip
QWEN3_5_HARMLESS: dict[str, tuple[Any, ...]] = {
    "norm_topk_prob": (None, True),
    "decoder_sparse_step": (None, 1),
    "mlp_only_layers": (None, []),
}
"""Values of fields that transformers reads for Qwen3-Next, and not for Qwen3.5."""
_MOST_EXPERTS = 1 << 12


def qwen3_mixture(config: Any, layer: int) -> MixtureKind | None:
    """Raises ModelUnsupported."""
    step, dense = config.decoder_sparse_step, config.mlp_only_layers or ()
    if type(step) is not int or step < 1:
        raise ModelUnsupported(f"decoder_sparse_step {shown(step)} is no number of layers")
    if layer in dense or (layer + 1) % step or config.num_experts == 0:
        return None
    return _mixture(config, "moe_intermediate_size", normalise=bool(config.norm_topk_prob))


def qwen3_next_mixture(config: Any, layer: int) -> MixtureKind | None:
    """Raises ModelUnsupported."""
    kind = qwen3_mixture(config, layer)
    return None if kind is None else _with_shared_gate(kind, config)


def qwen3_5_mixture(config: Any, layer: int) -> MixtureKind | None:
    """Raises ModelUnsupported."""
    return _with_shared_gate(_mixture(config, "moe_intermediate_size", normalise=True), config)


def _with_shared_gate(kind: MixtureKind, config: Any) -> MixtureKind:
    size = _width(config, "shared_expert_intermediate_size")
    return msgspec.structs.replace(kind, shared=GatedKind(size, "silu", False), shared_gate=SHARED_GATE)


def olmoe_mixture(config: Any, layer: int) -> MixtureKind | None:
    """Raises ModelUnsupported."""
    return _mixture(config, "intermediate_size", normalise=bool(config.norm_topk_prob))


def mixtral_mixture(config: Any, layer: int) -> MixtureKind | None:
    """Raises ModelUnsupported."""
    return _mixture(
        config, "intermediate_size", normalise=True, weights_in_float32=True, sites=("w1", "w3", "w2")
    )


def glm4_mixture(config: Any, layer: int) -> MixtureKind | None:
    """Raises ModelUnsupported."""
    if layer < config.first_k_dense_replace:
        return None
    kind = _mixture(config, "moe_intermediate_size", normalise=bool(config.norm_topk_prob))
    groups, top_groups, shared = config.n_group, config.topk_group, config.n_shared_experts
    chosen_of = kind.router.num_experts // max(groups, 1) * top_groups
    if not 1 <= top_groups <= groups or kind.router.num_experts % groups or chosen_of < kind.router.top_k:
        raise ModelUnsupported(
            f"n_group {shown(groups)} and topk_group {shown(top_groups)} do not fit the experts"
        )
    if shared < 1:
        raise ModelUnsupported(f"n_shared_experts {shown(shared)} is no number of experts")
    router = replace(
        kind.router,
        scores="sigmoid",
        scaling=float(config.routed_scaling_factor),
        groups=groups,
        top_groups=top_groups,
        weights_in_float32=True,
    )
    return msgspec.structs.replace(
        kind, router=router, shared=GatedKind(shared * kind.size, "silu", False), shared_name="shared_experts"
    )


def gpt_oss_mixture(config: Any, layer: int) -> MixtureKind | None:
    """Raises ModelUnsupported."""
    kind = _mixture(config, "intermediate_size", normalise=False)
    numbers = {}
    for name in ("swiglu_alpha", "swiglu_limit"):
        value = getattr(config, name)
        if not isinstance(value, int | float) or not 0 < value < 1e6:
            raise ModelUnsupported(f"{name} {shown(value)} is no number of an activation")
        numbers[name] = float(value)
    clamped = ExpertActivation("clamped", numbers["swiglu_alpha"], numbers["swiglu_limit"])
    router = replace(kind.router, scores="softmax_of_top")
    return msgspec.structs.replace(kind, router=router, gate="router", bias=True, clamped=clamped)


def granite_hybrid_mixture(config: Any, layer: int) -> MixtureKind | None:
    """Raises ModelUnsupported."""
    return None if config.num_local_experts == 0 else granite_mixture(config, layer)


def granite_mixture(config: Any, layer: int) -> MixtureKind:
    """Raises ModelUnsupported."""
    kind = _mixture(config, "intermediate_size", normalise=False)
    router = replace(kind.router, scores="softmax_of_top")
    return msgspec.structs.replace(kind, router=router, gate="router", routed="block_sparse_moe")


def gemma4_mixture(config: Any, layer: int) -> MixtureKind | None:
    """Raises ModelUnsupported."""
    if not config.enable_moe_block:
        return None
    kind = _mixture(
        config, "moe_intermediate_size", normalise=True, weights_in_float32=True, top_k_field="top_k_experts"
    )
    return msgspec.structs.replace(
        kind, activation="gelu_tanh", gate="router.proj", routed="", from_residual=True
    )


def _mixture(
    config: Any,
    size_field: str,
    *,
    normalise: bool,
    weights_in_float32: bool = False,
    sites: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    top_k_field: str = "num_experts_per_tok",
) -> MixtureKind:
    # Most configs have the first name, for their own field or another.
    count = config.num_local_experts if hasattr(config, "num_local_experts") else config.num_experts
    top_k, size = getattr(config, top_k_field), _width(config, size_field)
    if type(count) is not int or not 1 <= count <= _MOST_EXPERTS:
        raise ModelUnsupported(f"num_experts {shown(count)} is not served; 1 to {_MOST_EXPERTS} are")
    if type(top_k) is not int or not 1 <= top_k <= count:
        raise ModelUnsupported(f"{top_k_field} {shown(top_k)} is no number of the {count} experts")
    router = RouterKind("softmax", count, top_k, normalise=normalise, weights_in_float32=weights_in_float32)
    return MixtureKind(size, "silu", router, sites)


def _width(config: Any, field: str) -> int:
    size = getattr(config, field)
    if type(size) is not int or not 1 <= size <= 1 << 24:
        raise ModelUnsupported(f"{field} {shown(size)} is no width of an expert")
    return size
