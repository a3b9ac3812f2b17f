"""Linears as GPTQ's and AWQ's tools store them: 32-bit numbers that hold eight codes of 4 bits, or four of 8.

GPTQ (AutoGPTQ, GPTQModel): `qweight` [K · bits / 32, N], packed along the inputs; `qzeros` [G, N · bits / 32] and
`scales` [G, N], a row a group; `g_idx` [K], the group of each input. Version 1 stores each zero less 1. AWQ (AutoAWQ's
gemm): `qweight` [K, N / 8], packed along the outputs in the order 0 2 4 6 1 3 5 7, and zeros as they are. w = scale ·
(q − zero)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loraplex.adapters.base_weights.compressed_tensors import check_order, from_zeros
from loraplex.adapters.base_weights.grouped import Grouped
from loraplex.adapters.base_weights.tensors import (
    QuantisationUnsupported,
    QuantisedTensors,
    divide,
    group_size,
    nibbles,
    refuse_unknown,
)

_GPTQ_FIELDS = frozenset({
    "quant_method", "bits", "group_size", "checkpoint_format", "pack_dtype", "dynamic", "sym", "desc_act",
    "static_groups", "lm_head", "true_sequential", "damp_percent", "damp_auto_increment", "mse",
    "act_group_aware", "hyb_act", "failsafe", "parallel_packing", "offload_to_disk", "quantizer", "meta",
    "version", "format", "dataset", "tokenizer", "model_name_or_path", "model_file_base_name", "model_seqlen",
    "batch_size", "pad_token_id", "block_name_to_quantize", "module_name_preceding_first_block",
    "modules_in_block_to_quantize", "cache_block_outputs", "backend", "use_cuda_fp16", "use_exllama",
    "disable_exllama", "exllama_config", "max_input_length",
})  # fmt: skip
"""Settings that are read here, that say how the codes were found, or how another program computes with them."""
_AWQ_FIELDS = frozenset({
    "quant_method", "bits", "w_bit", "group_size", "q_group_size", "version", "zero_point",
    "modules_to_not_convert", "backend", "do_fuse", "fuse_max_seq_len", "modules_to_fuse", "exllama_config",
})  # fmt: skip

_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Which of a number's nibbles holds each of eight outputs in turn."""


