"""A linear over 4-bit codes by humming-kernels, where it is installed, beside Triton's product of the same codes.

Each case function gives a dict. Without a GPU, or without the library, it raises Skipped with the reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import torch

from bench.gpu.case import Skipped
from bench.gpu.timing import Ceilings, median_ms, relative_error
from loraplex.kernels.linear import dense, groups, humming, triton_nibbles
from loraplex.kernels.linear.stored import GroupedWeight

_READ_BYTES = 256 << 20
"""Bytes of all copies of a weight, at least: several times the device's cache."""
_MOST_COPIES = 12
_CHECKED = 4096
"""Outputs that are compared, at most."""
_MOST_ERROR = {torch.bfloat16: 5e-3, torch.float16: 1e-3}


@dataclass(frozen=True)
class HummingCase:
    """x [rows, inputs] by 4-bit codes [columns, inputs] in groups of `group`."""

    columns: int
    inputs: int
    group: int
    rows: int
    dtype: torch.dtype = torch.bfloat16

    @property
    def name(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.rows} rows, {self.inputs} to {self.columns}, groups of {self.group}, {dtype}"


def small_cases() -> list[HummingCase]:
    """Every group, both dtypes, and the smallest shape that the server gives to the library."""
    return [
        HummingCase(64, 64, 32, 1),
        HummingCase(192, 320, 64, 5),
        HummingCase(128, 1024, 128, 17, torch.float16),
        HummingCase(512, 512, 32, 300, torch.float16),
    ]


def full_cases() -> list[HummingCase]:
    """An 8B model's linears and head."""
    return [
        *(
            HummingCase(columns, inputs, 128, rows)
            for columns, inputs in ((28672, 4096), (4096, 14336), (6144, 4096), (128256, 4096))
            for rows in (16, 64, 1, 256, 2048)
        ),
        *(HummingCase(28672, 4096, group, rows) for group in (32, 64) for rows in (16, 64)),
    ]


def check_device(device: torch.device) -> None:
    """Raises Skipped where the library is not there."""
    obstacle = humming.obstacle_to(device, batch_invariant=False)
    if obstacle is not None:
        raise Skipped(obstacle)


def run_case(case: HummingCase, device: torch.device, ceilings: Ceilings | None = None) -> dict[str, Any]:
    """`error`: the largest difference from `groups.linear` in float32, as a part of the largest number; `ok`: it is
    within the dtype's rounding. `alone`: the first and the last row have the same bits alone. With `ceilings` it is
    timed in a CUDA graph, each run over another copy of the weight: `humming_ms`, `nibbles_ms` by Triton as it is
    served with --batch-invariant, `dense_ms` the library's product in 16 bits; `floor_ms` is one read of codes, scales
    and x and one write of y, or the product's flops. Raises Skipped."""
    check_device(device)
    weight = draw_weight(case, device)
    generator = torch.Generator(device).manual_seed(case.rows)
    x = torch.randn(case.rows, case.inputs, generator=generator, device=device).to(case.dtype)
    packed = humming.pack_codes(weight, case.dtype, device=device)
    assert packed is not None
    y = packed(x)
    checked = min(case.columns, _CHECKED)
    error = relative_error(y[:, :checked], groups.linear(x.float(), weight.rows(0, checked)))
    found: dict[str, Any] = {
        "case": case.name,
        "error": error,
        "alone": all(
            torch.equal(packed(x[row : row + 1].contiguous())[0], y[row]) for row in (0, case.rows - 1)
        ),
        "ok": error <= _MOST_ERROR[case.dtype],
    }
    if ceilings is None:
        return found
    num_bytes = case.columns * case.inputs // 2 + 2 * weight.scales.numel()
    num_bytes += x.element_size() * (x.numel() + y.numel())
    floor = ceilings.floor_ms(num_bytes, 2.0 * case.rows * case.columns * case.inputs)
    found |= {"bytes": num_bytes, "floor_ms": floor}
    plain = weight.dense().to(case.dtype)
    for name, make in (
        ("humming_ms", lambda: humming.pack_codes(weight, case.dtype, device=device)),
        ("nibbles_ms", lambda: triton_nibbles.pack_nibbles(weight, case.dtype, device=device)),
        ("dense_ms", lambda: dense.pack_weight(plain.clone())),
    ):
        found[name] = _median_ms(x, make, case, device)
    return found


def draw_weight(case: HummingCase, device: torch.device) -> GroupedWeight:
    """Codes of both signs, and scales that the dtype holds."""
    generator = torch.Generator(device).manual_seed(case.columns + case.inputs)
    shape = case.columns, case.inputs
    codes = torch.randint(-8, 8, shape, generator=generator, dtype=torch.int8, device=device)
    scales = torch.rand(case.columns, case.inputs // case.group, generator=generator, device=device) * 0.01
    return GroupedWeight(codes, scales.to(case.dtype).float(), None, case.group)


def _median_ms(
    x: torch.Tensor,
    make: Callable[[], Any],
    case: HummingCase,
    device: torch.device,
) -> float | None:
    """The time of a product, each over another copy of its weight, so that none comes from the cache."""
    count = min(_MOST_COPIES, math.ceil(_READ_BYTES / (case.columns * case.inputs / 2)))
    turns = cycle([make() for _ in range(count)])
    return median_ms(lambda: next(turns)(x), device, runs=max(10, count), rounds=5)
