"""Linears as GPTQ's and AWQ's tools store them: 32-bit numbers that hold eight codes of 4 bits, or four of 8.

GPTQ (AutoGPTQ, GPTQModel): `qweight` [K · bits / 32, N], packed along the inputs; `qzeros` [G, N · bits / 32] and
`scales` [G, N], a row a group; `g_idx` [K], the group of each input. Version 1 stores each zero less 1. AWQ (AutoAWQ's
gemm): `qweight` [K, N / 8], packed along the outputs in the order 0 2 4 6 1 3 5 7, and zeros as they are. w = scale ·
(q − zero)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loraplex.adapters.base_weights.compressed_tensors import check_order, from_zeros
from loraplex.adapters.base_weights.scheme import Scheme
from loraplex.adapters.base_weights.tensors import (
    QuantisationUnsupported,
    QuantisedTensors,
    group_size,
    nibbles,
)
from loraplex.adapters.base_weights.words import AWQ, GPTQ, flag
from loraplex.adapters.store.files import shown
from loraplex.kernels.linear.stored import GroupedWeight
from loraplex.kernels.weight_form import WeightForm

_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Which of a number's nibbles holds each of eight outputs in turn."""


@dataclass(frozen=True, slots=True)
class Gptq(Scheme):
    """A `Scheme`. `zero_shift` is what is added to a stored zero; `has_zeros`: they differ from the middle of the
    range; `is_symmetric`: they may not."""

    suffix = "qweight"
    leaves = ("qzeros", "scales", "g_idx")
    has_heads = True
    name: str
    bits: int
    group: int
    has_zeros: bool
    is_symmetric: bool
    zero_shift: int

    @property
    def form(self) -> WeightForm:
        return WeightForm("groups", self.bits, max(0, self.group), zeros="whole" if self.has_zeros else "")

    def shape(self, module: str, tensors: QuantisedTensors) -> tuple[int, int]:
        held, rows = tensors.matrix(f"{module}.qweight")
        zeros = tensors.matrix(f"{module}.qzeros")[1]
        if zeros != -(-rows * self.bits // 32) and zeros * 32 % rows == 0:
            raise QuantisationUnsupported(
                f"{module}.qzeros has {rows} zeros of {zeros * 32 // rows} bits, and quantization_config says bits "
                f"{self.bits}"
            )
        return rows, held * (32 // self.bits)

    def examine(
        self, module: str, tensors: QuantisedTensors
    ) -> tuple[NDArray[np.float32], NDArray[np.int16], int]:
        """Scales and zeros [N, G], and the inputs of a group. See `Scheme`."""
        rows, inputs = self.shape(module, tensors)
        groups = tensors.matrix(f"{module}.scales")[0]
        group = stored_group(inputs, groups, self.group, f"{module}.scales")
        if f"{module}.g_idx" in tensors:
            order = tensors.read(f"{module}.g_idx", ("I32", "I64"), (inputs,))
            check_order(order, group, f"{module}.g_idx")
        scales = tensors.scales(f"{module}.scales", (groups, rows)).T
        tensors.check(f"{module}.qweight", ("I32",), (inputs * self.bits // 32, rows))
        zero_shape = (groups, -(-rows * self.bits // 32))
        stored = nibbles(tensors.read(f"{module}.qzeros", ("I32",), zero_shape), self.bits)[:, :rows].T
        zeros = stored.astype(np.int16) + self.zero_shift
        middle = 1 << (self.bits - 1)
        if self.is_symmetric and (zeros != middle).any():
            raise QuantisationUnsupported(
                f"{module}.qzeros has zeros that are not {middle}, and quantization_config says sym: true; is its "
                "checkpoint_format (gptq, gptq_v2) another?"
            )
        return even_groups(scales, zeros, inputs, group, f"{module}.scales")

    def read(self, module: str, tensors: QuantisedTensors) -> GroupedWeight:
        scales, zeros, group = self.examine(module, tensors)
        packed = tensors.read(f"{module}.qweight", ("I32",), tensors.shape(f"{module}.qweight"))
        codes = nibbles(np.ascontiguousarray(packed.T), self.bits)
        return _grouped(codes, scales, zeros, group, self.bits)


@dataclass(frozen=True, slots=True)
class Awq(Scheme):
    """A `Scheme` of 4 bits. `has_zeros`: else each zero is the middle of the range."""

    suffix = "qweight"
    leaves = ("qzeros", "scales")
    has_heads = True
    name: str
    has_zeros: bool
    group: int

    @property
    def form(self) -> WeightForm:
        return WeightForm("groups", 4, max(0, self.group), zeros="whole" if self.has_zeros else "")

    def shape(self, module: str, tensors: QuantisedTensors) -> tuple[int, int]:
        inputs, held = tensors.matrix(f"{module}.qweight")
        return 8 * held, inputs

    def examine(
        self, module: str, tensors: QuantisedTensors
    ) -> tuple[NDArray[np.float32], NDArray[np.int16], int]:
        """Scales and zeros [N, G], and the inputs of a group. See `Scheme`."""
        rows, inputs = self.shape(module, tensors)
        groups = tensors.matrix(f"{module}.scales")[0]
        group = stored_group(inputs, groups, self.group, f"{module}.scales")
        scales = tensors.scales(f"{module}.scales", (groups, rows)).T
        tensors.check(f"{module}.qweight", ("I32",), (inputs, rows // 8))
        zeros = np.full((rows, groups), 8, np.int16)
        if self.has_zeros or f"{module}.qzeros" in tensors:
            stored = tensors.read(f"{module}.qzeros", ("I32",), (groups, rows // 8))
            zeros = _in_order(stored).T.astype(np.int16)
        if not self.has_zeros and (zeros != 8).any():
            raise QuantisationUnsupported(
                f"{module}.qzeros has zeros that are not 8, and quantization_config says zero_point: false"
            )
        return even_groups(scales, zeros, inputs, group, f"{module}.scales")

    def read(self, module: str, tensors: QuantisedTensors) -> GroupedWeight:
        scales, zeros, group = self.examine(module, tensors)
        codes = tensors.read(f"{module}.qweight", ("I32",), tensors.shape(f"{module}.qweight"))
        return _grouped(_in_order(codes).T, scales, zeros, group, 4)


def stored_group(inputs: int, groups: int, configured: int, name: str) -> int:
    """Inputs of a group. The last group may have fewer. `configured`: as the config says, below 1 for a scale a row.
    Raises QuantisationUnsupported where the scales, which `name` names, are of other groups."""
    group = inputs if configured < 1 else configured
    if -(-inputs // group) != groups:
        raise QuantisationUnsupported(
            f"{name} has {groups} groups of {inputs} inputs, and quantization_config says group_size {configured}"
        )
    return group


def even_groups(
    scales: NDArray[np.float32], zeros: NDArray[np.int16], inputs: int, group: int, name: str
) -> tuple[NDArray[np.float32], NDArray[np.int16], int]:
    """The same for groups of one size: where the last has fewer inputs, all are divided. Raises
    QuantisationUnsupported for groups of an odd number of inputs."""
    each = gcd(inputs, group)
    if each % 2:
        raise QuantisationUnsupported(
            f"{name}: {inputs} inputs in groups of {group} are an odd number in one"
        )
    times, count = group // each, inputs // each
    if times == 1:
        return scales, zeros, each
    return np.repeat(scales, times, axis=1)[:, :count], np.repeat(zeros, times, axis=1)[:, :count], each


def _in_order(packed: NDArray[np.int32]) -> NDArray[np.uint8]:
    """[R, P] int32 → [R, 8 · P] in the order of the outputs."""
    numbers = nibbles(packed, 4).reshape(*packed.shape, 8)
    return numbers[..., _AWQ_PLACES].reshape(len(packed), -1)


def _grouped(
    codes: NDArray[np.uint8], scales: NDArray[np.float32], zeros: NDArray[np.int16], group: int, bits: int
) -> GroupedWeight:
    # Around 0, so that codes of 8 bits fit a signed byte too.
    middle = 1 << (bits - 1)
    moved = np.ascontiguousarray(codes).astype(np.int16) - middle
    return from_zeros(moved, np.ascontiguousarray(scales), np.ascontiguousarray(zeros - middle), group)


def read_gptq(config: Mapping[str, Any]) -> Gptq:
    """Raises QuantisationUnsupported."""
    GPTQ.check(config)
    bits, forms = config.get("bits"), [config.get(name) for name in ("checkpoint_format", "format")]
    if type(bits) is not int or bits not in (4, 8):
        raise QuantisationUnsupported(f"GPTQ's codes of {shown(bits, 20)} bits are not served: 4 and 8 are")
    stored = {form.lower() for form in forms if isinstance(form, str)}
    if len(stored) > 1:
        raise QuantisationUnsupported(
            "GPTQ's checkpoint_format is {}, and its format {}: its zeros differ by 1".format(
                *map(shown, forms)
            )
        )
    sym, group = flag("GPTQ", "sym", config.get("sym")), group_size(config.get("group_size"))
    return Gptq(f"gptq int{bits}", bits, group, sym is False, sym is True, 0 if "gptq_v2" in stored else 1)


def read_awq(config: Mapping[str, Any]) -> Awq:
    """Raises QuantisationUnsupported."""
    AWQ.check(config)
    bits = config.get("bits", config.get("w_bit"))
    if type(bits) is not int or bits != 4:
        raise QuantisationUnsupported(f"AWQ's codes of {shown(bits, 20)} bits are not served: 4 are")
    if config.get("backend") == "llm-awq":
        raise QuantisationUnsupported("AWQ's backend 'llm-awq' is not served: its codes are packed otherwise")
    has_zeros = flag("AWQ", "zero_point", config.get("zero_point"))
    group = group_size(config.get("group_size", config.get("q_group_size")))
    return Awq("awq int4", has_zeros is not False, group)


def read_auto_round(config: Mapping[str, Any]) -> Gptq | Awq:
    """AutoRound's own settings over tensors of GPTQ's or AWQ's form. Raises QuantisationUnsupported."""
    packing = config.get("packing_format") or config.get("backend") or "auto_round:gptq"
    parts = packing.lower().split(":") if isinstance(packing, str) else [""]
    if parts[0] not in ("auto_round", "auto_gptq", "auto_awq") or not _PACKINGS.issuperset(parts[1:]):
        raise QuantisationUnsupported(f"AutoRound's packing_format {shown(packing, 60)} is not served")
    # What these fields hold here are other names than GPTQ's and AWQ's.
    given = {name: value for name, value in config.items() if name not in ("quant_method", "backend")}
    if any(part.endswith("awq") for part in parts):
        if "zero_point" not in given and given.get("sym") is not None:
            given["zero_point"] = not flag("AutoRound", "sym", given["sym"])
        return read_awq(given)
    # AutoRound's own packing, and GPTQModel's, store zeros as they are.
    is_first = any(part in ("gptq", "auto_gptq") for part in parts)
    return read_gptq(given | {"checkpoint_format": "gptq" if is_first else "gptq_v2", "format": None})


_PACKINGS = frozenset(
    {"gptq", "auto_gptq", "gptqmodel", "awq", "auto_awq", "exllamav2", "tritonv2", "triton", "torch"}
)
"""Parts of AutoRound's packing_format behind its first."""
