"""Weights as codes in groups."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.adapters.base_weights.grouped import NotFinite, group_of, quantise_int8
from loraplex.kernels.linear.stored import GroupedWeight


def drawn(rows: int, inputs: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, inputs)).astype(np.float32)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
def test_no_weight_is_off_by_more_than_half_a_step_of_its_group(dtype: str) -> None:
    weight = drawn(70, 192).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    found = quantise_int8(weight)
    assert (found.group, found.codes.shape, found.scales.shape) == (64, (70, 192), (70, 3))
    exact = weight.astype(np.float32).reshape(70, 3, 64)
    np.testing.assert_array_equal(found.scales, np.abs(exact).max(axis=2) / np.float32(127))
    off = np.abs(found.dense().reshape(exact.shape) - exact)
    assert (off <= found.scales[:, :, None] * 0.5001).all()
    # The largest of each group is exact except for the rounding of its scale.
    assert (np.abs(found.codes.reshape(exact.shape)).max(axis=2) == 127).all()


@given(st.integers(1, 700))
def test_groups_divide_the_inputs(inputs: int) -> None:
    group = group_of(inputs)
    assert inputs % group == 0
    assert group == inputs or (group % 2 == 0 and 16 <= group <= 64)


def test_a_row_does_not_depend_on_the_others() -> None:
    weight = drawn(3000, 576)  # more than are worked on at a time
    together = quantise_int8(weight)
    for row in (0, 1, 1819, 1820, 2999):
        lone = quantise_int8(weight[row : row + 1])
        np.testing.assert_array_equal(lone.codes[0], together.codes[row])
        np.testing.assert_array_equal(lone.scales[0], together.scales[row])


def test_zeros_and_numbers_too_small_for_a_scale_are_kept_finite() -> None:
    weight = np.zeros((2, 64), np.float32)
    weight[1] = 1e-45
    dense = quantise_int8(weight).dense()
    assert np.isfinite(dense).all()
    assert not dense[0].any()


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_is_refused(value: float) -> None:
    weight = drawn(4, 64)
    weight[2, 7] = value
    with pytest.raises(NotFinite, match="infinite, or no number"):
        quantise_int8(weight)


@pytest.mark.parametrize("fault", ["scale of the neighbouring group", "codes of the next input"])
def test_planted_faults_are_noticed(fault: str) -> None:
    weight = drawn(8, 128)
    right = quantise_int8(weight)
    codes, scales = right.codes, right.scales
    if fault.startswith("scale"):
        scales = scales[:, ::-1].copy()
    else:
        codes = np.roll(codes, 1, axis=1)
    off = np.abs(GroupedWeight(codes, scales, None, right.group).dense() - weight).max()
    assert off > 4 * np.abs(right.dense() - weight).max()
