"""A base linear over 8-bit codes on a GPU: right, and how fast beside the same linear in 16 bits.

Each case function gives a dict. Without a GPU it runs interpreted, and gives no times.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from bench.gpu.timing import Ceilings, median_ms, relative_error
from loraplex.kernels.linear import dense, triton_dense, triton_groups
from loraplex.kernels.linear.stored import GroupedWeight


@dataclass(frozen=True)
class CodesCase:
    """x [rows, inputs] by codes [columns, inputs] in groups of `group`."""

    columns: int
    inputs: int
    group: int
    rows: int
    offsets: bool = False

    @property
    def name(self) -> str:
        kind = "with offsets" if self.offsets else "without offsets"
        return f"{self.rows} rows, {self.inputs} to {self.columns}, groups of {self.group}, {kind}"


def small_cases() -> list[CodesCase]:
    """The last two: K in two splits, each a program, and in one program."""
    return [
        CodesCase(48, 96, 32, 5),
        CodesCase(40, 64, 16, 3, offsets=True),
        CodesCase(24, 36, 36, 17),
        CodesCase(24, 1024, 64, 5),
        CodesCase(24, 1024, 64, 40),
    ]


def full_cases() -> list[CodesCase]:
    """An 8B model's linears and head, with each tile of rows, and more rows than one."""
    return [
        CodesCase(columns, inputs, 64, rows)
        for columns, inputs in ((28672, 4096), (4096, 14336), (6144, 4096), (128256, 4096))
        for rows in (1, 16, 32, 64, 128, 256, 512)
    ] + [CodesCase(28672, 4096, 32, 16, offsets=True), CodesCase(28672, 4096, 128, 16)]


def run_case(case: CodesCase, device: torch.device, ceilings: Ceilings | None = None) -> dict[str, Any]:
    """`ok`: within bfloat16's rounding of the product in float64 (float32 where it is interpreted), and the same bits
    for the first and the last row alone. With `ceilings` it is timed: `floor_ms` is one read of codes, scales and x and
    one write of y, or the product's flops, `dense_ms` the library's product in 16 bits, `invariant_ms` that of
    `--batch-invariant`."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    generator = torch.Generator().manual_seed(case.columns + case.rows)
    codes = torch.randint(-127, 128, (case.columns, case.inputs), generator=generator, dtype=torch.int8)
    groups = case.columns, case.inputs // case.group
    scales = torch.rand(groups, generator=generator) * 0.001
    offsets = torch.randn(groups, generator=generator) * 0.01 if case.offsets else None
    weight = GroupedWeight(codes, scales, offsets, case.group)
    x = torch.randn(case.rows, case.inputs, generator=generator).to(device, dtype)
    packed = triton_groups.pack_groups(weight, dtype, device=device)
    y = packed(x)
    values = weight.map(lambda part: part.to(device)).dense()
    checked = slice(0, min(case.columns, 4096))
    error = relative_error(y[:, checked], x.double() @ values[checked].double().T)
    is_lone = all(torch.equal(packed(x[row : row + 1].contiguous())[0], y[row]) for row in (0, case.rows - 1))
    found: dict[str, Any] = {
        "case": case.name,
        "ok": error < (5e-3 if dtype is torch.bfloat16 else 1e-5) and is_lone,
        "relative_error": error,
    }
    if ceilings is None:
        return found
    num_bytes = codes.numel() + 4 * scales.numel() * (2 if case.offsets else 1)
    num_bytes += x.element_size() * (x.numel() + y.numel())
    floor = ceilings.floor_ms(num_bytes, 2.0 * case.rows * codes.numel())
    ms = median_ms(lambda: packed(x), device)
    found |= {"bytes": num_bytes, "floor_ms": floor, "graph_ms": ms}
    if ms is not None:
        plain = values.to(dtype)
        found["times_floor"] = ms / floor
        found["dense_ms"] = median_ms(lambda: dense.linear(x, plain), device)
        found["invariant_ms"] = median_ms(lambda: triton_dense.linear(x, plain), device)
    return found
