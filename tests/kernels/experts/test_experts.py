"""Mixtures of experts: every implementation against the formulas in float64, a row at a time."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch

from loraplex.kernels.experts.types import ExpertActivation, RouterKind, Routes
from loraplex.kernels.numba_backend import numba_ops
from loraplex.kernels.ops import Ops
from loraplex.kernels.torch_backend import torch_ops
from loraplex.kernels.triton_backend import triton_ops
from loraplex.kernels.weight_form import FLOATS
from support.kernels.recurrent import INTERPRETED
from support.kernels.triton_interpreter import repair_bfloat16

BACKENDS = {"torch": torch_ops(), "numba": numba_ops(), "triton": triton_ops(device=torch.device("cpu"))}
KINDS = [
    RouterKind("softmax", 21, 4),
    RouterKind("softmax", 21, 4, normalise=True, weights_in_float32=False),
    RouterKind("softmax_of_top", 8, 2, weights_in_float32=False),
    RouterKind("sigmoid", 24, 5, normalise=True, scaling=1.8, groups=4, top_groups=2),
    RouterKind("sigmoid", 7, 7),
]


@pytest.fixture(params=["torch", "numba", pytest.param("triton", marks=INTERPRETED)])
def ops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Ops:
    if request.param == "triton":
        request.getfixturevalue("quick_interpreter")
        repair_bfloat16(monkeypatch)
    return BACKENDS[request.param]


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def route_one(
    logits: list[float], kind: RouterKind, correction: list[float]
) -> tuple[list[int], list[float]]:
    """One row's experts and weights, in float64."""
    if kind.scores == "softmax":
        scores = [math.exp(x) / sum(map(math.exp, logits)) for x in logits]
    else:
        scores = [1 / (1 + math.exp(-x)) for x in logits] if kind.scores == "sigmoid" else logits
    chosen_by = [score + more for score, more in zip(scores, correction, strict=True)]
    size = len(logits) // kind.groups
    best = [sum(sorted(chosen_by[g * size : (g + 1) * size])[-2:]) for g in range(kind.groups)]
    groups = sorted(range(kind.groups), key=lambda g: -best[g])[: kind.top_groups]
    allowed = [e for e in range(len(logits)) if e // size in groups]
    ids = sorted(allowed, key=lambda e: -chosen_by[e])[: kind.top_k]
    weights = [scores[e] for e in ids]
    if kind.scores == "softmax_of_top":
        weights = [math.exp(x) / sum(map(math.exp, weights)) for x in weights]
    elif kind.normalise:
        weights = [x / sum(weights) for x in weights]
    return ids, [kind.scaling * x for x in weights]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind.scores}-{kind.groups}")
def test_a_row_gets_its_best_experts_in_falling_order(ops: Ops, kind: RouterKind, dtype: torch.dtype) -> None:
    logits = drawn(9, kind.num_experts, dtype=dtype)
    correction = drawn(kind.num_experts, seed=1) if kind.scores == "sigmoid" else None
    found = ops.experts.route(logits, kind, correction)
    for row, ids, weights in zip(logits.tolist(), found.ids.tolist(), found.weights, strict=True):
        given = [0.0] * kind.num_experts if correction is None else correction.tolist()
        want_ids, want = route_one(row, kind, given)
        assert ids == want_ids
        exact = torch.tensor(want, dtype=torch.float64)
        if kind.weights_in_float32:
            torch.testing.assert_close(weights, exact.float(), rtol=2e-6, atol=0)
        else:
            torch.testing.assert_close(
                weights, exact.to(dtype).float(), rtol=2**-7 if dtype.itemsize == 2 else 2e-6, atol=0
            )
            assert torch.equal(weights, weights.to(dtype).float())


def test_equal_scores_go_to_the_lower_number(ops: Ops) -> None:
    found = ops.experts.route(torch.zeros(2, 40), RouterKind("softmax", 40, 3))
    assert found.ids.tolist() == [[0, 1, 2]] * 2
    grouped = RouterKind("sigmoid", 12, 2, groups=3, top_groups=1)
    assert ops.experts.route(torch.zeros(1, 12), grouped).ids.tolist() == [[0, 1]]


def test_forced_experts_have_the_weights_of_their_scores(ops: Ops) -> None:
    kind, logits = RouterKind("softmax", 8, 2, normalise=True), drawn(3, 8)
    ids = torch.tensor([[7, 0], [1, 2], [3, 3]])
    found = ops.experts.route(logits, kind, None, ids)
    assert torch.equal(found.ids, ids)
    scores = logits.double().exp().gather(1, ids)
    torch.testing.assert_close(found.weights, (scores / scores.sum(1, keepdim=True)).float())


def test_weights_are_multiplied_by_the_numbers_of_their_experts(ops: Ops) -> None:
    logits, scales = drawn(9, 21), drawn(21, seed=1)
    kind = RouterKind("softmax", 21, 4, normalise=True)
    plain, scaled = ops.experts.route(logits, kind), ops.experts.route(logits, kind, scales=scales)
    assert torch.equal(scaled.ids, plain.ids)
    assert (scaled.weights - plain.weights * scales[plain.ids]).abs().max() < 1e-6
    assert scaled.weights.min() < 0


