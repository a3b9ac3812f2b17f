"""Kernels compiled by numba, for CPUs. numba takes a second to import: import this where they run."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from loraplex.kernels import numba_layers
from loraplex.kernels.attention.choice import AttentionChoice, AttentionUnavailable, check_name, reason_for
from loraplex.kernels.attention.kernel import AttentionNeeds
from loraplex.kernels.attention.numba_kernel import NumbaAttention
from loraplex.kernels.bundle import Kernels
from loraplex.kernels.experts.numba_expert_lora import NumbaExpertLoraPass
from loraplex.kernels.experts.numba_linears import numba_expert_ops
from loraplex.kernels.host_memory import HugePagePool
from loraplex.kernels.layers import numba_activation, numba_norm, numba_rope, numba_widen
from loraplex.kernels.linear import dense, numba_dense, numba_groups, numba_int8
from loraplex.kernels.linear.packed import PackedLinear
from loraplex.kernels.lora.numba_lora import NumbaLoraPass
from loraplex.kernels.numba_runtime import amx
from loraplex.kernels.numba_runtime.vectors import host_features, host_name
from loraplex.kernels.ops import Ops
from loraplex.kernels.recurrent import numba_convolve, numba_gates, numba_rule
from loraplex.kernels.recurrent.kernel import RecurrentOps
from loraplex.kernels.weight_form import WeightForm


def numba_kernels(device: torch.device, *, batch_invariant: bool) -> Kernels:
    """`batch_invariant`: linears too are of the kernels whose rows have the same bits in every step (ADR 0040)."""
    return Kernels(
        backend="numba",
        device=device,
        batch_invariant=batch_invariant,
        ops=numba_ops(batch_invariant=batch_invariant),
        choose_attention=_choose_attention,
        lora_pass=NumbaLoraPass,
        expert_lora_pass=NumbaExpertLoraPass,
        obstacle_to_same_bits=_obstacle_to_same_bits,
        multiplies=lambda dtype: (
            numba_dense.is_for(dtype, batch_invariant=batch_invariant) or dense.multiplies(dtype, device)
        ),
        processor=lambda: [host_name(), *sorted(host_features()), f"tiles {amx.is_permitted()}"],
        compilation=_Compilation(),
    )


def numba_ops(*, batch_invariant: bool = False) -> Ops:
    """Functions for tensors on a CPU, of a dtype of `numba_runtime.vectors.LIKE`."""
    pool = HugePagePool()
    pack = partial(_pack, batch_invariant=batch_invariant, pool=pool)
    return Ops(
        rms_norm=numba_norm.rms_norm,
        add_rms_norm=numba_norm.add_rms_norm,
        add=numba_norm.add,
        act_and_mul=numba_activation.act_and_mul,
        squared_relu=numba_activation.squared_relu,
        times=numba_activation.times,
        norm_in_place=numba_norm.norm_in_place,
        rotate_and_write=numba_rope.rotate_and_write,
        pack=pack,
        to_float32=numba_widen.to_float32,
        recurrent=RecurrentOps(
            convolve=numba_convolve.convolve,
            delta_gates=numba_gates.delta_gates,
            rule=numba_rule.rule,
            gated_norm=numba_gates.gated_norm,
            output_gate=numba_gates.output_gate,
            by_part=numba_gates.by_part,
            step_gates=numba_gates.step_gates,
        ),
        experts=numba_expert_ops(
            partial(_pack, batch_invariant=True, pool=pool), numba_activation.act_and_mul
        ),
        record_layers=numba_layers.NumbaRecordedLayers,
    )


def _pack(
    weight: Any, form: WeightForm, dtype: torch.dtype, *, batch_invariant: bool, pool: HugePagePool
) -> PackedLinear:
    if form.codes == "floats":
        return numba_dense.pack_weight(weight, batch_invariant=batch_invariant, pool=pool)
    rounds = form.activations == "int8"
    found = numba_int8.pack_integers(weight, dtype, form.bits, pool=pool) if rounds else None
    return found or numba_groups.pack_groups(weight, dtype, pool=pool)


def _choose_attention(choice: str, needs: AttentionNeeds, dtype: torch.dtype) -> AttentionChoice:
    check_name(choice)
    if choice == "triton":
        raise AttentionUnavailable("it runs beside Triton's kernels, and numba's are used; choose auto")
    if choice == "torch":
        raise AttentionUnavailable("numba's kernels keep K and V in an order of their own; choose auto")
    return AttentionChoice(NumbaAttention(), reason_for(choice, "numba"))


def _obstacle_to_same_bits(dtype: torch.dtype, batch_invariant: bool) -> str | None:
    if numba_dense.is_for(dtype, batch_invariant=batch_invariant):
        return None
    name = str(dtype).removeprefix("torch.")
    return f"oneDNN multiplies in {name} on this processor, by the number of rows"


class _Compilation:
    """See `Compilation`. Compiled code is kept on the disk where that can be written to."""

    def is_done(self, dtype: torch.dtype, **parts: bool) -> bool:
        from loraplex.kernels.numba_runtime.cache import KERNELS

        return KERNELS.is_compiled(_name(dtype, parts))

    def run(self, dtype: torch.dtype, **parts: bool) -> None:
        from loraplex.kernels import numba_warm_up
        from loraplex.kernels.numba_runtime.cache import KERNELS

        ops = numba_ops()
        KERNELS.compile(_name(dtype, parts), lambda: numba_warm_up.warm_up(dtype, ops, **parts))


def _name(dtype: torch.dtype, parts: dict[str, bool]) -> str:
    return "-".join([str(dtype).removeprefix("torch."), *(name for name, wanted in parts.items() if wanted)])
