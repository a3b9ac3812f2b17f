"""Linears by expert on a CPU: each expert's weight as `Ops.pack` makes it, and one call of its kernel for all of them.

The kernel reads where rows of an expert begin and where the expert's weight lies, so a recorded call serves any
routes. An expert's block is read once for all of its rows, and a row's sums have the order that they have in a linear
of that weight alone. AMX's tiles are not used.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from loraplex.kernels.experts import numba_route, numba_rows
from loraplex.kernels.experts.torch_experts import Activate, LinearByExpert, Pack, expert_ops
from loraplex.kernels.experts.types import ExpertActivation, ExpertOps, ExpertRows, PackedExperts
from loraplex.kernels.linear.numba_blocks import BlockedLinear
from loraplex.kernels.linear.numba_groups import PackedGroups
from loraplex.kernels.linear.numba_int8 import PackedIntegers, in_8_bits
from loraplex.kernels.linear.packed import PackedLinear
from loraplex.kernels.weight_form import WeightForm


def numba_expert_ops(pack: Pack, activate: Activate) -> ExpertOps:
    """`pack`: numba's, of linears whose rows have the same bits in every step."""
    reference = expert_ops(pack, activate)

    def act(gate_up: torch.Tensor, kind: ExpertActivation) -> torch.Tensor:
        return numba_rows.clamped(gate_up, kind) if kind.name == "clamped" else reference.act(gate_up, kind)

    def pack_all(weights: Iterable[Any], form: WeightForm, dtype: torch.dtype) -> PackedExperts:
        return _join([pack(weight, form, dtype) for weight in weights])

    return replace(
        reference,
        route=numba_route.route,
        group=numba_rows.group,
        gather=numba_rows.gather,
        pack=pack_all,
        join=_join,
        act=act,
        combine=numba_rows.combine,
        add_gated=numba_rows.add_gated,
        keep_starts=numba_rows.keep_starts,
    )


@dataclass(frozen=True, slots=True)
class NumbaExperts(PackedExperts):
    """`linears` [E], which differ in nothing but numbers, `addresses` [parts, E] of their parts, and `places`: the
    address of each row of these, 0 for a part that the linears have not got."""

    linears: tuple[BlockedLinear, ...]
    addresses: torch.Tensor
    places: tuple[int, ...]

    def __call__(self, x: torch.Tensor, rows: ExpertRows, bias: torch.Tensor | None = None) -> torch.Tensor:
        experts, columns, inputs = self.shape
        fits = x.shape == (len(rows.row_of), inputs) and x.dtype is self.dtype and x.stride(1) == 1
        if bias is not None:
            fits = (
                fits
                and bias.shape == (experts, columns)
                and bias.dtype is self.dtype
                and bias.is_contiguous()
            )
        if not fits or not isinstance(rows, numba_rows.NumbaExpertRows) or len(rows.starts) != experts + 1:
            raise ValueError(
                f"x {list(x.shape)} {x.dtype} does not fit weights {list(self.shape)} in {self.dtype}"
            )
        own = 0 if bias is None else bias.data_ptr()
        return self.linears[0].multiply(x, own, self.places, rows.pieces.data_ptr())


def _join(linears: Sequence[PackedLinear]) -> PackedExperts:
    """One kernel for all experts, where the linears are of one kind, in groups of one size, and not of torch's."""
    experts = LinearByExpert.of(linears)
    blocked = [each for each in linears if isinstance(each, BlockedLinear)]
    kinds = {(type(each), getattr(each, "group", 0)) for each in blocked}
    if len(blocked) < len(linears) or len(kinds) > 1:
        return experts
    blocked = _alike(blocked)
    parts = [[0 if part is None else part.data_ptr() for part in each.parts] for each in blocked]
    addresses = torch.tensor(parts, dtype=torch.int64).T.contiguous()
    places = tuple(row.data_ptr() if int(row[0]) else 0 for row in addresses)
    return NumbaExperts(experts.shape, experts.dtype, tuple(blocked), addresses, places)


def _alike(linears: list[BlockedLinear]) -> list[BlockedLinear]:
    """The same weights, all with offsets or none, their codes of one number of bits, scales of one dtype."""
    made = list(linears)
    integers = [each for each in linears if isinstance(each, PackedIntegers)]
    if len({each.bits for each in integers}) > 1:
        integers = [in_8_bits(each) for each in integers]
    if len({each.scales.dtype for each in integers}) > 1:
        integers = [
            replace(
                each,
                scales=each.scales.float(),
                offsets=None if each.offsets is None else each.offsets.float(),
            )
            for each in integers
        ]
    grouped: list[Any] = integers or [each for each in made if isinstance(each, PackedGroups)]
    if any(each.offsets is not None for each in grouped):
        grouped = [
            replace(each, offsets=torch.zeros_like(each.scales)) if each.offsets is None else each
            for each in grouped
        ]
    return grouped or made
