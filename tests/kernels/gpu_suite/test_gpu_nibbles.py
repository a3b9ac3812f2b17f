"""The GPU bench of linears over 4-bit codes runs anywhere, and notices what is wrong."""

from __future__ import annotations

import pytest
import torch

from bench.gpu.linears import nibbles
from bench.gpu.timing import Ceilings
from loraplex.kernels.linear import triton_nibbles

pytestmark = pytest.mark.usefixtures("quick_interpreter")


def run_small(shape: nibbles.Shape) -> list[dict[str, object]]:
    bench = nibbles.ShapeBench(shape, torch.device("cpu"), Ceilings())
    return list(bench.run(3, nibbles.forms(3, small=True)[:2]))


@pytest.mark.parametrize("shape", nibbles.SMALL_SHAPES, ids=lambda shape: shape.name)
def test_small_shapes_are_right(shape: nibbles.Shape) -> None:
    *forms, others = run_small(shape)
    assert [form["ok"] for form in forms] == [True, True]
    assert others["bytes"]


def test_a_wrong_number_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    true = triton_nibbles.linear
    monkeypatch.setattr(triton_nibbles, "linear", lambda *args, **options: true(*args, **options) * 1.01)
    assert not run_small(nibbles.SMALL_SHAPES[0])[0]["ok"]
