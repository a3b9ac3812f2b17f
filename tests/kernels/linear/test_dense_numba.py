"""The base linear that numba compiles."""

from __future__ import annotations

import pytest
import torch

from loraplex.kernels.linear import numba_dense
from loraplex.kernels.linear.dense import PackedDense
from loraplex.kernels.linear.numba_dense import PackedWeight, pack_weight
from loraplex.kernels.numba_runtime import amx
from loraplex.kernels.numba_runtime.vectors import host_features

BF16 = torch.bfloat16
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Half a unit in the last place, of what is rounded in the end.
ROUNDING = {torch.float32: 2**-22, BF16: 2**-8, torch.float16: 2**-11}


@pytest.fixture(autouse=True)
def packed_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its blocks on any processor: the product is the same, only slower."""
    monkeypatch.setattr(numba_dense, "is_for", lambda dtype, batch_invariant: True)


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("columns", "inputs"), [(32, 2), (1, 64), (16, 30), (33, 48), (80, 130), (960, 576)])
@pytest.mark.parametrize("with_bias", [True, False])
def test_the_product_is_rounded_once(columns: int, inputs: int, with_bias: bool, dtype: torch.dtype) -> None:
    weight = drawn(columns, inputs, dtype=dtype)
    bias = drawn(columns, seed=1, dtype=dtype) if with_bias else None
    packed = pack_weight(weight.clone())
    assert isinstance(packed, PackedWeight)
    assert packed.shape == (columns, inputs)
    for rows in (0, 1, 2, 3, 5, 7, 11, 12, 13, 25, 64):
        x = drawn(rows, inputs, seed=2, dtype=dtype)
        y = packed(x, bias)
        assert y.shape == (rows, columns)
        assert y.dtype is dtype
        assert y.is_contiguous()
        exact = x.double() @ weight.double().T + (0.0 if bias is None else bias.double())
        # And what float32 loses on the way.
        assert ((y.double() - exact).abs() <= exact.abs() * ROUNDING[dtype] + 1e-4 * inputs**0.5).all()


def test_an_odd_number_of_inputs_is_packed_in_float32_alone() -> None:
    assert isinstance(pack_weight(drawn(40, 31)), PackedDense)
    weight, x = drawn(40, 31, dtype=torch.float32), drawn(3, 31, seed=1, dtype=torch.float32)
    packed = pack_weight(weight)
    assert isinstance(packed, PackedWeight)
    torch.testing.assert_close(packed(x), x @ weight.T)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_other_weights_are_as_without_it(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numba_dense, "is_for", lambda dtype, batch_invariant: False)
    weight, x = drawn(40, 32).to(dtype), drawn(3, 32, seed=1).to(dtype)
    packed = pack_weight(weight)
    assert isinstance(packed, PackedDense)
    torch.testing.assert_close(packed(x), x @ weight.T, rtol=1e-2, atol=1e-2)


def test_only_processors_that_gain_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    for features, everywhere, in_float16 in (
        ({"avx2"}, True, True),
        ({"avx2", "avx512f", "avx512bf16"}, True, True),
        ({"avx2", "avx512f", "avx512bf16", "amx-bf16", "amx-tile"}, True, False),
        ({"neon"}, False, False),
    ):
        monkeypatch.setattr(numba_dense, "host_features", lambda found=features: frozenset(found))
        assert [numba_dense.is_for(dtype) for dtype in DTYPES] == [everywhere, everywhere, in_float16]
        asked = [numba_dense.is_for(dtype, batch_invariant=True) for dtype in DTYPES]
        assert asked == [everywhere] * 3
    assert not numba_dense.is_for(torch.float64)
    assert "avx2" in host_features() or "neon" in host_features()


@pytest.mark.parametrize(("columns", "inputs"), [(960, 576), (33, 1056), (16, 32)])
def test_with_tiles_a_row_is_exact_and_has_the_same_bits_for_any_number_of_rows(
    columns: int, inputs: int
) -> None:
    if not amx.is_permitted():
        pytest.skip("the processor has no AMX, or Linux does not permit it")
    weight, bias = drawn(columns, inputs), drawn(columns, seed=1)
    packed, x = pack_weight(weight), drawn(450, inputs, seed=2)
    together = packed(x, bias)
    exact = x.double() @ weight.double().T + bias.double()
    assert ((together.double() - exact).abs() <= exact.abs() * ROUNDING[BF16] + 1e-5 * inputs**0.5).all()
    for count in (*range(1, 70), 100, 383, 384, 385):
        first = (count * 7) % (450 - count)
        some = packed(x[first : first + count], bias)
        expected = together[first : first + count]
        assert torch.equal(some.view(torch.int16), expected.view(torch.int16)), count


def test_without_permission_vectors_multiply_the_same_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = drawn(40, 64), drawn(5, 64, seed=1)
    packed = pack_weight(weight)
    monkeypatch.setattr(numba_dense, "run_products", lambda *_: pytest.fail("tiles are used"))
    monkeypatch.setattr(amx, "is_permitted", lambda: False)
    torch.testing.assert_close(packed(x), x @ weight.T, rtol=1e-2, atol=1e-2)


def test_tiles_are_for_processors_that_have_them_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(amx, "host_features", lambda: frozenset({"avx2", "avx512f", "avx512bf16"}))
    assert not amx.is_permitted.__wrapped__()
