"""The base linear in bfloat16 that numba compiles."""

from __future__ import annotations

import pytest
import torch

from loraplex.kernels.layers import numba_dense
from loraplex.kernels.layers.numba_dense import MAX_UNIT_ROWS, PackedWeight, linear, pack_weight
from loraplex.kernels.numba_runtime.vectors import host_features

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def packed_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its blocks on any processor: the product is the same, only slower."""
    monkeypatch.setattr(numba_dense, "is_for_this_processor", lambda: True)


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(BF16)


@pytest.mark.parametrize(("columns", "inputs"), [(32, 2), (1, 64), (16, 30), (33, 48), (80, 130), (960, 576)])
@pytest.mark.parametrize("with_bias", [True, False])
def test_the_product_is_rounded_once(columns: int, inputs: int, with_bias: bool) -> None:
    weight = drawn(columns, inputs)
    bias = drawn(columns, seed=1) if with_bias else None
    packed = pack_weight(weight.clone())
    assert isinstance(packed, PackedWeight)
    assert packed.shape == (columns, inputs)
    for rows in (0, 1, 2, 3, 5, 7, 11, 12, 13, 25, 64):
        x = drawn(rows, inputs, seed=2)
        y = linear(x, packed, bias)
        assert y.shape == (rows, columns)
        assert y.dtype is BF16
        assert y.is_contiguous()
        exact = x.double() @ weight.double().T + (0.0 if bias is None else bias.double())
        # Half a unit in the last place of bfloat16, and what float32 loses on the way.
        assert ((y.double() - exact).abs() <= exact.abs() * 2**-8 + 1e-4 * inputs**0.5).all()


def test_a_row_does_not_depend_on_the_others_nor_on_the_threads() -> None:
    weight, x = pack_weight(drawn(100, 64)), drawn(2 * MAX_UNIT_ROWS + 5, 64, seed=1)
    together = linear(x, weight)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            for first, last in ((0, 1), (3, 20), (380, 390), (700, 773)):
                assert torch.equal(linear(x[first:last], weight), together[first:last])
    finally:
        torch.set_num_threads(before)


def test_nonfinite_values_stay_in_their_row() -> None:
    weight, x = pack_weight(drawn(70, 32)), drawn(9, 32, seed=1)
    calm = linear(x, weight)
    wild = x.clone()
    wild[4] = float("nan")
    wild[6, 3] = float("inf")
    y = linear(wild, weight)
    assert y[4].isnan().all()
    assert not y[6].isfinite().any()
    others = [0, 1, 2, 3, 5, 7, 8]
    assert torch.equal(y[others], calm[others])


def test_rows_with_a_stride() -> None:
    weight, wide = pack_weight(drawn(40, 32)), drawn(6, 96, seed=1)
    assert torch.equal(linear(wide[:, 32:64], weight), linear(wide[:, 32:64].contiguous(), weight))
    across = drawn(32, 6, seed=2).T
    assert torch.equal(linear(across, weight), linear(across.contiguous(), weight))


def test_shapes_that_do_not_fit_are_refused() -> None:
    weight = pack_weight(drawn(40, 32))
    for x, bias in (
        (drawn(2, 30), None),
        (drawn(2, 32).float(), None),
        (drawn(1, 2, 32), None),
        (drawn(2, 32), drawn(41)),
        (drawn(2, 32), drawn(80)[::2]),
    ):
        with pytest.raises(ValueError, match="does not fit"):
            linear(x, weight, bias)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_weights_are_as_without_it(dtype: torch.dtype) -> None:
    weight, x = drawn(40, 32).to(dtype), drawn(3, 32, seed=1).to(dtype)
    packed = pack_weight(weight)
    assert isinstance(packed, torch.Tensor)
    torch.testing.assert_close(linear(x, packed), x @ weight.T, rtol=2e-3, atol=2e-3)
    assert isinstance(pack_weight(drawn(40, 31)), torch.Tensor)


def test_only_processors_that_gain_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    for features, expected in (
        ({"avx2"}, False),
        ({"avx512f", "avx512bf16"}, True),
        ({"avx512f", "avx512bf16", "amx-bf16"}, False),
    ):
        monkeypatch.setattr(numba_dense, "host_features", lambda found=features: frozenset(found))
        assert numba_dense.is_for_this_processor() is expected
    assert "avx2" in host_features() or "neon" in host_features()
