"""nf4 made of full-precision weights."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from loraplex.adapters.base_weights.grouped import NotFinite
from loraplex.adapters.base_weights.nf4 import NF4, quantise_nf4
from support.models.quantised_formats import FORMATS


def drawn(rows: int, inputs: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((rows, inputs)).astype(np.float32) * np.float32(0.02)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_it_is_what_a_writer_of_checkpoints_makes(dtype: str) -> None:
    weight = drawn(70, 192).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    _, written = FORMATS["nf4"].write(weight.astype(np.float32))
    found = quantise_nf4(weight)
    assert found.dtype == np.float32
    # The writer keeps each block's scale as it is; here it is a code, off by 0.4 % of the spread of the scales or so.
    np.testing.assert_allclose(found, written, rtol=0.01)
    assert (found != written).any()


def test_scales_are_codes_of_the_dynamic_map() -> None:
    """Worked by hand: scales 1 and 3, mean 2, so ±1 of the largest distance 1. The map has 1, and -0.9929688."""
    weight = np.zeros((2, 64), np.float32)
    weight[0, 0], weight[1, 0] = 1, 3
    found = quantise_nf4(weight)
    assert found[0, 0] == pytest.approx(2 - 0.99296875)
    assert found[1, 0] == 3
    assert not found[:, 1:].any()


def test_scales_share_the_size_of_their_codes() -> None:
    """Scales 1, 3 and 2.5: the mean 2.16667, the largest distance 1.16667, and 3 is 0.71429 of it: 0.71171875."""
    weight = np.zeros((3, 64), np.float32)
    weight[:, 0] = 1, 3, 2.5
    assert quantise_nf4(weight)[1, 0] == pytest.approx(13 / 6 + 0.71171875 * 7 / 6, rel=1e-6)


def test_a_weight_becomes_the_nearest_value() -> None:
    values = np.float32(NF4)
    weight = np.tile(values, (3, 4))  # one scale: the mean, so nothing is left to code
    np.testing.assert_array_equal(quantise_nf4(weight), weight)
    off = quantise_nf4(np.where(np.abs(weight) < 1, weight + np.float32(0.03), weight))
    np.testing.assert_array_equal(off, weight)


@pytest.mark.parametrize("shape", [(3, 50), (1, 1), (5, 96), (300, 4096)])
def test_blocks_run_over_rows_and_the_last_may_be_short(shape: tuple[int, int]) -> None:
    weight = drawn(*shape)
    found = quantise_nf4(weight)
    np.testing.assert_array_equal(found, quantise_nf4(weight.reshape(1, -1)).reshape(shape))
    # Half of the widest gap between values is 0.14 of a block's largest magnitude.
    assert np.abs(found - weight).max() <= 0.16 * np.abs(weight).max()


def test_zeros_stay_zeros() -> None:
    assert not quantise_nf4(np.zeros((4, 64), np.float32)).any()


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_is_refused(value: float) -> None:
    weight = drawn(4, 64)
    weight[2, 7] = value
    with pytest.raises(NotFinite, match="infinite, or no number"):
        quantise_nf4(weight)
