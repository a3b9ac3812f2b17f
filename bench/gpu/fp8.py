"""A base linear over 8-bit floats on a GPU: by torch's product of them, and by the tile that keeps a row's bits.

Each case function gives a dict. Without a GPU it runs interpreted, and gives no times.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from bench.gpu.timing import Ceilings, median_ms, relative_error
from loraplex.kernels.linear import dense, scaled_mm, triton_fp8, triton_groups
from loraplex.kernels.linear.groups import GroupedWeight

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
            for rows in (64, 1, 16, 256, 2048)
        ),
        *(Fp8Case(28672, 4096, rows, block=128) for rows in (16, 64)),
    ]


def run_case(case: Fp8Case, device: torch.device, ceilings: Ceilings | None = None) -> dict[str, Any]:
    """`error`: of the tile, from the product in float64 of x with the weights; `scaled_error`: of torch's product, from
    that of the activations as they are rounded to 8 bits; `rounding`: what that rounding alone does. Each is a part of
    the largest number. `ok`: the first two are within the dtype's rounding, and the tile gives the first and the last
    row the same bits alone; `scaled_alone`: whether torch's product does.

    With `ceilings` it is timed in a CUDA graph: `tile_ms` the tile; `scaled_ms` torch's product with a scale for each
    row, `fast_ms` with its faster sums, `tensor_ms` with one scale for all, which no row could have to itself;
    `round_ms` what rounds the activations; `dense_ms` the library's product in 16 bits, `codes_ms` that over 8-bit
    codes in groups of 64; `wide_ms` the tile with 128 inputs at a time. `floor_ms` is one read of values, scales and x
    and one write of y, or the flops in 16 bits."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    generator = torch.Generator(device).manual_seed(case.columns + case.rows)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    values = (draw(case.columns, case.inputs) * 60).clamp_(-448, 448).to(torch.float8_e4m3fn)
    scales = draw(case.columns, case.inputs // (case.block or case.inputs)).abs() * 1e-3 + 1e-4
    x = draw(case.rows, case.inputs).to(dtype)
    packed = triton_fp8.pack_floats(values, scales, dtype, device=device)
    y = triton_fp8.linear(x, packed)
    checked = slice(0, min(case.columns, _CHECKED))
    wide = values[checked].double() * scales[checked].double().repeat_interleave(case.block or case.inputs, 1)
    exact = x.double() @ wide.T
    most = 5e-3 if dtype is torch.bfloat16 else 1e-5
    found: dict[str, Any] = {"case": case.name, "error": relative_error(y[:, checked], exact)}
    found["ok"] = found["error"] <= most and _is_alone(lambda x: triton_fp8.linear(x, packed), x, y)
    if case.block is None:
        rounded, row_scales = scaled_mm.to_floats(x)
        coarse = (rounded.double() * row_scales.double()) @ wide.T
        whole = _scaled(rounded, row_scales, values=values, scales=scales)
        found |= {
            "scaled_error": relative_error(whole[:, checked], coarse),
            "rounding": relative_error(coarse, exact),
            "scaled_alone": _is_alone(
                lambda x: _scaled(*scaled_mm.to_floats(x), values=values, scales=scales), x, whole
            ),
        }
        # Outside of GPUs the product is in bfloat16 too, and the interpreter rounds some activations further away.
        found["ok"] = found["ok"] and found["scaled_error"] <= 2e-2 and found["rounding"] <= 0.1
    if ceilings is None or device.type != "cuda":
        return found
    num_bytes = values.numel() + 4 * scales.numel() + x.element_size() * (x.numel() + y.numel())
    floor = ceilings.floor_ms(num_bytes, 2.0 * case.rows * values.numel())
    found |= {"bytes": num_bytes, "floor_ms": floor}
    for name, run in _timed(case, values, scales, x, packed).items():
        try:
            found[name] = median_ms(run, device)
        except RuntimeError as error:  # torch has no such product here: the others count
            found["note"] = f"{name}: {error}"[:200]
    return found


def _timed(
    case: Fp8Case,
    values: torch.Tensor,
    scales: torch.Tensor,
    x: torch.Tensor,
    packed: triton_fp8.PackedFloats,
) -> dict[str, Callable[[], object]]:
    """By the name of the column."""
    plain = (values.float() * scales.repeat_interleave(case.block or case.inputs, 1)).to(x.dtype)
    runs: dict[str, Callable[[], object]] = {
        "tile_ms": lambda: triton_fp8.linear(x, packed),
        "dense_ms": lambda: dense.linear(x, plain),
    }
    if case.rows in (16, 64):
        runs |= {"wide_ms": partial(triton_fp8.linear, x, packed, tiling=_wide_tiling(case, packed))}
    if case.block is None:
        rounded, row_scales = scaled_mm.to_floats(x)
        one = torch.ones((), device=x.device)
        runs |= {
            "scaled_ms": partial(_scaled, rounded, row_scales, values=values, scales=scales),
            "fast_ms": partial(_scaled, rounded, row_scales, values=values, scales=scales, fast=True),
            "tensor_ms": partial(_scaled, rounded, one, values=values, scales=one, fast=True),
            "round_ms": lambda: scaled_mm.to_floats(x),
        }
        if case.rows in (16, 64):
            groups = case.columns, case.inputs // _CODES_GROUP
            codes = GroupedWeight(
                values.view(torch.int8), torch.ones(groups, device=x.device), None, _CODES_GROUP
            )
            held = triton_groups.pack_groups(codes, x.dtype, device=x.device)
            runs["codes_ms"] = lambda: triton_groups.linear(x, held)
    return runs


def _wide_tiling(case: Fp8Case, packed: triton_fp8.PackedFloats) -> triton_groups.GroupsTiling:
    """The engine's with 128 inputs of K at a time."""
    tiling = triton_groups.choose_tiling(case.rows, packed.shape, packed.group, 2, most_rows=packed.most_rows)
    return replace(tiling, block_k=128)


def _scaled(
    rounded: torch.Tensor,
    row_scales: torch.Tensor,
    *,
    values: torch.Tensor,
    scales: torch.Tensor,
    fast: bool = False,
) -> torch.Tensor:
    """[M, N] bfloat16"""
    own = scales.view(1, -1) if scales.dim() else scales
    return torch._scaled_mm(
        rounded, values.t(), scale_a=row_scales, scale_b=own, out_dtype=torch.bfloat16, use_fast_accum=fast
    )


def _is_alone(run: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether the first and the last row have the same bits alone."""
    return all(torch.equal(run(x[row : row + 1].contiguous())[0], y[row]) for row in (0, x.shape[0] - 1))
