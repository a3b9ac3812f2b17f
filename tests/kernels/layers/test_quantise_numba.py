"""Rows in 8-bit codes that numba compiles."""

from __future__ import annotations

import pytest
import torch

from loraplex.kernels.layers.numba_quantise import GROUP, quantise_rows

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def drawn(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_codes_are_the_nearest_and_records_follow_from_them(dtype: torch.dtype) -> None:
    for rows, columns in ((1, 32), (7, 576), (70, 1536)):
        x = drawn(rows, columns, dtype)
        found = quantise_rows(x)
        grouped = x.float().view(rows, -1, GROUP)
        largest = grouped.abs().amax(-1)
        factor = torch.full_like(largest, 127).div(largest)  # 127 / x would be 127 times the reciprocal
        expected = (grouped * factor.unsqueeze(-1)).round()
        codes = found.codes.view(rows, -1, GROUP)
        assert torch.equal(codes.float(), expected)
        scales, sums, moved = found.groups.unbind(-1)
        assert torch.equal(scales, largest / 127)
        assert torch.equal(sums, scales * codes.sum(-1).float())
        assert torch.equal(moved.contiguous().view(torch.int32), codes.sum(-1, dtype=torch.int32) * -128)
        assert ((codes * scales.unsqueeze(-1) - grouped).abs() <= 0.5001 * scales.unsqueeze(-1)).all()


def test_a_rows_codes_do_not_depend_on_other_rows() -> None:
    x = drawn(40, 128, torch.bfloat16)
    x[3] *= 1000
    together = quantise_rows(x)
    for row in range(40):
        alone = quantise_rows(x[row : row + 1])
        assert torch.equal(alone.codes[0], together.codes[row])
        assert torch.equal(alone.groups[0].view(torch.int32), together.groups[row].view(torch.int32))


def test_zeros_tiny_numbers_and_numbers_that_are_not_finite() -> None:
    x = drawn(6, 64, torch.float32)
    x[1] = 0
    x[2, :32] = 1e-40
    x[3, 40] = float("nan")
    x[4, 5] = float("inf")
    x[5, 9] = float("-inf")
    found = quantise_rows(x)
    for row, group in ((1, 0), (1, 1), (2, 0)):
        assert found.groups[row, group, 0] == 0
        assert not found.codes[row, 32 * group : 32 * (group + 1)].any()
    not_finite = {(row, group) for row, group in (~found.groups[..., 0].isfinite()).nonzero().tolist()}
    assert not_finite == {(3, 1), (4, 0), (5, 0)}


def test_rows_may_lie_apart_and_other_shapes_are_refused() -> None:
    wide = drawn(5, 192, torch.float32)
    assert torch.equal(
        quantise_rows(wide[:, 64:128]).codes, quantise_rows(wide[:, 64:128].contiguous()).codes
    )
    for x in (wide[:, :40], wide[0], wide[:, ::3]):
        with pytest.raises(ValueError, match="cannot be quantised in groups of 32"):
            quantise_rows(x)
