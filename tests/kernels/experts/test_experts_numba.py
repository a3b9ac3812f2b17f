"""Mixtures of experts that numba compiles: the same bits in any company, linears over codes, and recorded calls."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from loraplex.kernels.experts.numba_linears import NumbaExperts
from loraplex.kernels.experts.torch_experts import LinearByExpert
from loraplex.kernels.experts.types import ExpertActivation, RouterKind, Routes
from loraplex.kernels.linear.stored import GroupedWeight
from loraplex.kernels.numba_backend import numba_ops
from loraplex.kernels.numba_layers import NumbaRecordedLayers
from loraplex.kernels.numba_warm_up import warm_up
from loraplex.kernels.recorded_layers import LayerInputs
from loraplex.kernels.weight_form import FLOATS, WeightForm

OPS = numba_ops()
EACH = OPS.experts
EXPERTS, HIDDEN, WIDTH = 6, 64, 40
KIND = RouterKind("softmax", EXPERTS, 3, normalise=True)
CODES, ROUNDED = WeightForm("groups", 8), WeightForm("groups", 8, activations="int8")


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


class Mixture:
    def __init__(self, dtype: torch.dtype) -> None:
        self.router = OPS.pack(drawn(EXPERTS, HIDDEN, seed=1, dtype=dtype), FLOATS, dtype)
        self.gate_up = EACH.pack(drawn(EXPERTS, 2 * WIDTH, HIDDEN, seed=2, dtype=dtype), FLOATS, dtype)
        self.down = EACH.pack(drawn(EXPERTS, HIDDEN, WIDTH, seed=3, dtype=dtype), FLOATS, dtype)
        self.bias = drawn(EXPERTS, 2 * WIDTH, seed=4, dtype=dtype)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        routes = EACH.route(self.router(x), KIND)
        rows = EACH.group(routes, EXPERTS)
        h = self.gate_up(EACH.gather(x, rows), rows, self.bias)
        h = EACH.act(h, ExpertActivation("clamped"))
        out = EACH.combine(self.down(h, rows), routes, rows)
        EACH.add_gated(out, x, self.router(x)[:, :1])
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_has_the_same_bits_in_any_company(dtype: torch.dtype) -> None:
    mixture, x = Mixture(dtype), drawn(70, HIDDEN, dtype=dtype)
    alone = torch.cat([mixture(row[None]) for row in x])
    generator = torch.Generator().manual_seed(0)
    for count, threads in ((70, 1), (70, 3), (23, 2), (5, 3)):
        torch.set_num_threads(threads)
        chosen = torch.randperm(70, generator=generator)[:count]
        assert torch.equal(mixture(x[chosen]), alone[chosen])
    # Many rows of an expert are several pieces.
    assert torch.equal(mixture(x.repeat(9, 1)), alone.repeat(9, 1))


def grouped(seed: int, low: int, high: int, *, offsets: bool = False, fine: bool = False) -> GroupedWeight:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(low, high + 1, (WIDTH, HIDDEN), generator=generator, dtype=torch.int8)
    scales = torch.rand(WIDTH, HIDDEN // 32, generator=generator) + 0.5
    scales = scales if fine else scales.half().float()
    return GroupedWeight(codes, scales, scales * 3 if offsets else None, 32)


FOUR_BITS = [grouped(seed, 0, 15) for seed in range(3)]
ODD = {
    "codes": (CODES, [grouped(seed, -128, 127) for seed in range(3)]),
    "codes, some with offsets": (CODES, [grouped(0, -9, 9), grouped(1, -9, 9, offsets=True)]),
    "4 bits": (ROUNDED, FOUR_BITS),
    "4 and 8 bits": (ROUNDED, [FOUR_BITS[0], grouped(1, -100, 100), grouped(2, -8, 7)]),
    "4 bits, some scales of float32": (ROUNDED, [FOUR_BITS[0], grouped(1, 3, 18, fine=True)]),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ODD)
def test_codes_by_expert_are_multiplied_as_those_of_a_linear(name: str, dtype: torch.dtype) -> None:
    form, weights = ODD[name]
    packed = EACH.pack(weights, form, dtype)
    assert isinstance(packed, NumbaExperts)
    bias = drawn(len(weights), WIDTH, dtype=dtype)
    each = LinearByExpert.of([OPS.pack(weight, form, dtype) for weight in weights])
    for count in (1, 4, 40):
        ids = torch.arange(count)[:, None] * 7 // 3 % len(weights)
        rows = EACH.group(Routes(ids, torch.ones(count, 1)), len(weights))
        x = drawn(count, HIDDEN, seed=count, dtype=dtype)
        assert torch.equal(packed(x, rows, bias), each(x, rows, bias))
        assert torch.equal(packed(x, rows), each(x, rows))


def test_experts_in_groups_of_several_sizes_are_multiplied_one_by_one() -> None:
    other = grouped(1, -9, 9)
    wide = GroupedWeight(other.codes, other.scales[:, :1].contiguous(), None, HIDDEN)
    weights = [grouped(0, -9, 9), wide]
    packed = EACH.pack(weights, CODES, torch.float32)
    rows = EACH.group(Routes(torch.tensor([[1], [0], [1]]), torch.ones(3, 1)), 2)
    x = drawn(3, HIDDEN)
    want = torch.stack([x[row] @ weights[expert].dense().T for row, expert in ((1, 0), (0, 1), (2, 1))])
    torch.testing.assert_close(packed(x[rows.row_of], rows), want, rtol=1e-5, atol=1e-4)


def test_a_gate_of_other_rows_is_refused() -> None:
    out = drawn(3, 16)
    for y, gate in ((drawn(3, 8), drawn(3, 1)), (drawn(3, 16), drawn(2, 1)), (drawn(3, 16), drawn(3, 16))):
        with pytest.raises(ValueError, match="do not fit"):
            EACH.add_gated(out, y, gate)


def test_a_recorded_call_serves_any_routes() -> None:
    mixture, recorded, lists = Mixture(torch.float32), NumbaRecordedLayers(), []

    def run_layers(given: LayerInputs) -> torch.Tensor:
        lists.append(given)
        return mixture(given.residual)

    for seed in range(4):
        x = drawn(9, HIDDEN, seed=seed)
        found = recorded.run(LayerInputs(x, (), (), None), lists, run_layers)
        assert found is not None
        assert torch.equal(found[0], mixture(x))
    assert len(lists) == 1, "recorded once"


def test_linears_one_by_one_are_not_recorded() -> None:
    """They read on the host how many rows each expert has, which a recording does not know yet."""
    x, weights = drawn(9, WIDTH), drawn(EXPERTS, HIDDEN, WIDTH, seed=3)
    packed = LinearByExpert.of([OPS.pack(weight, FLOATS, torch.float32) for weight in weights])
    rows = EACH.group(Routes(torch.zeros(9, 1, dtype=torch.int64), torch.ones(9, 1)), EXPERTS)
    rows.starts.zero_()
    given = LayerInputs(x, (), (), None)
    assert NumbaRecordedLayers().run(given, [], lambda given: packed(given.residual, rows)) is None


@pytest.mark.slow  # it compiles all that a model needs
def test_all_are_compiled_before_the_first_step_of_a_model_that_has_experts() -> None:
    called: set[str] = set()

    def noted(name: str) -> Any:
        return lambda *given: called.add(name) or getattr(EACH, name)(*given)

    names = [field.name for field in dataclasses.fields(EACH)]
    watched = dataclasses.replace(OPS, experts=type(EACH)(*map(noted, names)))
    warm_up(torch.bfloat16, watched)
    assert not called
    warm_up(torch.bfloat16, watched, experts=True)
    assert called == set(names) - {"pack", "join"}, "their linears are compiled as any"
