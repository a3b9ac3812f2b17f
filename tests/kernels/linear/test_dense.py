"""The base linear: the product, and how many shapes of it there are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import linear as torch_linear
from torch.utils._python_dispatch import TorchDispatchMode

from loraplex.kernels.linear.dense import linear, pack_weight


class Products(TorchDispatchMode):
    """Notes the number of rows of each matrix product that reaches the device."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.linear.default):
            self.rows.append(args[-2].shape[0])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("with_bias", [True, False])
def test_the_product(dtype: torch.dtype, with_bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(24, 16, generator=generator).to(dtype)
    bias = torch.randn(24, generator=generator).to(dtype) if with_bias else None
    for rows in (0, 1, 3, 4, 5, 9, 31, 33, 127, 129, 200):
        x = torch.randn(rows, 16, generator=generator).to(dtype)
        y = linear(x, weight, bias)
        assert y.shape == (rows, 24)
        assert y.dtype == dtype
        assert y.is_contiguous()
        torch.testing.assert_close(y, torch_linear(x, weight, bias))
    stacked = torch.randn(1, 7, 16, generator=generator).to(dtype)
    torch.testing.assert_close(linear(stacked, weight, bias), torch_linear(stacked, weight, bias))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("with_bias", [True, False])
def test_a_packed_weight_gives_the_same_product(dtype: torch.dtype, with_bias: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(80, 48, generator=generator).to(dtype)
    bias = torch.randn(80, generator=generator).to(dtype) if with_bias else None
    packed = pack_weight(weight.clone())
    assert packed.shape == (80, 48)
    if dtype is torch.float32:
        assert not packed.weight.is_mkldnn
    with torch.inference_mode():
        for rows in (0, 1, 4, 5, 17, 64, 200):
            x = torch.randn(rows, 48, generator=generator).to(dtype)
            y = packed(x, bias)
            assert y.shape == (rows, 80)
            assert y.is_contiguous()
            exact = x.double() @ weight.double().T
            exact = exact if bias is None else exact + bias.double()
            torch.testing.assert_close(y.double(), exact, rtol=1e-2, atol=1e-2)


def test_sixteen_bit_products_come_in_few_shapes() -> None:
    weight = torch.zeros(8, 8, dtype=torch.bfloat16)
    with torch.inference_mode(), Products() as products:
        for rows in range(1, 1025):
            linear(torch.zeros(rows, 8, dtype=torch.bfloat16), weight)
    assert len(products.rows) == 1024
    assert len(set(products.rows)) <= 40
    assert all(rows <= padded <= max(rows * 1.6, 4) for rows, padded in enumerate(products.rows, 1))


def test_other_products_are_as_they_are() -> None:
    with torch.inference_mode(), Products() as products:
        linear(torch.zeros(37, 8), torch.zeros(8, 8))
    assert products.rows == [37]