@dataclass(frozen=True, slots=True)
class Gptq:
    """A `Scheme`. `zero_shift` is what is added to a stored zero; `has_zeros`: they differ from the middle of the
    range."""

    name: str
    bits: int
    group: int
    has_zeros: bool
    zero_shift: int

    @property
    def suffix(self) -> str:
        return "qweight"

    def is_module(self, module: str, tensors: QuantisedTensors) -> bool:
        return True

    def shape(self, module: str, tensors: QuantisedTensors) -> tuple[int, int]:
        held, rows = tensors.matrix(f"{module}.qweight")
        return rows, held * (32 // self.bits)

    def names(self, module: str) -> tuple[str, ...]:
        return tuple(f"{module}.{leaf}" for leaf in ("qweight", "qzeros", "scales", "g_idx"))

    def read(self, module: str, tensors: QuantisedTensors) -> Grouped:
        rows, inputs = self.shape(module, tensors)
        groups = tensors.matrix(f"{module}.scales")[0]
        group = divide(inputs, groups, self.group, f"{module}.scales")
        if f"{module}.g_idx" in tensors:
            order = tensors.read(f"{module}.g_idx", ("I32", "I64"), (inputs,))
            check_order(order, group, f"{module}.g_idx")
        scales = tensors.scales(f"{module}.scales", (groups, rows)).T
        held = tensors.shape(f"{module}.qweight")
        packed = tensors.read(f"{module}.qweight", ("I32",), held)
        codes = nibbles(np.ascontiguousarray(packed.T), self.bits)
        zero_shape = (groups, -(-rows * self.bits // 32))
        zeros = nibbles(tensors.read(f"{module}.qzeros", ("I32",), zero_shape), self.bits)[:, :rows].T
        return _grouped(codes, scales, zeros.astype(np.int16) + self.zero_shift, group, self.bits)


@dataclass(frozen=True, slots=True)
class Awq:
    """A `Scheme` of 4 bits. `has_zeros`: else each zero is the middle of the range."""

    name: str
    has_zeros: bool
    group: int

    @property
    def suffix(self) -> str:
        return "qweight"

    def is_module(self, module: str, tensors: QuantisedTensors) -> bool:
        return True

    def shape(self, module: str, tensors: QuantisedTensors) -> tuple[int, int]:
        inputs, held = tensors.matrix(f"{module}.qweight")
        return 8 * held, inputs

    def names(self, module: str) -> tuple[str, ...]:
        return tuple(f"{module}.{leaf}" for leaf in ("qweight", "qzeros", "scales"))

    def read(self, module: str, tensors: QuantisedTensors) -> Grouped:
        rows, inputs = self.shape(module, tensors)
        groups = tensors.matrix(f"{module}.scales")[0]
        group = divide(inputs, groups, self.group, f"{module}.scales")
        scales = tensors.scales(f"{module}.scales", (groups, rows)).T
        codes = _in_order(tensors.read(f"{module}.qweight", ("I32",), (inputs, rows // 8))).T
        zeros = np.full((rows, groups), 8, np.int16)
        if self.has_zeros:
            stored = tensors.read(f"{module}.qzeros", ("I32",), (groups, rows // 8))
            zeros = _in_order(stored).T.astype(np.int16)
        return _grouped(codes, scales, zeros, group, 4)


def _in_order(packed: NDArray[np.int32]) -> NDArray[np.uint8]:
    """[R, P] int32 → [R, 8 · P] in the order of the outputs."""
    numbers = nibbles(packed, 4).reshape(*packed.shape, 8)
    return numbers[..., _AWQ_PLACES].reshape(len(packed), -1)


def _grouped(
    codes: NDArray[np.uint8], scales: NDArray[np.float32], zeros: NDArray[np.int16], group: int, bits: int
) -> Grouped:
    # Around 0, so that codes of 8 bits fit a signed byte too.
    middle = 1 << (bits - 1)
    moved = np.ascontiguousarray(codes).astype(np.int16) - middle
    return from_zeros(moved, np.ascontiguousarray(scales), np.ascontiguousarray(zeros - middle), group)


def read_gptq(config: Mapping[str, Any]) -> Gptq:
    """Raises QuantisationUnsupported."""
    refuse_unknown("GPTQ's quantization_config", config, _GPTQ_FIELDS)
    bits, form = config.get("bits"), config.get("checkpoint_format", "gptq")
    if bits not in (4, 8):
        raise QuantisationUnsupported(f"GPTQ's codes of {str(bits)[:8]} bits are not served: 4 and 8 are")
    if form not in ("gptq", "gptq_v2"):
        raise QuantisationUnsupported(
            f"GPTQ's checkpoint_format {str(form)[:30]!a} is not served: gptq and gptq_v2 are"
        )
    if config.get("pack_dtype") not in (None, "int32"):
        raise QuantisationUnsupported("GPTQ's pack_dtype is not int32")
    if config.get("dynamic"):
        raise QuantisationUnsupported("GPTQ's settings by module (dynamic) are not served")
    group, is_first = group_size(config.get("group_size")), form == "gptq"
    return Gptq(f"gptq int{bits}", int(bits), group, config.get("sym") is False, 1 if is_first else 0)


def read_awq(config: Mapping[str, Any]) -> Awq:
    """Raises QuantisationUnsupported."""
    refuse_unknown("AWQ's quantization_config", config, _AWQ_FIELDS)
    bits, version = config.get("bits", config.get("w_bit")), str(config.get("version", "gemm")).lower()
    if bits != 4 or version != "gemm":
        raise QuantisationUnsupported(
            f"AWQ's codes of {str(bits)[:8]} bits in version {version[:20]!a} are not served: 4 bits in gemm are"
        )
    group = group_size(config.get("group_size", config.get("q_group_size")))
    return Awq("awq int4", bool(config.get("zero_point", True)), group)
