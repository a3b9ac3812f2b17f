"""Linears of experts in MXFP4 (OCP Microscaling Formats, version 1.0), as gpt-oss's files have them.

`gate_up_proj_blocks` uint8 [E, 2·I, H / 32, 16] with gate and up in turns by rows, `down_proj_blocks` [E, H, I / 32,
16], the low half of a byte first; `…_scales` uint8, one for 32 inputs. A half is one of 0, ½, 1, 1½, 2, 3, 4, 6 and
their negatives, times 2^(scale − 127). Twice that is a whole number: a code from −12 to 12, times 2^(scale − 128).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loraplex.adapters.base_weights.scheme import Scheme
from loraplex.adapters.base_weights.tensors import QuantisationUnsupported, QuantisedTensors, refuse_unknown
from loraplex.kernels.linear.stored import GroupedWeight
from loraplex.kernels.weight_form import WeightForm

_GROUP = 32
_CODES = np.array((0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12), np.int8)
_MOST_SCALE = 252
"""From the next one on the largest code overflows in bfloat16 and float32."""
_STACK = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)_blocks")
_LINEAR = re.compile(r"(.*\.experts)\.(\d{1,6})\.(gate|up|down)_proj")


@dataclass(frozen=True, slots=True)
class Mxfp4(Scheme):
    """A scheme of the experts of a mixture alone, which lie in stacks."""

    suffix = "gate_up_proj_blocks"
    leaves = ()
    experts_alone = True
    name: str = "mxfp4"

    @property
    def form(self) -> WeightForm:
        return WeightForm("groups", 8, _GROUP, scale_bytes=4)

    def modules(self, tensors: QuantisedTensors) -> Iterable[str]:
        for name in tensors:
            if found := _STACK.fullmatch(name):
                sites = ("gate_proj", "up_proj") if found[2] == "gate_up_proj" else ("down_proj",)
                for expert in range(_sizes(name, tensors)[0]):
                    yield from (f"{found[1]}.{expert}.{site}" for site in sites)

    def names(self, module: str) -> tuple[str, ...]:
        stack, _, _, _ = _place(module)
        return f"{stack}_blocks", f"{stack}_scales"

    def shape(self, module: str, tensors: QuantisedTensors) -> tuple[int, int]:
        stack, _, _, step = _place(module)
        _, rows, groups = _sizes(f"{stack}_blocks", tensors)
        if rows % step:
            raise QuantisationUnsupported(
                f"{stack}_blocks has {rows} rows, which are no gates and ups in turns"
            )
        return rows // step, groups * _GROUP

    def examine(self, module: str, tensors: QuantisedTensors) -> NDArray[np.float32]:
        """The scales [N, K / 32]."""
        stack, expert, first, step = _place(module)
        self.shape(module, tensors)
        count, rows, groups = _sizes(f"{stack}_blocks", tensors)
        name = f"{stack}_scales"
        tensors.check(name, ("U8",), (count, rows, groups))
        scales = tensors.part(name, expert)[first::step]
        if scales.max(initial=0) > _MOST_SCALE:
            raise QuantisationUnsupported(
                f"{name} has the scale {scales.max()} for expert {expert}, and the largest that is served is "
                f"{_MOST_SCALE}: 2^125"
            )
        return np.ldexp(np.float32(1), scales.astype(np.int32) - 128).astype(np.float32)

    def read(self, module: str, tensors: QuantisedTensors) -> GroupedWeight:
        scales = self.examine(module, tensors)
        stack, expert, first, step = _place(module)
        blocks = tensors.part(f"{stack}_blocks", expert)[first::step]
        codes = np.stack((_CODES[blocks & 15], _CODES[blocks >> 4]), -1)
        return GroupedWeight(codes.reshape(len(blocks), -1), scales, None, _GROUP)


def _place(module: str) -> tuple[str, int, int, int]:
    """The stack that a linear lies in, its expert, its first row there, and from which row to the next."""
    found = _LINEAR.fullmatch(module)
    if found is None:
        raise QuantisationUnsupported(f"{module} is no linear of an expert, which MXFP4 is read for")
    if found[3] == "down":
        return f"{found[1]}.down_proj", int(found[2]), 0, 1
    return f"{found[1]}.gate_up_proj", int(found[2]), int(found[3] == "up"), 2


def _sizes(name: str, tensors: QuantisedTensors) -> tuple[int, int, int]:
    """Experts, rows and groups of a stack of blocks."""
    shape = tensors.shape(name)
    if (
        len(shape) != 4
        or 0 in shape
        or shape[3] != _GROUP // 2
        or shape[0] > 1 << 12
        or tensors.dtype(name) != "U8"
    ):
        raise QuantisationUnsupported(
            f"{name} is {tensors.dtype(name)} {list(shape)}, not U8 [experts, rows, inputs / {_GROUP}, {_GROUP // 2}]"
        )
    return shape[0], shape[1], shape[2]


def read_mxfp4(config: Mapping[str, Any]) -> Mxfp4:
    """Raises QuantisationUnsupported. Which modules are left out is told by their tensors."""
    refuse_unknown("mxfp4", config, frozenset({"quant_method", "modules_to_not_convert"}))
    return Mxfp4()
