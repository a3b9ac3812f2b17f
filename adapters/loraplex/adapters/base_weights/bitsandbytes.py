"""Linears as bitsandbytes stores them: nf4 (QLoRA's), its scales nested or not, and int8 with a scale a row.

nf4's values have no even steps. They are kept as codes of 8 bits in groups of 64, 0.001 to 0.003 nat from nf4 itself.
`weight` U8 [N · K / 2, 1] has two codes a byte, the first in the upper half; `weight.absmax` a scale for each block of
inputs, of all rows one behind the other, itself a code of a second table where it is nested
(bitsandbytes/functional.py, `QuantState`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loraplex.adapters.base_weights.grouped import INT8_GROUP, NotFinite, quantise_int8
from loraplex.adapters.base_weights.scheme import Scheme
from loraplex.adapters.base_weights.tensors import QuantisationUnsupported, QuantisedTensors, refuse_unknown
from loraplex.adapters.store.files import shown
from loraplex.kernels.linear.stored import GroupedWeight
from loraplex.kernels.weight_form import WeightForm

_STATE = "weight.quant_state.bitsandbytes__nf4"
_MOST_STATE_BYTES = 4096
_FIELDS = frozenset({
    "quant_method", "load_in_4bit", "load_in_8bit", "_load_in_4bit", "_load_in_8bit", "bnb_4bit_quant_type",
    "bnb_4bit_quant_storage", "bnb_4bit_use_double_quant", "bnb_4bit_compute_dtype", "llm_int8_threshold",
    "llm_int8_skip_modules", "llm_int8_enable_fp32_cpu_offload", "llm_int8_has_fp16_weight",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class BitsAndBytesNf4(Scheme):
    """A `Scheme`."""

    suffix = _STATE
    leaves = (
        "weight",
        "weight.absmax",
        "weight.quant_map",
        "weight.nested_absmax",
        "weight.nested_quant_map",
    )
    name: str = "bitsandbytes nf4"

    @property
    def form(self) -> WeightForm:
        return WeightForm("groups", 8, INT8_GROUP)

    def shape(self, module: str, tensors: QuantisedTensors) -> tuple[int, int]:
        state = _state(module, tensors)
        shape = state.get("shape")
        if (
            not isinstance(shape, list)
            or len(shape) != 2
            or not all(type(size) is int and size > 0 for size in shape)
        ):
            raise QuantisationUnsupported(f"{module}.{_STATE} has no shape of two numbers")
        rows, inputs = shape
        if tensors.shape(f"{module}.weight") != (rows * inputs // 2, 1) or rows * inputs % 2:
            raise QuantisationUnsupported(
                f"{module}.weight does not hold the {rows} × {inputs} codes of {_STATE}"
            )
        return rows, inputs

    def examine(
        self, module: str, tensors: QuantisedTensors
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """The 16 values of codes, and a scale for each block."""
        count = math.prod(self.shape(module, tensors))
        state = _state(module, tensors)
        block = _number(state, "blocksize", module)
        if count % block:
            raise QuantisationUnsupported(f"{module}.weight: {count} codes in blocks of {block}")
        tensors.check(f"{module}.weight", ("U8",), (count // 2, 1))
        table = tensors.scales(f"{module}.weight.quant_map", (16,))
        return table, _scales(module, tensors, state, count // block)

    def read(self, module: str, tensors: QuantisedTensors) -> GroupedWeight:
        shape = self.shape(module, tensors)
        table, scales = self.examine(module, tensors)
        packed = tensors.read(f"{module}.weight", ("U8",), (math.prod(shape) // 2, 1)).reshape(-1)
        values = table[np.stack((packed >> 4, packed & 15), axis=1).reshape(len(scales), -1)]
        values *= scales[:, None]
        try:
            return quantise_int8(values.reshape(shape))
        except NotFinite as error:
            raise QuantisationUnsupported(f"{module}.weight: {error}") from error


@dataclass(frozen=True, slots=True)
class BitsAndBytesInt8(Scheme):
    """A `Scheme`: `weight` int8 [N, K] and `SCB` [N], the largest magnitude of each row."""

    suffix = "SCB"
    leaves = ("weight", "weight_format")
    name: str = "bitsandbytes int8"

    @property
    def form(self) -> WeightForm:
        return WeightForm("groups", 8)

    def shape(self, module: str, tensors: QuantisedTensors) -> tuple[int, int]:
        return tensors.matrix(f"{module}.weight")

    def examine(self, module: str, tensors: QuantisedTensors) -> None:
        rows, inputs = self.shape(module, tensors)
        if inputs % 2:
            raise QuantisationUnsupported(f"{module}.weight has {inputs} inputs, an odd number")
        tensors.check(f"{module}.weight", ("I8",), (rows, inputs))
        tensors.scales(f"{module}.SCB", (rows,))

    def read(self, module: str, tensors: QuantisedTensors) -> GroupedWeight:
        self.examine(module, tensors)
        rows, inputs = self.shape(module, tensors)
        codes = tensors.read(f"{module}.weight", ("I8",), (rows, inputs))
        scales = tensors.scales(f"{module}.SCB", (rows,)) / np.float32(127)
        return GroupedWeight(codes.astype(np.int8), scales[:, None], None, inputs)


def _state(module: str, tensors: QuantisedTensors) -> dict[str, Any]:
    name = f"{module}.{_STATE}"
    shape = tensors.shape(name)
    if len(shape) != 1 or shape[0] > _MOST_STATE_BYTES:
        raise QuantisationUnsupported(
            f"{name} has the shape {list(shape)}, not at most {_MOST_STATE_BYTES} bytes"
        )
    try:
        state = json.loads(tensors.read(name, ("U8",), shape).tobytes())
    except (ValueError, RecursionError) as error:
        raise QuantisationUnsupported(f"{name} is no JSON: {error}") from error
    if not isinstance(state, dict) or state.get("quant_type") != "nf4":
        raise QuantisationUnsupported(f"{name} does not say quant_type nf4")
    return state


def _number(state: Mapping[str, Any], name: str, module: str) -> int:
    value = state.get(name)
    if type(value) is not int or not 1 <= value <= 1 << 20:
        raise QuantisationUnsupported(f"{module}.{_STATE} has no usable {name}")
    return value


def _scales(
    module: str, tensors: QuantisedTensors, state: Mapping[str, Any], count: int
) -> NDArray[np.float32]:
    """A scale for each of `count` blocks."""
    name = f"{module}.weight.absmax"
    if tensors.dtype(name) != "U8":
        return tensors.scales(name, (count,))
    block = _number(state, "nested_blocksize", module)
    try:
        offset = float(state["nested_offset"])
    except (KeyError, TypeError, ValueError, OverflowError):
        offset = math.inf
    if not math.isfinite(offset):
        raise QuantisationUnsupported(f"{module}.{_STATE} has no usable nested_offset")
    table = tensors.scales(f"{module}.weight.nested_quant_map", (256,))
    outer = tensors.scales(f"{module}.weight.nested_absmax", (-(-count // block),))
    codes = tensors.read(name, ("U8",), (count,))
    found: NDArray[np.float32] = table[codes] * np.repeat(outer, block)[:count] + np.float32(offset)
    return found


def read_bitsandbytes(config: Mapping[str, Any]) -> BitsAndBytesNf4 | BitsAndBytesInt8:
    """Raises QuantisationUnsupported."""
    refuse_unknown("bitsandbytes' quantization_config", config, _FIELDS)
    if config.get("load_in_8bit") or config.get("_load_in_8bit"):
        return BitsAndBytesInt8()
    kind = config.get("bnb_4bit_quant_type")
    if kind != "nf4":
        raise QuantisationUnsupported(
            f"bitsandbytes' 4-bit type {shown(kind, 20)} is not served: nf4 and 8 bits are"
        )
    if config.get("bnb_4bit_quant_storage", "uint8") not in (None, "uint8"):
        raise QuantisationUnsupported("bitsandbytes' codes are not stored as uint8")
    return BitsAndBytesNf4()