def test_a_router_that_cannot_choose_so_many_is_refused() -> None:
    with pytest.raises(ValueError, match="can't choose 5 of 8 experts, from 1 of 2 groups"):
        RouterKind("sigmoid", 8, 5, groups=2, top_groups=1)


def test_places_are_by_expert_and_then_by_row(ops: Ops) -> None:
    ids = torch.tensor([[4, 1], [1, 0], [4, 3], [1, 4]])
    rows = ops.experts.group(Routes(ids, torch.ones(4, 2)), 6)
    assert rows.starts.tolist() == [0, 1, 4, 4, 5, 8, 8]
    assert rows.row_of.tolist() == [1, 0, 1, 3, 2, 0, 2, 3]
    for row, (chosen, places) in enumerate(zip(ids.tolist(), rows.place_of.tolist(), strict=True)):
        for expert, place in zip(chosen, places, strict=True):
            assert rows.row_of[place] == row
            first, last = list(pairwise(rows.starts.tolist()))[expert]
            assert first <= place < last


def exact_mixture(
    x: torch.Tensor,
    routes: Routes,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    kind: ExpertActivation,
    biases: tuple[torch.Tensor, torch.Tensor] | None,
) -> torch.Tensor:
    out = torch.zeros(len(x), down.shape[1], dtype=torch.float64)
    for t, (ids, weights) in enumerate(zip(routes.ids.tolist(), routes.weights.double(), strict=True)):
        for expert, weight in zip(ids, weights, strict=True):
            both = gate_up[expert].double() @ x[t].double()
            if biases is not None:
                both += biases[0][expert].double()
            gate, up = both.chunk(2)
            if kind.name == "clamped":
                gate, up = gate.clamp(max=kind.limit), up.clamp(-kind.limit, kind.limit)
                h = (up + 1) * gate * (kind.alpha * gate).sigmoid()
            elif kind.name == "gelu_tanh":
                h = torch.nn.functional.gelu(gate, approximate="tanh") * up
            else:
                h = torch.nn.functional.silu(gate) * up
            y = down[expert].double() @ h
            out[t] += weight * (y if biases is None else y + biases[1][expert].double())
    return out


@pytest.mark.parametrize("name", ["silu", "gelu_tanh", "clamped"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_mixture_is_the_sum_of_its_experts(ops: Ops, name: str, dtype: torch.dtype) -> None:
    experts, hidden, width = 5, 48, 34
    gate_up = (drawn(experts, 2 * width, hidden) * 0.2).to(dtype)
    down = (drawn(experts, hidden, width, seed=1) * 0.2).to(dtype)
    biases = (drawn(experts, 2 * width, seed=2, dtype=dtype), drawn(experts, hidden, seed=3, dtype=dtype))
    biases = biases if name == "clamped" else None
    kind, act = RouterKind("softmax", experts, 3, normalise=True), ExpertActivation(name, 1.3, 1.5)
    each = ops.experts
    packed = each.pack(iter(gate_up), FLOATS, dtype), each.pack(iter(down), FLOATS, dtype)
    assert packed[0].shape == (experts, 2 * width, hidden)
    assert packed[0].nbytes >= gate_up.nbytes
    for count in (1, 2, 30):
        x = drawn(count, hidden, seed=4, dtype=dtype)
        routes = each.route(drawn(count, experts, seed=5), kind)
        rows = each.group(routes, experts)
        xs = each.gather(x, rows)
        assert torch.equal(xs, x[rows.row_of])
        h = each.act(packed[0](xs, rows, None if biases is None else biases[0]), act)
        y = packed[1](h, rows, None if biases is None else biases[1])
        out = each.combine(y, routes, rows)
        assert out.dtype is dtype
        want = exact_mixture(x, routes, gate_up, down, act, biases)
        tolerance = 2e-5 if dtype is torch.float32 else 0.03
        assert (out.double() - want).abs().max() <= tolerance * want.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_gated_sum_rounds_as_transformers(ops: Ops, dtype: torch.dtype) -> None:
    for rows, columns in ((1, 8), (7, 50), (90, 64)):
        out, y = drawn(rows, columns, dtype=dtype), drawn(rows, columns, seed=1, dtype=dtype)
        gate = (8 * drawn(rows, 3, seed=2)).to(dtype)[:, 1:2]
        want = out + gate.sigmoid() * y
        ops.experts.add_gated(out, y, gate)
        ulp = 2**-7 if dtype is torch.bfloat16 else 1e-6
        torch.testing.assert_close(out, want, rtol=ulp, atol=ulp)
        assert (out != want).float().mean() <= (0.02 if dtype is torch.bfloat16 else 1)


def test_experts_of_other_shapes_are_refused(ops: Ops) -> None:
    with pytest.raises(ValueError, match="one shape"):
        ops.experts.pack([drawn(4, 8), drawn(6, 8)], FLOATS, torch.float32)
    packed = ops.experts.pack([drawn(4, 8)] * 3, FLOATS, torch.float32)
    rows = ops.experts.group(Routes(torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1)), 3)
    for x, bias in ((drawn(3, 8), None), (drawn(2, 6), None), (drawn(2, 8), drawn(4))):
        with pytest.raises(ValueError, match="does not fit"):
            packed(x, rows, bias)
