"""Linears in compressed-tensors' formats `int-quantized` and `pack-quantized`, as llm-compressor writes them.

`weight` is int8 [N, K], or `weight_packed` int32 [N, K · bits / 32] with the lowest bits first, each number shifted up
by half of its range. w = weight_scale · (q − weight_zero_point), with scales [N, G] for G groups of inputs; a packed
zero point is packed along N (compressed_tensors/compressors, version 0.12 and on)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from loraplex.adapters.base_weights.fp8 import Fp8, block_size
from loraplex.adapters.base_weights.scheme import Scheme
from loraplex.adapters.base_weights.tensors import (
    QuantisationUnsupported,
    QuantisedTensors,
    divide,
    group_size,
    nibbles,
    refuse_unknown,
)
from loraplex.adapters.store.files import shown
from loraplex.kernels.linear.stored import GroupedWeight
from loraplex.kernels.weight_form import WeightForm

_FORMATS = ("int-quantized", "naive-quantized", "pack-quantized")
_FLOATS = "float-quantized"
_FIELDS = frozenset({
    "quant_method", "format", "config_groups", "ignore", "quantization_status", "global_compression_ratio",
    "version", "provider", "run_compressed", "kv_cache_scheme", "transform_config", "sparsity_config",
})  # fmt: skip
_GROUP_FIELDS = frozenset({
    "targets", "weights", "input_activations", "output_activations", "format",
})  # fmt: skip
_WEIGHT_FIELDS = frozenset({
    "num_bits", "type", "symmetric", "dynamic", "strategy", "group_size", "block_structure", "actorder",
    "observer", "observer_kwargs", "scale_dtype", "zp_dtype",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class CompressedTensors(Scheme):
    """A `Scheme`. `bits`: of a code; `group`: inputs of a group, -1 for a scale a row; `has_zeros`: they differ from
    the middle of the range; `int8_activations`: the checkpoint is made for activations that are rounded to 8 bits."""

    leaves = ("weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx")
    name: str
    suffix: str
    bits: int
    group: int
    has_zeros: bool
    int8_activations: bool

    @property
    def packed(self) -> bool:
        return self.suffix == "weight_packed"

    @property
    def form(self) -> WeightForm:
        activations: Literal["", "int8"] = "int8" if self.int8_activations else ""
        zeros: Literal["", "whole"] = "whole" if self.has_zeros else ""
        return WeightForm("groups", self.bits, max(0, self.group), activations, zeros)

    def is_module(self, module: str, tensors: QuantisedTensors) -> bool:
        return self.packed or f"{module}.weight_scale" in tensors

    def shape(self, module: str, tensors: QuantisedTensors) -> tuple[int, int]:
        rows, columns = tensors.matrix(f"{module}.{self.suffix}")
        if not self.packed:
            return rows, columns
        stored = tensors.read(f"{module}.weight_shape", ("I64", "I32"), (2,))
        inputs = int(stored[1])
        if int(stored[0]) != rows or -(-inputs * self.bits // 32) != columns:
            raise QuantisationUnsupported(
                f"{module}.weight_shape is {stored.tolist()}, which {rows} rows of {columns} numbers do not hold"
            )
        return rows, inputs

    def examine(
        self, module: str, tensors: QuantisedTensors
    ) -> tuple[NDArray[np.float32], NDArray[np.int16] | None, int]:
        """Scales and zeros [N, G], and the inputs of a group."""
        rows, inputs = self.shape(module, tensors)
        groups = tensors.matrix(f"{module}.weight_scale")[1]
        scales = tensors.scales(f"{module}.weight_scale", (rows, groups))
        group = divide(inputs, groups, self.group, f"{module}.weight_scale")
        _check_order(module, tensors, inputs, group)
        name = f"{module}.{self.suffix}"
        tensors.check(name, ("I32",) if self.packed else ("I8",), tensors.shape(name))
        return scales, self._zeros(module, tensors, rows, groups), group

    def read(self, module: str, tensors: QuantisedTensors) -> GroupedWeight:
        scales, zeros, group = self.examine(module, tensors)
        name, inputs = f"{module}.{self.suffix}", self.shape(module, tensors)[1]
        stored = tensors.read(name, ("I32",) if self.packed else ("I8",), tensors.shape(name))
        if not self.packed:
            codes = stored.astype(np.int16)
        else:
            codes = nibbles(stored, self.bits)[:, :inputs].astype(np.int16) - (1 << (self.bits - 1))
        return from_zeros(codes, scales, zeros, group)

    def _zeros(
        self, module: str, tensors: QuantisedTensors, rows: int, groups: int
    ) -> NDArray[np.int16] | None:
        name = f"{module}.weight_zero_point"
        if name not in tensors:
            return None
        if self.packed and tensors.dtype(name) == "I32":
            held = -(-rows * self.bits // 32)
            stored = tensors.read(name, ("I32",), (held, groups))
            numbers = nibbles(np.ascontiguousarray(stored.T), self.bits)[:, :rows].T
            return numbers.astype(np.int16) - (1 << (self.bits - 1))
        return tensors.read(name, ("I8",), (rows, groups)).astype(np.int16)


def from_zeros(
    codes: NDArray[np.int16], scales: NDArray[np.float32], zeros: NDArray[np.int16] | None, group: int
) -> GroupedWeight:
    """scales · (codes − zeros), with zeros [N, G]: within the codes where these stay within a byte, else as offsets."""
    if zeros is None or not zeros.any():
        return GroupedWeight(codes.astype(np.int8), scales, None, group)
    moved = codes - np.repeat(zeros, group, axis=1)
    if moved.min() >= -128 and moved.max() <= 127:
        return GroupedWeight(moved.astype(np.int8), scales, None, group)
    return GroupedWeight(codes.astype(np.int8), scales, scales * -zeros.astype(np.float32), group)


def _check_order(module: str, tensors: QuantisedTensors, inputs: int, group: int) -> None:
    name = f"{module}.weight_g_idx"
    if name in tensors:
        check_order(tensors.read(name, ("I32", "I64"), (inputs,)), group, name)


def check_order(groups: NDArray[Any], group: int, name: str) -> None:
    """Raises QuantisationUnsupported unless input k is in group k // group."""
    if not np.array_equal(groups, np.arange(len(groups)) // group):
        raise QuantisationUnsupported(
            f"{name}: its inputs are ordered by activation, and a group's do not lie side by side; quantise without "
            "desc_act, or with static groups"
        )


def read_compressed_tensors(config: Mapping[str, Any]) -> CompressedTensors | Fp8:
    """Raises QuantisationUnsupported."""
    form = config.get("format")
    if form not in (*_FORMATS, _FLOATS):
        raise QuantisationUnsupported(
            f"compressed-tensors' format {shown(form, 40)} is not served: {', '.join((*_FORMATS, _FLOATS))} are"
        )
    refuse_unknown("compressed-tensors' quantization_config", config, _FIELDS)
    for field in ("kv_cache_scheme", "transform_config", "sparsity_config"):
        value = config.get(field)
        if value and not (isinstance(value, dict) and value.get("format") == "dense"):
            raise QuantisationUnsupported(f"compressed-tensors' {field} is not served")
    groups = list(_groups(config))
    is_float = {weights.get("type") == "float" for weights in groups} == {True}
    if form == _FLOATS or (form == "naive-quantized" and is_float):
        return _floats(groups, activations=_rounds_activations(config, "float"))
    found = {_codes(weights, form) for weights in groups}
    if len(found) != 1:
        raise QuantisationUnsupported(
            "compressed-tensors' config_groups have codes of several kinds, or none"
        )
    ((bits, group, has_zeros),) = found
    return CompressedTensors(
        f"compressed-tensors int{bits}",
        "weight_packed" if form == "pack-quantized" else "weight",
        bits,
        group,
        has_zeros,
        _rounds_activations(config, "int"),
    )


def _rounds_activations(config: Mapping[str, Any], kind: str) -> bool:
    """Whether the activations of all linears are rounded to 8 bits of a type."""
    inputs = [group.get("input_activations") or {} for group in config["config_groups"].values()]
    return all(found.get("num_bits") == 8 and found.get("type") == kind for found in inputs)


def _floats(weights_of: Sequence[Mapping[str, Any]], *, activations: bool) -> Fp8:
    for weights in weights_of:
        if weights.get("num_bits") != 8 or weights.get("type") != "float":
            raise QuantisationUnsupported(f"compressed-tensors' {_FLOATS} weights are not floats of 8 bits")
    blocks = {block_size(weights.get("block_structure")) for weights in weights_of}
    if len(blocks) != 1:
        raise QuantisationUnsupported(
            "compressed-tensors' config_groups have blocks of several sizes, or none"
        )
    return Fp8(blocks.pop(), activations)


def _groups(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    groups = config.get("config_groups")
    if not isinstance(groups, dict):
        raise QuantisationUnsupported("compressed-tensors' config_groups are not an object")
    for group in groups.values():
        weights = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(weights, dict):
            raise QuantisationUnsupported("a group of compressed-tensors' config_groups has no weights")
        inputs = group.get("input_activations")
        if isinstance(inputs, dict) and (
            not inputs.get("dynamic") or inputs.get("strategy") not in ("token", "group")
        ):
            raise QuantisationUnsupported(
                "compressed-tensors' input_activations have one scale for several rows, a fixed one or one by which "
                "an answer would depend on its neighbours; dynamic ones by token are served"
            )
        refuse_unknown("a group of compressed-tensors' config_groups", group, _GROUP_FIELDS)
        refuse_unknown("the weights of compressed-tensors' config_groups", weights, _WEIGHT_FIELDS)
        if group.get("output_activations"):
            raise QuantisationUnsupported("compressed-tensors' output_activations are not served")
        yield weights


def _codes(weights: Mapping[str, Any], form: str) -> tuple[int, int, bool]:
    """Bits of a code, inputs of a group, and whether there are zeros."""
    bits, kind, strategy = weights.get("num_bits"), weights.get("type"), weights.get("strategy")
    if kind != "int" or bits not in (4, 8) or (form != "pack-quantized" and bits != 8):
        raise QuantisationUnsupported(
            f"compressed-tensors' weights of {shown(bits, 20)} bits of type {shown(kind, 20)} as {form} are not served"
        )
    if strategy not in ("channel", "group"):
        raise QuantisationUnsupported(
            f"compressed-tensors' strategy {shown(strategy, 20)} of weights is not served: channel and group are"
        )
    group = group_size(weights.get("group_size")) if strategy == "group" else -1
    return int(bits), group, weights.get("symmetric") is False
