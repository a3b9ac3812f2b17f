"""The batch-invariant base linear in Triton: the product, and the same bits in every step."""

from __future__ import annotations

import pytest
import torch

from loraplex.kernels.linear.triton_dense import LinearTiling, choose_tiling, linear
from support.kernels.poison import poison_new_memory

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SMALL = LinearTiling(16, 16, 32, 4, 2)
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3}

pytestmark = pytest.mark.usefixtures("quick_interpreter")


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch):
    poison_new_memory(monkeypatch)


def draw(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("tiling", [SMALL, None])
def test_the_product(dtype, with_bias, tiling):
    for in_features, out_features in ((48, 40), (37, 7), (160, 33)):
        weight = draw(out_features, in_features, dtype=dtype)
        bias = draw(out_features, dtype=dtype, seed=1) if with_bias else None
        for rows in (0, 1, 5, 17, 70):
            x = draw(rows, in_features, dtype=dtype, seed=rows)
            y = linear(x, weight, bias, tiling=tiling)
            assert y.shape == (rows, out_features)
            assert y.dtype is dtype
            want = x.double() @ weight.double().T + (0 if bias is None else bias.double())
            torch.testing.assert_close(y.double(), want, atol=TOLERANCE[dtype] * 9, rtol=TOLERANCE[dtype])
    stacked = draw(2, 3, 160, dtype=dtype)
    torch.testing.assert_close(
        linear(stacked, weight, bias).view(6, 33), linear(stacked.view(6, 160), weight, bias)
    )


def test_tiles_follow_from_the_weight_alone():
    """Nothing else is given to choose by. 16 bits: 64 rows, and as many in each."""
    for out_features in (576, 4096, 14336, 28672, 128256):
        tiling = choose_tiling(out_features, 2)
        assert tiling.block_m == 64
        shared = tiling.num_stages * tiling.block_k * 2 * (tiling.block_m + tiling.block_n)
        assert shared <= 163 << 10
