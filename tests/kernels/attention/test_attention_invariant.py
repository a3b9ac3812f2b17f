"""Paged attention in Triton by a batch-invariant plan: a row has the same bits in every step that computes it."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from loraplex.kernels.attention.triton_attention import (
    AttentionScratch,
    build_attention_batch,
    paged_attention,
)
from loraplex.kernels.attention.triton_plan import AttentionCapacity, AttentionPlan
from loraplex.kernels.attention.triton_tiling import AttentionShape, Tiling, Tilings, choose_tilings
from support.kernels.paged import PagedStep, expected_attention, paged_step
from support.kernels.poison import poison_new_memory

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TILING = Tiling(32, 16, 4, 2, 32)
LENS = [140, 75, 40, 9, 33]
CASES = [
    pytest.param(4, 2, 24, None, None, torch.float32, id="float32"),
    pytest.param(8, 2, 16, 40, 1.5, torch.float16, id="float16, window and softcap", marks=pytest.mark.slow),
    pytest.param(7, 1, 16, 5, None, torch.float32, id="seven heads, short window", marks=pytest.mark.slow),
]

pytestmark = [
    pytest.mark.usefixtures("quick_interpreter"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch):
    poison_new_memory(monkeypatch)


@dataclass
class Sequences:
    """Whole sequences. Steps compute parts of them: (number, first position, positions)."""

    whole: PagedStep
    window: int | None
    softcap: float | None
    tilings: Tilings

    def compute(self, parts, *, padded=None, programs=4):
        """Attention of the parts' rows, one after the other. What no part has reached yet is NaN in the cache."""
        whole = self.whole
        cache = whole.cache.clone()
        flat = cache.view(-1, *cache.shape[2:])
        size = cache.shape[1]
        for number, first, count in parts:
            ahead = range(first + count, whole.seq_lens[number])
            flat[[whole.tables[number][at // size] * size + at % size for at in ahead]] = float("nan")
        starts = np.cumsum([0, *whole.num_rows])
        q = torch.cat([whole.q[starts[n] + first : starts[n] + first + count] for n, first, count in parts])
        rows = padded or q.shape[0]
        q = torch.cat([q, torch.full((rows - q.shape[0], *q.shape[1:]), float("nan"), dtype=q.dtype)])
        shape = AttentionShape(q.shape[1], cache.shape[3], cache.shape[4], size)
        plan = AttentionPlan(
            shape,
            AttentionCapacity(max(rows, 300), 8, 600, 300),
            self.tilings,
            num_programs=programs,
            windows=(None, self.window) if self.window else (None,),
        )
        batch = build_attention_batch(
            plan,
            AttentionScratch.allocate(plan, DEVICE),
            [count for _, _, count in parts],
            [first + count for _, first, count in parts],
            [whole.tables[number] for number, _, _ in parts],
            padded_rows=padded,
        )
        return paged_attention(q, cache, batch, scale=0.3, window=self.window, softcap=self.softcap)


def sequences(heads, kv_heads, head_dim, window, softcap, dtype, tilings=None):
    whole = paged_step(
        LENS, LENS, heads=heads, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype, device=DEVICE
    )
    found = tilings or Tilings(TILING, TILING, batch_invariant=True)
    return Sequences(whole, window, softcap, found)


def differing(of, rng):
    """The positions of the first sequence whose bits differ between the whole prompt alone, chunks among neighbours,
    and single rows among neighbours with padding behind."""
    whole = of.compute([(0, 0, LENS[0])])
    assert whole.isfinite().all()

    def neighbours():
        for number in rng.sample(range(1, len(LENS)), rng.randint(1, 2)):
            first = rng.randrange(LENS[number])
            yield number, first, rng.randint(1, min(6, LENS[number] - first))

    wrong = set()
    edges = [0, 3, 32, 101, 137]
    parts = [(0, first, last - first) for first, last in zip(edges, [*edges[1:], LENS[0]], strict=True)]
    parts += [(0, at, 1) for at in (0, 31, 32, 127, 139)]
    for part in parts:
        beside = list(neighbours())
        step = [*beside[:1], part, *beside[1:]]
        rows = sum(count for _, _, count in step)
        got = of.compute(step, padded=rows + rng.randint(0, 9), programs=rng.choice((1, 4, 200)))
        row = beside[0][2]
        _, first, count = part
        same = (got[row : row + count] == whole[first : first + count]).all(-1).all(-1)
        wrong |= {first + int(at) for at in (~same).nonzero()}
        assert not got[rows:].any()
    return wrong


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "window", "softcap", "dtype"), CASES)
def test_a_row_has_the_same_bits_whole_in_chunks_and_beside_any_neighbours(
    heads, kv_heads, head_dim, window, softcap, dtype
):
    of = sequences(heads, kv_heads, head_dim, window, softcap, dtype)
    assert differing(of, random.Random(heads)) == set()


def test_a_plan_by_the_step_has_others():
    """What the test above would find."""
    of = sequences(4, 2, 24, None, None, torch.float32, Tilings(Tiling(16, 16, 4, 2, 32), TILING))
    assert differing(of, random.Random(4))


@pytest.mark.parametrize("window", [None, 40])
def test_equals_the_formula(window):
    of = sequences(4, 2, 24, window, None, torch.float32)
    got = of.compute([(number, 0, length) for number, length in enumerate(LENS[1:], 1)])
    whole = of.whole
    step = PagedStep(
        LENS[1:],
        LENS[1:],
        whole.tables[1:],
        whole.q[LENS[0] :],
        whole.cache,
        whole.keys[1:],
        whole.values[1:],
    )
    want = expected_attention(step, scale=0.3, window=window)
    torch.testing.assert_close(got.double(), want, atol=3e-6, rtol=3e-6)


def test_splits_that_end_within_a_tile_are_refused():
    with pytest.raises(ValueError, match="power of two of at least 32"):
        Tilings(Tiling(32, 16, 4, 2, 48), TILING, batch_invariant=True)
    with pytest.raises(ValueError, match="power of two of at least 64"):
        Tilings(Tiling(32, 64, 4, 2, 32), TILING, batch_invariant=True)


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
def test_one_tile_for_decodes_and_prompts(capability):
    for head_dim, itemsize in ((64, 2), (128, 2), (256, 2), (128, 4)):
        shape = AttentionShape(32, 8, head_dim, 16)
        tilings = choose_tilings(shape, itemsize, capability, batch_invariant=True)
        assert tilings.decode == tilings.prefill
        plan = AttentionPlan(
            shape, AttentionCapacity(512, 64, 4096, 512), tilings, num_programs=264, windows=(None, 512)
        )
        assert all(places.prefill is None for places in plan.places.values())
