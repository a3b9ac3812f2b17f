"""Tiny checkpoints as quantising tools store them, each beside the weights that its codes stand for.

The writers follow the tools' own code: compressed_tensors' `pack_to_int32`, AutoGPTQ's `QuantLinear.pack`, AutoAWQ's
`WQLinear_GEMM.from_linear`, bitsandbytes' `QuantState.as_dict`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from loraplex.adapters.base_weights.nf4 import NF4
from support.models.quantised import is_linear

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Grid:
    """Codes [N, K] from 0 to 2^bits - 1, scales and zeros [N, G]; `dense` = scales · (codes - zeros)."""

    codes: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray
    bits: int

    @property
    def group(self) -> int:
        return self.codes.shape[1] // self.scales.shape[1]

    @property
    def dense(self) -> np.ndarray:
        zeros, scales = (np.repeat(each, self.group, axis=1) for each in (self.zeros, self.scales))
        return (scales.astype(np.float64) * (self.codes.astype(np.float64) - zeros)).astype(np.float32)


def grid(weight: np.ndarray, bits: int, group: int, *, symmetric: bool) -> Grid:
    """The nearest weights on a grid, scales in float16 as the tools store them."""
    rows, inputs = weight.shape
    group = inputs if group < 1 else group
    grouped = weight.reshape(rows, -1, group)
    most, middle = (1 << bits) - 1, 1 << (bits - 1)
    if symmetric:
        scales = np.abs(grouped).max(2) / (middle - 1)
        zeros = np.full(scales.shape, middle)
    else:
        low, high = np.minimum(grouped.min(2), 0), np.maximum(grouped.max(2), 0)
        scales = (high - low) / most
        zeros = np.clip(np.round(-low / scales), 0, most)
    scales = scales.astype(np.float16).astype(np.float32)
    codes = np.clip(np.round(grouped / scales[..., None]) + zeros[..., None], 0, most).reshape(rows, inputs)
    return Grid(codes.astype(np.int64), scales, zeros.astype(np.int64), bits)


def pack(numbers: np.ndarray, bits: int) -> torch.Tensor:
    """[R, C] → [R, C · bits / 32] int32, the lowest bits first."""
    each = 32 // bits
    padded = np.pad(numbers, ((0, 0), (0, -numbers.shape[1] % each))).astype(np.uint64)
    packed = np.zeros((len(padded), padded.shape[1] // each), np.uint64)
    for place in range(each):
        packed |= padded[:, place::each] << np.uint64(bits * place)
    return torch.from_numpy(packed.astype(np.uint32).view(np.int32).copy())


def _half(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).half()


def _compressed(found: Grid, *, packed: bool) -> Tensors:
    shift = 1 << (found.bits - 1)
    made = {"weight_scale": _half(found.scales)}
    if packed:
        made["weight_packed"] = pack(found.codes, found.bits)
        made["weight_shape"] = torch.tensor(found.codes.shape)
        if (found.zeros != shift).any():
            made["weight_zero_point"] = pack(found.zeros.T, found.bits).T.contiguous()
    else:
        made["weight"] = torch.from_numpy((found.codes - shift).astype(np.int8))
        if (found.zeros != shift).any():
            made["weight_zero_point"] = torch.from_numpy((found.zeros - shift).astype(np.int8))
    return made


def _gptq(found: Grid, *, shift: int) -> Tensors:
    inputs = found.codes.shape[1]
    return {
        "qweight": pack(found.codes, found.bits).T.contiguous(),
        "qzeros": pack((found.zeros.T - shift) % (1 << found.bits), found.bits),
        "scales": _half(found.scales.T),
        "g_idx": torch.arange(inputs, dtype=torch.int32) // found.group,
    }


def _awq(found: Grid) -> Tensors:
    def reordered(columns: np.ndarray) -> np.ndarray:
        return columns.reshape(len(columns), -1, 8)[:, :, [0, 2, 4, 6, 1, 3, 5, 7]].reshape(columns.shape)

    return {
        "qweight": pack(reordered(found.codes.T), 4),
        "qzeros": pack(reordered(found.zeros.T), 4),
        "scales": _half(found.scales.T),
    }


def _nf4(weight: np.ndarray, *, nested: bool) -> tuple[Tensors, np.ndarray]:
    table = np.array(NF4, np.float32)
    blocks = weight.reshape(-1, 64)
    scales = np.abs(blocks).max(1)
    state: dict[str, Any] = {
        "quant_type": "nf4",
        "blocksize": 64,
        "dtype": "float32",
        "shape": list(weight.shape),
    }
    made: Tensors = {}
    if nested:
        offset = float(scales.mean())
        inner = np.linspace(-1, 1, 256).astype(np.float32)
        outer = np.abs(scales - offset).reshape(-1)
        size = np.array([np.abs(outer[first : first + 256]).max() for first in range(0, len(outer), 256)])
        size = size.astype(np.float32)
        ratio = (scales - offset) / np.repeat(size, 256)[: len(scales)]
        found = np.abs(ratio[:, None] - inner).argmin(1)
        scales = inner[found] * np.repeat(size, 256)[: len(found)] + np.float32(offset)
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
        made["weight.absmax"] = torch.from_numpy(found.astype(np.uint8))
        made["weight.nested_absmax"] = torch.from_numpy(size)
        made["weight.nested_quant_map"] = torch.from_numpy(inner)
    else:
        made["weight.absmax"] = torch.from_numpy(scales.astype(np.float32))
    codes = np.abs(blocks[..., None] / np.maximum(scales, 1e-9)[:, None, None] - table).argmin(2)
    flat = codes.reshape(-1).astype(np.uint8)
    made["weight"] = torch.from_numpy((flat[::2] << 4 | flat[1::2])[:, None].copy())
    made["weight.quant_map"] = torch.from_numpy(table)
    encoded = json.dumps(state).encode()
    made["weight.quant_state.bitsandbytes__nf4"] = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
    return made, (table[codes] * scales[:, None].astype(np.float32)).reshape(weight.shape)


@dataclass(frozen=True)
class Format:
    """`config` is the checkpoint's `quantization_config`; `write` gives a module's tensors and what they stand for."""

    config: dict[str, Any]
    write: Callable[[np.ndarray], tuple[Tensors, np.ndarray]]
    exact: bool = True


def _of_grid(
    config: dict[str, Any], store: Callable[[Grid], Tensors], bits: int, group: int, *, symmetric: bool = True
) -> Format:
    def write(weight: np.ndarray) -> tuple[Tensors, np.ndarray]:
        found = grid(weight, bits, group, symmetric=symmetric)
        return store(found), found.dense

    return Format(config, write)


def _compressed_format(bits: int, group: int, *, packed: bool, symmetric: bool = True) -> Format:
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "dynamic": False}
    weights |= (
        {"strategy": "group", "group_size": group}
        if group > 0
        else {"strategy": "channel", "group_size": None}
    )
    inputs = None if packed else {"num_bits": 8, "type": "int", "dynamic": True, "strategy": "token"}
    config = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized" if packed else "int-quantized",
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
        },
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
    }
    return _of_grid(config, lambda found: _compressed(found, packed=packed), bits, group, symmetric=symmetric)


def _gptq_format(bits: int, group: int, version: int, *, symmetric: bool = True) -> Format:
    form = "gptq" if version == 1 else "gptq_v2"
    config = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group,
        "checkpoint_format": form,
        "desc_act": False,
        "sym": symmetric,
    }
    return _of_grid(config, lambda found: _gptq(found, shift=2 - version), bits, group, symmetric=symmetric)


def _smaller_last_group(weight: np.ndarray) -> tuple[Tensors, np.ndarray]:
    """As AutoRound stores 96 inputs in groups of 64: the last group has 32."""
    inputs = weight.shape[1]
    found = grid(np.pad(weight, ((0, 0), (0, -inputs % 64))), 4, 64, symmetric=False)
    made = _gptq(found, shift=1)
    made |= {"qweight": made["qweight"][: inputs // 8], "g_idx": made["g_idx"][:inputs]}
    return made, found.dense[:, :inputs]


def _scb(weight: np.ndarray) -> tuple[Tensors, np.ndarray]:
    most = np.abs(weight).max(1).astype(np.float32)
    codes = np.round(weight / most[:, None] * 127).astype(np.int8)
    made = {"weight": torch.from_numpy(codes), "SCB": torch.from_numpy(most)}
    return made, codes.astype(np.float32) * (most / np.float32(127))[:, None]


def _fp8(leaf: str, high: int, wide: int) -> Callable[[np.ndarray], tuple[Tensors, np.ndarray]]:
    """A scale for each block of `high` rows and `wide` inputs (0: all), as compressed_tensors and DeepSeek have it."""

    def write(weight: np.ndarray) -> tuple[Tensors, np.ndarray]:
        rows, inputs = weight.shape
        blocks = weight.reshape(rows // high, high, -1, wide or inputs)
        scales = (np.abs(blocks).max((1, 3)) / 448).astype(np.float32)
        each = np.repeat(np.repeat(scales, high, axis=0), wide or inputs, axis=1)
        values = torch.from_numpy(weight / each).to(torch.float8_e4m3fn)
        return {"weight": values, leaf: torch.from_numpy(scales)}, values.float().numpy() * each

    return write


_FP8_ROWS = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, "strategy": "channel"}
FORMATS: dict[str, Format] = {
    "fp8, a scale a row": Format(
        {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": _FP8_ROWS}},
            "ignore": ["lm_head"],
        },
        _fp8("weight_scale", 1, 0),
    ),
    "fp8, blocks": Format(
        {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [16, 32]},
        _fp8("weight_scale_inv", 16, 32),
    ),
    "compressed int8, a scale a row": _compressed_format(8, -1, packed=False),
    "compressed int8 in groups, zeros": _compressed_format(8, 32, packed=False, symmetric=False),
    "compressed int4": _compressed_format(4, 32, packed=True),
    "compressed int4, zeros": _compressed_format(4, 16, packed=True, symmetric=False),
    "compressed int8 packed": _compressed_format(8, 32, packed=True),
    "gptq int4": _gptq_format(4, 32, 1),
    "gptq int4, a smaller last group": Format(
        {"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": False}, _smaller_last_group
    ),
    "gptq int4, zeros": _gptq_format(4, 32, 2, symmetric=False),
    "gptq int8, zeros": _gptq_format(8, -1, 2, symmetric=False),
    "awq": _of_grid(
        {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
        _awq,
        4,
        32,
        symmetric=False,
    ),
    "nf4": Format(
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
        lambda weight: _nf4(weight, nested=False),
        exact=False,
    ),
    "nf4, nested": Format(
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
        lambda weight: _nf4(weight, nested=True),
        exact=False,
    ),
    "bitsandbytes int8": Format({"quant_method": "bitsandbytes", "load_in_8bit": True}, _scb),
}


def write_quantised(
    base: Path,
    out: Path,
    name: str,
    *,
    head: bool = False,
    left_out: tuple[str, ...] = (),
    gates: tuple[str, ...] = (),
) -> tuple[Path, Path]:
    """The checkpoint in `base` as a format stores its layers' linears, with `head` its head too, and in float32 with
    what they stand for then. `left_out`: ends of modules that stay floats. `gates`: of further ones that do not."""
    made, dense = out / "quantised", out / "dense"
    for folder in (made, dense):
        folder.mkdir(parents=True)
        for path in base.iterdir():
            if path.suffix != ".safetensors":
                shutil.copy(path, folder)
    tensors, stored, exact = load_file(base / "model.safetensors"), {}, {}
    for key, tensor in tensors.items():
        module = key.removesuffix(".weight")
        is_stored = is_linear(key) or (head and module == "lm_head") or (gates and module.endswith(gates))
        if not is_stored or (left_out and module.endswith(left_out)):
            stored[key] = exact[key] = tensor
            continue
        written, values = FORMATS[name].write(tensor.float().numpy())
        stored |= {f"{module}.{leaf}": part.contiguous() for leaf, part in written.items()}
        exact[key] = torch.from_numpy(values)
    config = json.loads((base / "config.json").read_text())
    quantised = FORMATS[name].config | ({"lm_head": True} if head else {})
    (made / "config.json").write_text(json.dumps(config | {"quantization_config": quantised}))
    save_file(stored, made / "model.safetensors", {"format": "pt"})
    save_file(
        {key: tensor.clone() for key, tensor in exact.items()}, dense / "model.safetensors", {"format": "pt"}
    )
    return made, dense


def write_mxfp4(base: Path, out: Path) -> tuple[Path, Path]:
    """The gpt-oss in `base` with random experts in MXFP4, and in float32 as transformers decodes these."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    tensors = load_file(base / "model.safetensors")
    dense = dict(tensors)
    generator = torch.Generator().manual_seed(2)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        count, inputs, outputs = tensors.pop(name).shape
        shape = count, outputs, inputs // 32
        blocks = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(122, 126, shape, generator=generator, dtype=torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        dense[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
    codes = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    config = json.loads((base / "config.json").read_text())
    for folder, weights, fields in (
        (out / "packed", tensors, {"quantization_config": codes}),
        (out / "dense", dense, {}),
    ):
        folder.mkdir()
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        (folder / "config.json").write_text(json.dumps(config | fields))
    return out / "packed", out / "dense"
