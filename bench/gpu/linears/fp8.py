"""A base linear over 8-bit floats on a GPU: by torch's product of them, and by the tile that keeps a row's bits.

Each case function gives a dict. Without a GPU it runs interpreted, and gives no times.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from bench.gpu.timing import Ceilings, median_ms, relative_error
from loraplex.kernels.linear import dense, scaled_mm, triton_fp8, triton_groups
from loraplex.kernels.linear.stored import FloatWeight, GroupedWeight

_CODES_GROUP = 64
_CHECKED = 2048
"""Outputs that are compared with float64, at most."""


@dataclass(frozen=True)
class Fp8Case:
    """x [rows, inputs] by values [columns, inputs], with a scale for each output, or for each `block` inputs of it."""

    columns: int
    inputs: int
    rows: int
    block: int | None = None

    @property
    def name(self) -> str:
        scales = "a scale a row" if self.block is None else f"blocks of {self.block}"
        return f"{self.rows} rows, {self.inputs} to {self.columns}, {scales}"


def small_cases() -> list[Fp8Case]:
    """The last two: K in two splits, each a program, and in one program."""
    return [
        Fp8Case(48, 96, 5),
        Fp8Case(48, 256, 3, block=128),
        Fp8Case(32, 1024, 5),
        Fp8Case(32, 1024, 40),
    ]


def full_cases() -> list[Fp8Case]:
    """An 8B model's linears and head."""
    return [
        *(
            Fp8Case(columns, inputs, rows)
            for columns, inputs in ((28672, 4096), (4096, 14336), (6144, 4096), (128256, 4096))
            for rows in (64, 1, 16, 128, 256, 2048)
        ),
        *(Fp8Case(28672, 4096, rows, block=128) for rows in (16, 64)),
    ]


def run_case(case: Fp8Case, device: torch.device, ceilings: Ceilings | None = None) -> dict[str, Any]:
    """`error`: of the tile, from the product in float64; `scaled_error`: of torch's product, from that of the
    activations as they are rounded to 8 bits; `rounding`: what that rounding alone does. Each is a part of the largest
    number. `ok`: the first two are within the dtype's rounding, and the tile gives the first and the last row the same
    bits alone; `scaled_alone`: whether torch's product does.

    With `ceilings` it is timed in a CUDA graph: `tile_ms` the tile; torch's product with its rounding of activations,
    `within_ms` with a scale for each row and output, `behind_ms` with those multiplied behind it, `fast_ms` the same
    with its faster sums; `round_ms` the rounding alone; `dense_ms` the library's product in 16 bits, `codes_ms` the
    tile over 8-bit codes in groups of 64. `floor_ms` is one read of values, scales and x and one write of y, or the
    flops in 16 bits."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    generator = torch.Generator(device).manual_seed(case.columns + case.rows)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    values = (draw(case.columns, case.inputs) * 60).clamp_(-448, 448).to(torch.float8_e4m3fn)
    scales = draw(case.columns, case.inputs // (case.block or case.inputs)).abs() * 1e-3 + 1e-4
    weight = FloatWeight(values, scales, activations=True)
    x = draw(case.rows, case.inputs).to(dtype)
    packed = triton_fp8.pack_floats(weight, dtype, device=device)
    y = packed(x)
    checked = slice(0, min(case.columns, _CHECKED))
    wide = values[checked].double() * scales[checked].double().repeat_interleave(weight.group, 1)
    exact = x.double() @ wide.T
    most = 5e-3 if dtype is torch.bfloat16 else 1e-5
    found: dict[str, Any] = {"case": case.name, "error": relative_error(y[:, checked], exact)}
    found["ok"] = found["error"] <= most and _is_alone(packed, x, y)
    if case.block is None:
        found |= _by_torch(x.bfloat16(), packed, wide, exact, checked)
        found["ok"] = found["ok"] and found["scaled_error"] <= 2e-2 and found["rounding"] <= 0.1
    if ceilings is None or device.type != "cuda":
        return found
    num_bytes = values.numel() + 4 * scales.numel() + x.element_size() * (x.numel() + y.numel())
    floor = ceilings.floor_ms(num_bytes, 2.0 * case.rows * values.numel())
    found |= {"bytes": num_bytes, "floor_ms": floor}
    return found | {name: median_ms(run, device) for name, run in _timed(case, weight, x, packed).items()}


def _by_torch(
    x: torch.Tensor, packed: triton_fp8.PackedFloats, wide: torch.Tensor, exact: torch.Tensor, checked: slice
) -> dict[str, Any]:
    """`exact`: the product [M, n] in float64 with the weights `wide` [n, K] of the outputs that are `checked`."""
    rounded, row_scales = scaled_mm.to_floats(x)
    coarse = (rounded.double() * row_scales.double()) @ wide.T
    scaled = scaled_mm.prefer_library(replace(packed, dtype=torch.bfloat16))
    y = scaled(x)
    return {
        "scaled_error": relative_error(y[:, checked], coarse),
        "rounding": relative_error(coarse, exact),
        "scaled_alone": _is_alone(scaled, x, y),
    }


def _timed(
    case: Fp8Case, weight: FloatWeight, x: torch.Tensor, packed: triton_fp8.PackedFloats
) -> dict[str, Callable[[], object]]:
    """Runs to time, by the name of their column."""
    plain = (weight.values.float() * weight.scales.repeat_interleave(weight.group, 1)).to(x.dtype)
    runs: dict[str, Callable[[], object]] = {
        "tile_ms": lambda: packed(x),
        "dense_ms": lambda: dense.linear(x, plain),
    }
    if case.block is None:
        runs |= {
            "within_ms": lambda: scaled_mm.scale_within(x, packed),
            "behind_ms": lambda: scaled_mm.scale_behind(x, packed),
            "fast_ms": lambda: scaled_mm.scale_behind(x, packed, fast=True),
            "round_ms": lambda: scaled_mm.to_floats(x),
        }
        if case.rows in (16, 64):
            scales = torch.ones(case.columns, case.inputs // _CODES_GROUP, device=x.device)
            codes = GroupedWeight(weight.values.view(torch.int8), scales, None, _CODES_GROUP)
            held = triton_groups.pack_groups(codes, x.dtype, device=x.device)
            runs["codes_ms"] = lambda: held(x)
    return runs


def _is_alone(run: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether the first and the last row have the same bits alone."""
    return all(torch.equal(run(x[row : row + 1].contiguous())[0], y[row]) for row in (0, x.shape[0] - 1))
