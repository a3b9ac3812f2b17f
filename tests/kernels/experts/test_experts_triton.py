"""Mixtures of experts in Triton, and LoRA on them, interpreted: the same bits in any company, pieces of both sizes,
rows of NaN, passes over slots and tables that change."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from loraplex.kernels.experts.triton_expert_lora import TritonExpertLora
from loraplex.kernels.experts.triton_linears import FEW_ROWS, MANY_ROWS
from loraplex.kernels.experts.triton_rows import TritonExpertRows
from loraplex.kernels.experts.types import ExpertActivation, ExpertOps, RouterKind, Routes
from loraplex.kernels.torch_backend import torch_ops
from loraplex.kernels.triton_backend import triton_ops
from loraplex.kernels.weight_form import FLOATS
from support.kernels.lora_arena import ManualExpertArena, expert_groups, lengths, make_expert_arena
from support.kernels.recurrent import INTERPRETED
from support.kernels.triton_interpreter import repair_bfloat16

EACH = triton_ops(device=torch.device("cpu")).experts
INVARIANT = triton_ops(device=torch.device("cpu"), batch_invariant=True).experts
EXPERTS, HIDDEN, WIDTH = 5, 32, 24
KIND = RouterKind("softmax", EXPERTS, 3, normalise=True)

pytestmark = [INTERPRETED, pytest.mark.usefixtures("quick_interpreter")]


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


class Mixture:
    def __init__(self, dtype: torch.dtype, each: ExpertOps) -> None:
        self.each = each
        self.gate_up = each.pack(drawn(EXPERTS, 2 * WIDTH, HIDDEN, seed=2, dtype=dtype), FLOATS, dtype)
        self.down = each.pack(drawn(EXPERTS, HIDDEN, WIDTH, seed=3, dtype=dtype), FLOATS, dtype)
        self.bias = drawn(EXPERTS, 2 * WIDTH, seed=4, dtype=dtype)

    def __call__(self, x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        each, routes = self.each, self.each.route(logits, KIND)
        rows = each.group(routes, EXPERTS)
        h = each.act(self.gate_up(each.gather(x, rows), rows, self.bias), ExpertActivation("clamped"))
        out = each.combine(self.down(h, rows), routes, rows)
        each.add_gated(out, x, logits[:, :1].to(x.dtype))
        return out


@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)], ids=str
)
def test_a_row_has_the_same_bits_in_any_company(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """60 rows have more than one piece of an expert, and a row alone has a place in each of three."""
    repair_bfloat16(monkeypatch)
    mixture = Mixture(dtype, INVARIANT)
    x, logits = drawn(60, HIDDEN, dtype=dtype), drawn(60, EXPERTS, seed=1)
    whole = mixture(x, logits)
    for rows in ([3], [59, 7], list(range(40, 7, -2))):
        assert torch.equal(mixture(x[rows], logits[rows]), whole[rows])


def test_pieces_are_small_until_experts_have_many_rows() -> None:
    """Those of --batch-invariant always are. All places are in one piece, beside others of their expert."""
    for each, count, piece_rows in ((EACH, 9, FEW_ROWS), (EACH, 90, MANY_ROWS), (INVARIANT, 90, FEW_ROWS)):
        routes = each.route(drawn(count, EXPERTS), KIND)
        rows = each.group(routes, EXPERTS)
        assert isinstance(rows, TritonExpertRows)
        assert rows.piece_rows == piece_rows
        found = [-1] * (3 * count)
        for expert, first, length in rows.pieces.tolist():
            assert length <= piece_rows
            found[first : first + length] = [expert] * length
        starts = rows.starts.tolist()
        assert found == [e for e in range(EXPERTS) for _ in range(starts[e], starts[e + 1])]


def test_large_pieces_compute_what_small_ones_do() -> None:
    x, logits = drawn(80, HIDDEN), drawn(80, EXPERTS, seed=1)
    large, small = (Mixture(torch.float32, each)(x, logits) for each in (EACH, INVARIANT))
    torch.testing.assert_close(large, small, rtol=1e-5, atol=1e-4)


def test_a_row_of_nan_has_experts_that_there_are_and_spoils_no_other() -> None:
    mixture = Mixture(torch.float32, EACH)
    x, logits = drawn(4, HIDDEN), drawn(4, EXPERTS, seed=1)
    want = mixture(x, logits)
    x[2], logits[2], logits[0, 1] = torch.nan, torch.nan, -torch.inf
    for kind in (KIND, RouterKind("sigmoid", EXPERTS, 2, groups=5, top_groups=2)):
        ids = EACH.route(logits, kind).ids
        assert 0 <= int(ids.min()) <= int(ids.max()) < EXPERTS
    found = mixture(x, logits)
    assert found[2].isnan().all()
    assert torch.equal(found[[1, 3]], want[[1, 3]])


def test_operands_that_do_not_fit_are_refused() -> None:
    packed = EACH.pack(drawn(EXPERTS, WIDTH, HIDDEN), FLOATS, torch.float32)
    routes = Routes(torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1))
    other = torch_ops().experts.group(routes, EXPERTS)
    with pytest.raises(ValueError, match="does not fit"):
        packed(drawn(2, HIDDEN), other)
    with pytest.raises(ValueError, match="do not fit"):
        EACH.route(drawn(3, EXPERTS + 1), KIND)
    with pytest.raises(ValueError, match="does not fit 2 rows"):
        EACH.combine(drawn(3, HIDDEN), routes, EACH.group(routes, EXPERTS))
    with pytest.raises(ValueError, match="do not fit"):
        EACH.add_gated(drawn(3, 16), drawn(3, 16), drawn(2, 1))


def adapters() -> ManualExpertArena:
    ranks = ({"gate_up": 12, "down": 3}, {"gate": 1, "up": 8}, {"gate_up": 20})
    groups = expert_groups(HIDDEN, WIDTH, EXPERTS, (0,))
    return make_expert_arena(groups, 1, torch.float32, ranks, untrained=((0, 2),))


def test_a_pass_reads_slots_and_tables_when_it_runs() -> None:
    """As a recorded one has to: it is made before any adapter is there."""
    arena = adapters()
    tables, heights = (np.zeros_like(each) for each in (arena.weights.tables, arena.weights.heights))
    weights = replace(arena.weights, tables=tables, heights=heights)
    lora, slots = TritonExpertLora(weights), torch.full((8,), -1, dtype=torch.int32)
    made, group = lora.begin(slots), weights.groups[0]
    rows = EACH.group(EACH.route(drawn(8, EXPERTS), KIND), EXPERTS)
    x, y = drawn(24, HIDDEN, seed=1), drawn(24, 2 * WIDTH, seed=2)
    found = y.clone()
    made.apply(0, group.key, x, found, rows)
    assert torch.equal(found, y)
    tables[:], heights[:] = arena.weights.tables, arena.weights.heights
    for slot in (0, 1):
        lora.write(slot)
    steps = ([(1, 2), (-1, 1), (0, 4), (2, 1)], [(0, 8)])
    for step in steps:
        segments = lengths(step)
        for slot, first, count in segments:
            slots[first : first + count] = slot
        found = y.clone()
        made.apply(0, group.key, x, found, rows)
        # What was not written of slot 2 is not there.
        known = [(-1 if slot == 2 else slot, first, count) for slot, first, count in segments]
        want = arena.expected(0, group, known, x, y, rows)
        assert not torch.equal(want, y.double())
        torch.testing.assert_close(found.double(), want, rtol=0, atol=1e-5)


def test_a_row_has_the_same_bits_of_its_adapter_in_any_company() -> None:
    """Runs of more than 16 places, in pieces with others, and alone."""
    arena = adapters()
    lora, group = TritonExpertLora(arena.weights), arena.weights.groups[0]
    slots = torch.tensor([0] * 3 + [1] * 25 + [-1] * 2 + [2] * 4, dtype=torch.int32)
    given, logits = drawn(34, HIDDEN), drawn(34, EXPERTS, seed=1)

    def adapted(chosen: list[int]) -> torch.Tensor:
        rows = EACH.group(EACH.route(logits[chosen], KIND), EXPERTS)
        x = EACH.gather(given[chosen], rows)
        y = torch.ones(len(x), 2 * WIDTH)
        lora.begin(slots[chosen]).apply(0, group.key, x, y, rows)
        return y[rows.place_of]

    whole = adapted(list(range(34)))
    assert bool((whole[28:30] == 1).all())
    assert bool((whole[3:28] != 1).any(2).all())
    for chosen in ([5], [0], [33, 20, 4], list(range(10, 32))):
        assert torch.equal(adapted(chosen), whole[chosen])
