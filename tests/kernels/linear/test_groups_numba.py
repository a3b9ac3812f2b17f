"""The base linear over weights in groups that numba compiles."""

from __future__ import annotations

import pytest
import torch

from loraplex.kernels.linear import groups, numba_groups
from loraplex.kernels.linear.numba_groups import pack_groups
from loraplex.kernels.linear.stored import GroupedWeight
from support.kernels.linears import dense, drawn, grouped

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ROUNDING = {torch.float32: 2**-22, torch.bfloat16: 2**-8, torch.float16: 2**-11}
"""Half a unit in the last place, of what is rounded in the end."""


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("columns", "inputs", "group"), [(32, 2, 2), (1, 64, 32), (16, 30, 30), (33, 96, 48), (80, 256, 64)]
)
@pytest.mark.parametrize("offsets", [False, True])
def test_the_product_is_rounded_once(
    columns: int, inputs: int, group: int, offsets: bool, dtype: torch.dtype
) -> None:
    weight = grouped(columns, inputs, group, zeros="floats" if offsets else "")
    packed = pack_groups(weight, dtype)
    assert packed.shape == (columns, inputs)
    for bias in (None, drawn(columns, seed=1, dtype=dtype)):
        for rows in (0, 1, 2, 3, 4, 5, 7, 11, 12, 13, 25, 64, 200):
            x = drawn(rows, inputs, seed=2, dtype=dtype)
            y = packed(x, bias)
            assert (y.shape, y.dtype, y.is_contiguous()) == ((rows, columns), dtype, True)
            exact = x.double() @ dense(weight).T + (0.0 if bias is None else bias.double())
            assert ((y.double() - exact).abs() <= exact.abs() * ROUNDING[dtype] + 1e-4 * inputs**0.5).all()


def test_weights_of_other_shapes_are_refused() -> None:
    weight = grouped(40, 64, 64)
    with pytest.raises(ValueError, match="an odd number"):
        pack_groups(GroupedWeight(weight.codes[:, :3], weight.scales, None, 3), torch.float32)
    with pytest.raises(ValueError, match="do not make the codes"):
        GroupedWeight(weight.codes, weight.scales, None, 32)


@pytest.mark.parametrize("fault", ["scale of the neighbouring group", "codes of the next input"])
def test_planted_faults_are_noticed(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = grouped(48, 128, 64), drawn(5, 128)
    expected = groups.linear(x, weight)
    right = numba_groups.in_blocks

    def wrong(columns: torch.Tensor, pool: object) -> torch.Tensor:
        is_code = columns.dtype is torch.int8
        moved = is_code == fault.startswith("codes")
        return right(columns.roll(1, 1) if moved else columns, None)

    assert (pack_groups(weight, torch.float32)(x) - expected).abs().max() < 1e-3
    monkeypatch.setattr(numba_groups, "in_blocks", wrong)
    assert (pack_groups(weight, torch.float32)(x) - expected).abs().max() > 0.1
