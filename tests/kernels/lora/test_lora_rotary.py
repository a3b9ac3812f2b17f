"""The B side of Q, K and V with norms, RoPE and the KV write: against `expand` and that kernel behind it, and against
float64."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from loraplex.kernels.layers import triton_rope
from loraplex.kernels.lora.site_groups import SiteGroup
from loraplex.kernels.lora.triton_tiling import LoraTiling
from loraplex.kernels.lora.types import Segment
from support.kernels.lora_arena import ManualArena, decode, lengths, make_arena
from support.kernels.poison import poison_new_memory
from support.kernels.recorded_lora import RecordedPass

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HIDDEN, LAYERS, ROWS = 37, 2, 24
HEADS, KV_HEADS, HEAD_DIM, BLOCK = 3, 1, 20, 4
COLUMNS = (HEADS + 2 * KV_HEADS) * HEAD_DIM
SITES = ("q_proj", "k_proj", "v_proj")
SPLIT = SiteGroup("qkv", SITES, HIDDEN, (HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM))
PACKED = SiteGroup("qkv", ("qkv_proj",), HIDDEN, (COLUMNS,))
TILING = LoraTiling(block_k=16, block_n=128, max_splits=4, planes=2, small_rows=16)
EPS = 1e-5
RANKS = (8, 16, 24, 40, 8, {"q_proj": 16, "v_proj": 8, "qkv_proj": 8}, {"k_proj": 24, "qkv_proj": 16})
ONLY_QUERIES_AND_VALUES, ONLY_KEYS = 5, 6
BATCHES: dict[str, list[Segment]] = {
    "few rows each": lengths([(0, 2), (-1, 2), (5, 3), (2, 4), (1, 1)]),
    "skewed": lengths([(1, 15), (-1, 1), (0, 1), (6, 1), (3, 1)]),
    "one row": decode([1]),
    "distinct": decode(range(7)),
    "identical": decode([3] * 19),
    "base rows only": decode([-1] * 5),
    "in parts": lengths([(2, 5), (6, 3), (2, 1), (-1, 4), (5, 8)]),
}

pytestmark = [
    pytest.mark.usefixtures("quick_interpreter"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch):
    poison_new_memory(monkeypatch)


@dataclass(frozen=True)
class Family:
    """`half` of a head is rotated twice; `norm` is the dtype of the weights of queries and keys."""

    group: SiteGroup
    half: int = HEAD_DIM // 2
    norm: torch.dtype | None = None
    dtype: torch.dtype = torch.float32


FAMILIES = {
    "llama": Family(SPLIT),
    "qwen3": Family(SPLIT, norm=torch.float32),
    "phi3": Family(PACKED),
    "partial rotary": Family(PACKED, half=6),
    "partial rotary, normed": Family(SPLIT, half=7, norm=torch.float32),
    "float16": Family(SPLIT, dtype=torch.float16),
    "float16, norms in float32": Family(SPLIT, norm=torch.float32, dtype=torch.float16),
    "float16, norms in float16": Family(SPLIT, norm=torch.float16, dtype=torch.float16),
}


@pytest.fixture(scope="module")
def arenas() -> dict[tuple[SiteGroup, torch.dtype], ManualArena]:
    return {
        (group, dtype): make_arena(
            (group,), LAYERS, dtype, RANKS, has=lambda slot, layer, _: slot != 4 or layer == 0,
            dora=(2, ONLY_QUERIES_AND_VALUES), device=DEVICE,
        )
        for group in (SPLIT, PACKED)
        for dtype in (torch.float32, torch.float16)
    }  # fmt: skip


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def empty_cache(dtype: torch.dtype) -> torch.Tensor:
    return torch.full((8, BLOCK, 2, KV_HEADS, HEAD_DIM), float("nan"), dtype=dtype, device=DEVICE)


class Step:
    """What a step's kernels get beside x and y. One row in five goes nowhere, as padding does."""

    def __init__(self, family: Family) -> None:
        angles = draw(ROWS, 1, family.half, seed=5)
        self.cos, self.sin = angles.cos(), angles.sin()
        places = torch.randperm(8 * BLOCK, generator=torch.Generator().manual_seed(6))[:ROWS]
        self.slots = torch.where(torch.arange(ROWS) % 5 == 3, -1, places).to(DEVICE, torch.int32)
        self.norms: dict[str, torch.Tensor | float | None] = {"q_norm": None, "k_norm": None, "eps": EPS}
        if family.norm is not None:
            self.norms["q_norm"] = 1 + 0.3 * draw(HEAD_DIM, seed=7).to(family.norm)
            self.norms["k_norm"] = 1 + 0.3 * draw(HEAD_DIM, seed=8).to(family.norm)

    def rotary(self, pass_: RecordedPass, layer: int, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The cache behind it."""
        cache = empty_cache(y.dtype)
        rest = self.cos, self.sin, cache, self.slots
        assert pass_.readers.rotary(layer, "qkv", x, y, HEADS, *rest, **self.norms)
        return cache

    def apart(self, pass_: RecordedPass, layer: int, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        cache = empty_cache(y.dtype)
        pass_.launcher.apply(layer, "qkv", x, y)
        heads = y.view(ROWS, HEADS + 2 * KV_HEADS, HEAD_DIM)
        rest = self.cos, self.sin, cache, self.slots
        triton_rope.rope_and_write_kv(heads, HEADS, *rest, **self.norms)
        return cache

    def exact(self, updated: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the updated y in float64: the queries, and K and V by row."""
        heads = updated.view(ROWS, HEADS + 2 * KV_HEADS, HEAD_DIM).clone()
        for first, last, name in ((0, HEADS, "q_norm"), (HEADS, HEADS + KV_HEADS, "k_norm")):
            part, weight = heads[:, first:last], self.norms[name]
            if isinstance(weight, torch.Tensor):
                part *= (part.pow(2).mean(-1, keepdim=True) + EPS).rsqrt() * weight.double()
            half = self.cos.shape[-1]
            a, b = part[..., :half].clone(), part[..., half : 2 * half].clone()
            cos, sin = self.cos.double(), self.sin.double()
            part[..., :half] = a * cos - b * sin
            part[..., half : 2 * half] = b * cos + a * sin
        return heads[:, :HEADS].reshape(ROWS, -1), heads[:, HEADS:].view(ROWS, 2, KV_HEADS, HEAD_DIM)

    def written(self, cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows that went somewhere, and their K and V. All else of the cache must be as it was."""
        rows = torch.nonzero(self.slots >= 0).flatten()
        places = self.slots[rows].long()
        found = cache[places // BLOCK, places % BLOCK]
        rest = cache.clone()
        rest[places // BLOCK, places % BLOCK] = float("nan")
        assert bool(rest.isnan().all())
        return rows, found


def check(arenas, name: str, segments: list[Segment], *, layer: int = 0) -> None:
    family = FAMILIES[name]
    arena = arenas[family.group, family.dtype]
    pass_, step = RecordedPass(arena, TILING, rows=ROWS), Step(family)
    pass_.put(segments)
    x, kept = draw(ROWS, HIDDEN, dtype=family.dtype), draw(ROWS, COLUMNS, dtype=family.dtype, seed=1)
    y, other = kept.clone(), kept.clone()
    cache = step.rotary(pass_, layer, x, y)
    other_cache = step.apart(pass_, layer, x, other)
    queries = HEADS * HEAD_DIM
    assert torch.equal(y[:, queries:], kept[:, queries:])
    rows, written = step.written(cache)
    if DEVICE.type == "cpu":  # a compiler may order the sums of either in its own way
        assert torch.equal(y[:, :queries], other[:, :queries])
        assert torch.equal(written, step.written(other_cache)[1])
    want, want_kv = step.exact(arena.expected(layer, family.group, segments, x, kept))
    tolerance = 2e-5 if family.dtype is torch.float32 else 1e-2
    torch.testing.assert_close(y[:, :queries].double(), want, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(written.double(), want_kv[rows], atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(
    ("name", "batch"),
    [
        ("llama", "few rows each"),
        ("qwen3", "skewed"),
        ("phi3", "skewed"),
        ("partial rotary", "few rows each"),
        ("float16, norms in float32", "few rows each"),
    ],
)
def test_heads_have_the_bits_of_expand_and_the_rotation(arenas, name: str, batch: str) -> None:
    check(arenas, name, BATCHES[batch])


def pairs():
    """Every kind of batch with one family, two of them with each other one; the rest is the long version's."""
    for place, name in enumerate(FAMILIES):
        for number, batch in enumerate(BATCHES):
            is_short = name == "llama" or (place + number) % 4 == 0
            yield pytest.param(name, batch, marks=pytest.mark.slow if is_short else pytest.mark.soak)


@pytest.mark.parametrize(("name", "batch"), pairs())
def test_every_family_and_kind_of_batch(arenas, name: str, batch: str) -> None:
    check(arenas, name, BATCHES[batch], layer=int(batch == "distinct"))  # one of them has no tiles there


def test_one_recorded_pass_serves_any_set_of_adapters(arenas) -> None:
    """As a CUDA graph replays it: launched over lists that other steps have written."""
    family = FAMILIES["llama"]
    arena = arenas[family.group, family.dtype]
    pass_, step = RecordedPass(arena, TILING, rows=ROWS), Step(family)
    x, kept = draw(ROWS, HIDDEN), draw(ROWS, COLUMNS, seed=1)
    for segments in ([], decode(range(7)), lengths([(1, 16), (2, 8)]), decode([-1] * 23 + [0])):
        pass_.put(segments)
        y = kept.clone()
        rows, written = step.written(step.rotary(pass_, 0, x, y))
        want, want_kv = step.exact(arena.expected(0, family.group, segments, x, kept))
        torch.testing.assert_close(y[:, : HEADS * HEAD_DIM].double(), want, atol=2e-5, rtol=2e-5)
        torch.testing.assert_close(written.double(), want_kv[rows], atol=2e-5, rtol=2e-5)


def test_rows_of_the_base_may_hold_anything(arenas) -> None:
    """They look up no adapter, and no row with one reads theirs."""
    family = FAMILIES["qwen3"]
    pass_, step = RecordedPass(arenas[family.group, family.dtype], TILING, rows=ROWS), Step(family)
    pass_.put([(1, 1, 5), (3, 9, 1)])
    x, want = draw(ROWS, HIDDEN), draw(ROWS, COLUMNS, seed=1)
    got = want.clone()
    step.rotary(pass_, 0, x, want)
    x[0] = got[0] = x[8] = float("nan")
    step.rotary(pass_, 0, x, got)
    assert torch.equal(got[1:], want[1:])
    assert bool(got[0].isnan().all())


def test_a_tiling_says_whether_it_is_fused(arenas) -> None:
    family = FAMILIES["llama"]
    arena, step = arenas[family.group, family.dtype], Step(family)
    pass_ = RecordedPass(arena, replace(TILING, fuse_rotary=False), rows=ROWS)
    pass_.put([])
    x, y, cache = draw(ROWS, HIDDEN), draw(ROWS, COLUMNS, seed=1), empty_cache(torch.float32)
    rest = step.cos, step.sin, cache, step.slots
    assert not pass_.readers.rotary(0, "qkv", x, y, HEADS, *rest, **step.norms)
    assert torch.equal(y, draw(ROWS, COLUMNS, seed=1))
    assert bool(cache.isnan().all())


def test_heads_that_a_program_can_not_hold_are_rotated_apart(arenas) -> None:
    family = FAMILIES["llama"]
    narrow = replace(TILING, block_n=16)
    readers, step = RecordedPass(arenas[family.group, family.dtype], narrow, rows=ROWS).readers, Step(family)
    x, y, cache = draw(ROWS, HIDDEN), draw(ROWS, COLUMNS), empty_cache(torch.float32)
    rest = step.cos, step.sin, cache, step.slots
    assert not readers.rotary(0, "qkv", x, y, HEADS, *rest, **step.norms)


def test_codes_are_made_apart(arenas) -> None:
    family = FAMILIES["llama"]
    readers, step = RecordedPass(arenas[family.group, family.dtype], TILING, rows=ROWS).readers, Step(family)
    x, y = draw(ROWS, HIDDEN), draw(ROWS, COLUMNS)
    cache = torch.full((8, BLOCK, 2, KV_HEADS, HEAD_DIM + 2), 99, dtype=torch.int8, device=DEVICE)
    rest = step.cos, step.sin, cache, step.slots
    assert not readers.rotary(0, "qkv", x, y, HEADS, *rest, **step.norms)
    assert bool((cache == 99).all())


def test_shapes_that_do_not_fit_are_refused(arenas) -> None:
    family = FAMILIES["llama"]
    readers, step = RecordedPass(arenas[family.group, family.dtype], TILING, rows=ROWS).readers, Step(family)
    x, y, cache = draw(ROWS, HIDDEN), draw(ROWS, COLUMNS), empty_cache(torch.float32)
    with pytest.raises(ValueError, match="takes 100 adjacent columns"):
        readers.rotary(0, "qkv", x, x, HEADS, step.cos, step.sin, cache, step.slots, **step.norms)
    with pytest.raises(ValueError, match="are not 6 heads of 20"):
        readers.rotary(0, "qkv", x, y, HEADS + 1, step.cos, step.sin, cache, step.slots, **step.norms)
    with pytest.raises(ValueError, match="do not fit a cache"):
        readers.rotary(0, "qkv", x, y, HEADS, step.cos[1:], step.sin, cache, step.slots, **step.norms)
