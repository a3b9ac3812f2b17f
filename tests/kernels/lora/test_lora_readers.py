"""B sides that are computed by what reads them, against `expand` and the operation behind it, and against float64."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby

import numpy as np
import pytest
import torch

from loraplex.kernels.layers import triton_activation, triton_norm
from loraplex.kernels.lora.site_groups import SiteGroup
from loraplex.kernels.lora.triton_tiling import ROW_ROWS, LoraTiling
from loraplex.kernels.lora.types import Segment
from support.kernels.lora_arena import ManualArena, decode, lengths, make_arena
from support.kernels.poison import poison_new_memory
from support.kernels.recorded_lora import RecordedPass

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
INNER, HIDDEN = 75, 37
SPLIT = SiteGroup("gate_up", ("gate_proj", "up_proj"), HIDDEN, (INNER, INNER))
PACKED = SiteGroup("gate_up", ("gate_up_proj",), HIDDEN, (2 * INNER,))
DOWN = SiteGroup("down", ("down_proj",), INNER, (HIDDEN,))
LAYERS, ROWS = 2, 24
TILING = LoraTiling(block_k=16, block_n=64, max_splits=4, planes=2, small_rows=16)
SPARSE, NO_UP, NO_GATE = 4, 6, 7
RANKS = (
    8, 16, 24, 40, 8, 32,
    {"gate_proj": 16, "gate_up_proj": 8, "down_proj": 8}, {"up_proj": 24, "down_proj": 16},
)  # fmt: skip
EPS = 1e-5
BATCHES: dict[str, list[Segment]] = {
    "few rows each": lengths([(0, 2), (-1, 2), (6, 3), (2, 4), (1, 1)]),
    "skewed": lengths([(1, 15), (-1, 1), (0, 1), (7, 1), (3, 1)]),
    "one row": decode([1]),
    "distinct": decode(range(8)),
    "uniform": decode([row % 4 for row in range(12)]),
    "identical": decode([3] * 19),
    "zipf": decode([0] * 11 + [1] * 6 + [2] * 3 + [3] * 2 + [4, 5]),
    "mixed ranks": lengths([(5, 6), (0, 2), (3, 5), (2, 1)]),
    "base rows only": decode([-1] * 5),
    "in parts": lengths([(2, 5), (6, 3), (2, 1), (-1, 4), (2, 8)]),
}
FEW = ("few rows each", "skewed")

pytestmark = [
    pytest.mark.usefixtures("quick_interpreter"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch):
    poison_new_memory(monkeypatch)


def arena_of(*groups: SiteGroup, dtype: torch.dtype = torch.float32) -> ManualArena:
    return make_arena(
        groups, LAYERS, dtype, RANKS, has=lambda slot, layer, _: slot != SPARSE or layer == 0,
        dora=(2, NO_UP), device=DEVICE,
    )  # fmt: skip


@pytest.fixture(scope="module")
def arenas() -> dict[str, ManualArena]:
    return {
        "split": arena_of(SPLIT, DOWN),
        "packed": arena_of(PACKED, DOWN),
        "float16": arena_of(SPLIT, DOWN, dtype=torch.float16),
    }


def recorded(arena: ManualArena, tiling: LoraTiling = TILING) -> RecordedPass:
    return RecordedPass(arena, tiling, rows=ROWS)


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def by_rows(segments: list[Segment]) -> list[int]:
    """The rows that `expand` computes without tensor cores, and those of the base."""
    slots = [slot for slot, _, count in segments for _ in range(count)]
    few, first = [], 0
    for slot, run in groupby(slots):
        rows = range(first, first + len(list(run)))
        for begin in range(rows.start, rows.stop, TILING.small_rows):
            piece = rows[begin - rows.start :][: TILING.small_rows]
            few += piece if slot < 0 or len(piece) <= ROW_ROWS else ()
        first = rows.stop
    return few


def check_gated(arena: ManualArena, segments: list[Segment], *, gelu: bool, layer: int = 0) -> None:
    group, dtype = arena.weights.groups[0], arena.weights.storage.dtype
    pass_ = recorded(arena)
    pass_.put(segments)
    x, y = draw(ROWS, HIDDEN, dtype=dtype), draw(ROWS, 2 * INNER, dtype=dtype, seed=1)
    kept, apart = y.clone(), y.clone()
    got = pass_.readers.gated(layer, "gate_up", x, y, gelu=gelu)
    assert got is not None
    assert torch.equal(y, kept)
    pass_.launcher.apply(layer, "gate_up", x, apart)
    assert torch.equal(got, triton_activation.act_and_mul(apart, gelu))
    gate, up = arena.expected(layer, group, segments, x, kept).chunk(2, dim=-1)
    functional = torch.nn.functional
    want = (functional.gelu(gate, approximate="tanh") if gelu else functional.silu(gate)) * up
    tolerance = 1e-5 if dtype is torch.float32 else 1e-2
    torch.testing.assert_close(got.double(), want, atol=tolerance, rtol=tolerance)


def check_norm(arena: ManualArena, segments: list[Segment], *, add: bool, layer: int = 0) -> None:
    dtype = arena.weights.storage.dtype
    pass_ = recorded(arena)
    pass_.put(segments)
    x, y = draw(ROWS, INNER, dtype=dtype), draw(ROWS, HIDDEN, dtype=dtype, seed=1)
    weight = draw(HIDDEN, dtype=dtype, seed=2)
    before = draw(ROWS, HIDDEN, dtype=dtype, seed=3)
    residual, total = (before.clone(), before.clone()) if add else (None, None)
    kept, apart = y.clone(), y.clone()
    got = pass_.readers.norm(layer, "down", x, y, weight, EPS, residual)
    assert got is not None
    assert torch.equal(y, kept)
    pass_.launcher.apply(layer, "down", x, apart)
    if total is None:
        want = triton_norm.rms_norm(apart, weight, EPS)
    else:
        want = triton_norm.add_rms_norm(apart, total, weight, EPS)
        assert residual is not None
    same = by_rows(segments)
    if DEVICE.type == "cpu":  # a compiler may order the sums of either in its own way
        assert torch.equal(got[same], want[same])
    tolerance = 2e-5 if dtype is torch.float32 else 1e-2
    torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance)
    exact = arena.expected(layer, DOWN, segments, x, kept) + (before.double() if add else 0.0)
    if residual is not None:
        torch.testing.assert_close(residual.double(), exact, atol=tolerance, rtol=tolerance)
    exact = exact * (exact.pow(2).mean(-1, keepdim=True) + EPS).rsqrt() * weight.double()
    torch.testing.assert_close(got.double(), exact, atol=2 * tolerance, rtol=2 * tolerance)


@pytest.mark.parametrize("batch", FEW)
@pytest.mark.parametrize("name", ["split", "packed"])
def test_the_activation_has_the_bits_of_expand_and_itself(arenas, name: str, batch: str) -> None:
    check_gated(arenas[name], BATCHES[batch], gelu=name == "packed")


@pytest.mark.parametrize("batch", FEW)
@pytest.mark.parametrize("add", [True, False])
def test_the_norm_is_that_of_expand_and_itself(arenas, add: bool, batch: str) -> None:
    check_norm(arenas["split"], BATCHES[batch], add=add)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "batch"), [*(("split", batch) for batch in BATCHES), ("float16", FEW[1])])
def test_every_kind_of_batch(arenas, name: str, batch: str) -> None:
    layer = int(batch == "distinct")  # one of them has no tiles there
    check_gated(arenas[name], BATCHES[batch], gelu=False, layer=layer)
    check_norm(arenas[name], BATCHES[batch], add=True, layer=layer)


def test_one_recorded_pass_serves_any_set_of_adapters(arenas) -> None:
    """As a CUDA graph replays it: launched over lists that other steps have written."""
    arena = arenas["split"]
    pass_ = recorded(arena)
    x, y, weight = draw(ROWS, HIDDEN), draw(ROWS, 2 * INNER, seed=1), draw(HIDDEN, seed=2)
    for segments in ([], decode(range(8)), lengths([(1, 16), (2, 8)]), decode([-1] * 23 + [0])):
        pass_.put(segments)
        gated = pass_.readers.gated(0, "gate_up", x, y, gelu=False)
        assert gated is not None
        gate, up = arena.expected(0, SPLIT, segments, x, y).chunk(2, dim=-1)
        want = torch.nn.functional.silu(gate) * up
        torch.testing.assert_close(gated.double(), want, atol=1e-5, rtol=1e-5)
        normed = pass_.readers.norm(0, "down", gated, x, weight, EPS, None)
        assert normed is not None
        exact = arena.expected(0, DOWN, segments, gated, x)
        exact = exact * (exact.pow(2).mean(-1, keepdim=True) + EPS).rsqrt() * weight.double()
        torch.testing.assert_close(normed.double(), exact, atol=5e-5, rtol=5e-5)


def test_rows_of_the_base_may_hold_anything(arenas) -> None:
    """They look up no adapter, and no row with one reads theirs."""
    pass_ = recorded(arenas["split"])
    pass_.put([(1, 1, 5), (3, 8, 1)])
    x, y = draw(ROWS, HIDDEN), draw(ROWS, 2 * INNER, seed=1)
    want = pass_.readers.gated(0, "gate_up", x, y, gelu=False)
    assert want is not None
    x[0] = y[0] = x[7] = float("nan")
    got = pass_.readers.gated(0, "gate_up", x, y, gelu=False)
    assert got is not None
    assert torch.equal(got[1:], want[1:])
    assert bool(got[0].isnan().all())


def test_a_tiling_says_what_is_fused(arenas) -> None:
    x, y, weight = draw(ROWS, HIDDEN), draw(ROWS, 2 * INNER, seed=1), draw(HIDDEN, seed=2)
    inner = draw(ROWS, INNER)
    pass_ = recorded(arenas["split"], replace(TILING, fuse_gated=False, fuse_norm_rows=ROWS - 1))
    pass_.put([])
    assert pass_.readers.gated(0, "gate_up", x, y, gelu=False) is None
    assert pass_.readers.norm(0, "down", inner, x, weight, EPS, None) is None
    pass_ = recorded(arenas["split"], replace(TILING, fuse_norm_rows=ROWS))
    pass_.put([])
    assert pass_.readers.norm(0, "down", inner, x, weight, EPS, None) is not None


def test_rows_that_a_program_can_not_hold_are_normed_apart(arenas) -> None:
    readers = recorded(arenas["split"]).readers
    assert readers.norm(0, "down", draw(1, INNER), draw(1, 4097), draw(4097), EPS, None) is None


def test_a_pass_before_its_first_list_computes_nothing(arenas) -> None:
    """As kernels are compiled: they load ahead, but divide by no number that a list would have."""
    pass_ = recorded(arenas["split"])
    x, y = draw(ROWS, HIDDEN), draw(ROWS, 2 * INNER, seed=1)
    kept = y.clone()
    with np.errstate(divide="raise", invalid="raise"):
        pass_.launcher.apply(0, "gate_up", x, y)
    assert torch.equal(y, kept)


def test_shapes_that_do_not_fit_are_refused(arenas) -> None:
    readers = recorded(arenas["split"]).readers
    x, weight = draw(ROWS, HIDDEN), draw(HIDDEN)
    with pytest.raises(ValueError, match="takes 150 adjacent columns"):
        readers.gated(0, "gate_up", x, x, gelu=False)
    with pytest.raises(ValueError, match="no norm"):
        readers.norm(0, "down", draw(ROWS, INNER), x, weight[1:], EPS, None)
    with pytest.raises(ValueError, match="no norm"):
        readers.norm(0, "down", draw(ROWS, INNER), x, weight, EPS, x[1:])
