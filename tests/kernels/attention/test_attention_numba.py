"""Paged attention of the CPU's own kernel against the formula in float64."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from loraplex.kernels.attention.numba_attention import BLOCK, SPAN, build_attention_batch, paged_attention
from support.kernels.numba_cache import packed_cache, packed_codes
from support.kernels.paged import expected_attention, paged_step
from support.kernels.poison import poison_new_memory

pytestmark = pytest.mark.slow  # compiling them takes most of a minute

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
# Decode, chunks with and without a past, several tiles, several segments, several spans; ends at any place of a block.
ROWS = [1, 2, 1, 5, 18, 1, 1, 70]
LENS = [1, 2, 7, 13, 50, 75, SPAN + 21, 171]


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch):
    poison_new_memory(monkeypatch)


@pytest.fixture(autouse=True)
def one_thread():
    """What is small waits for threads more than it gains by them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def attention(step, *, scale=0.3, window=None, softcap=None, sinks=None):
    batch = build_attention_batch(step.num_rows, step.seq_lens, step.tables)
    cache = packed_cache(step.cache)
    return paged_attention(step.q, cache, batch, scale=scale, window=window, softcap=softcap, sinks=sinks)


def assert_equals_formula(step, dtype, **options):
    got = attention(step, **options)
    want = expected_attention(step, **{"scale": 0.3, **options})
    assert got.dtype is dtype
    torch.testing.assert_close(got.double(), want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    ("window", "softcap"),
    [
        (None, None),
        (None, 1.5),
        (1, 1.5),
        (5, None),
        (40, 1.5),
        *(pytest.param(*options, marks=pytest.mark.soak) for options in ((1, None), (5, 1.5), (40, None))),
    ],
)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(2, 2, 8), (9, 3, 64), (7, 1, 80), (2, 1, 34), (50, 1, 16)]
)
def test_steps_equal_the_formula(heads, kv_heads, dim, window, softcap, dtype):
    """What is beyond a sequence, before a window or in nobody's block is NaN."""
    step = paged_step(
        ROWS, LENS, heads=heads, kv_heads=kv_heads, head_dim=dim, block_size=BLOCK, dtype=dtype, window=window
    )
    assert_equals_formula(step, dtype, window=window, softcap=softcap)


@pytest.mark.parametrize("seed", range(20))
def test_any_step_equals_the_formula(seed):
    rng = random.Random(seed)
    count = rng.randint(1, 9)
    lens = [rng.randint(1, rng.choice([20, 200, 1500])) for _ in range(count)]
    rows = [min(length, rng.choice([1, 1, 1, 2, 17, 60])) for length in lens]
    kv_heads, group = rng.randint(1, 3), rng.randint(1, 9)
    window = rng.choice([None, None, rng.randint(1, 300)])
    dtype = rng.choice(list(TOLERANCE))
    step = paged_step(
        rows,
        lens,
        heads=kv_heads * group,
        kv_heads=kv_heads,
        head_dim=2 * rng.randint(1, 40),
        block_size=BLOCK,
        dtype=dtype,
        window=window,
        seed=seed,
    )
    sinks = rng.choice(
        [None, 3 * torch.randn(kv_heads * group, generator=torch.Generator().manual_seed(seed))]
    )
    assert_equals_formula(step, dtype, window=window, softcap=rng.choice([None, 5.0]), sinks=sinks)


def test_row_depends_on_its_sequence_alone():
    """Bit by bit: not on its neighbours, nor on the number of threads."""
    step = paged_step(ROWS, LENS, heads=6, kv_heads=2, head_dim=64, block_size=BLOCK, dtype=torch.bfloat16)
    together = attention(step)
    torch.set_num_threads(2)
    for _ in range(10):
        assert torch.equal(attention(step), together)
    torch.set_num_threads(1)
    cache, row = packed_cache(step.cache), 0
    for count, length, table in zip(step.num_rows, step.seq_lens, step.tables, strict=True):
        alone = build_attention_batch([count], [length], [table])
        got = paged_attention(step.q[row : row + count], cache, alone, scale=0.3)
        assert torch.equal(got, together[row : row + count])
        row += count


@pytest.mark.parametrize(
    ("dtype", "pack"), [*((dtype, packed_cache) for dtype in TOLERANCE), (torch.bfloat16, packed_codes)]
)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (5, 1, 34), (2, 2, 80), (16, 2, 16)])
@pytest.mark.parametrize("window", [None, 1, 40, 129, 700])
def test_a_row_has_the_same_bits_in_any_chunk(heads, kv_heads, dim, window, dtype, pack):
    """Whichever rows of its sequence are computed with it, and in however many units. Behind its position lies what a
    longer sequence wrote there, or nothing finite."""
    length = 2 * SPAN + 150
    step = paged_step(
        [length], [length], heads=heads, kv_heads=kv_heads, head_dim=dim, block_size=BLOCK, dtype=dtype
    )
    cache, (table,) = pack(step.cache), step.tables
    options = {"scale": 0.3, "window": window, "sinks": torch.linspace(-1, 3, heads)}

    def rows(first, end, cache=cache):
        batch = build_attention_batch([end - first], [end], [table])
        return paged_attention(step.q[first:end], cache, batch, **options)

    whole = rows(0, length)
    rng = random.Random(dim)
    first = 0
    while first < length:
        end = min(length, first + rng.choice([1, 3, 17, 60, 200]))
        assert torch.equal(rows(first, end), whole[first:end]), (first, end)
        first = end
    places = [1, 2, 16, 127, 128, 129, SPAN - 1, SPAN, SPAN + 1, SPAN + 128, 2 * SPAN, length]
    for end in [*places, *(rng.randrange(1, length) for _ in range(30))]:
        clean = torch.full_like(step.cache, float("nan"))
        flat, source = clean.view(-1, 2, kv_heads, dim), step.cache.view(-1, 2, kv_heads, dim)
        at = torch.tensor([table[p // BLOCK] * BLOCK + p % BLOCK for p in range(end)])
        flat[at] = source[at]
        assert torch.equal(rows(end - 1, end, pack(clean)), whole[end - 1 : end]), end


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_nonfinite_values_stay_in_their_row_and_show_there(bad, dtype):
    step = paged_step(ROWS, LENS, heads=6, kv_heads=2, head_dim=16, block_size=BLOCK, dtype=dtype)
    clean = attention(step)
    hit = [0, 3, 12, len(step.q) - 1]
    for row in hit:
        step.q[row, :, 3] = bad
    got = attention(step)
    others = [row for row in range(len(step.q)) if row not in hit]
    assert torch.equal(got[others], clean[others])
    # Scores of inf and -inf may leave a finite answer; one of NaN does not.
    finite = got[hit].isfinite().all(-1).all(-1)
    assert not finite.any() if bad != bad else not finite.all()


@pytest.mark.parametrize("part", [0, 1])
def test_a_value_that_is_not_finite_is_seen_by_its_own_sequence_alone(part):
    step = paged_step([1, 1, 3], [20, 40, 33], heads=2, kv_heads=1, head_dim=16, block_size=BLOCK)
    clean = attention(step)
    step.cache[step.tables[1][1], 3, part] = float("nan")
    got = attention(step)
    assert got[1].isnan().any(-1).all()
    assert torch.equal(got[[0, 2, 3, 4]], clean[[0, 2, 3, 4]])


def test_a_batch_serves_layers_of_different_windows():
    step = paged_step([1, 9], [700, 90], heads=4, kv_heads=2, head_dim=32, block_size=BLOCK)
    batch = build_attention_batch(step.num_rows, step.seq_lens, step.tables)
    cache = packed_cache(step.cache)
    for window in (None, 30, None, 30):
        got = paged_attention(step.q, cache, batch, scale=0.3, window=window)
        want = expected_attention(step, scale=0.3, window=window)
        torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-5)


def test_queries_may_be_a_part_of_wider_rows():
    step = paged_step([1, 4], [30, 20], heads=4, kv_heads=2, head_dim=32, block_size=BLOCK)
    want = attention(step)
    wide = torch.full((5, 8, 32), float("nan"))
    wide[:, :4] = step.q
    assert torch.equal(attention(replace(step, q=wide[:, :4])), want)


def test_a_step_of_nothing():
    cache = torch.zeros(2, BLOCK, 2, 1, 8)
    batch = build_attention_batch([], [], [])
    assert paged_attention(torch.zeros(0, 2, 8), cache, batch, scale=1.0).shape == (0, 2, 8)


def test_shapes_that_do_not_fit_are_refused():
    step = paged_step([1], [20], heads=4, kv_heads=2, head_dim=8, block_size=BLOCK)
    batch = build_attention_batch(step.num_rows, step.seq_lens, step.tables)
    with pytest.raises(ValueError, match="do not fit"):
        paged_attention(step.q[:, :3], step.cache, batch, scale=1.0)
    with pytest.raises(ValueError, match="do not fit"):
        paged_attention(step.q.bfloat16(), step.cache, batch, scale=1.0)
    with pytest.raises(ValueError, match="do not fit"):
        paged_attention(torch.cat((step.q, step.q)), step.cache, batch, scale=1.0)
    with pytest.raises(ValueError, match="do not fit"):
        paged_attention(step.q, step.cache, batch, scale=1.0, sinks=torch.zeros(3))
    with pytest.raises(ValueError, match="blocks of 16"):
        build_attention_batch([1], [3], [[0]], block_size=4)
    with pytest.raises(ValueError, match="table of 1 blocks"):
        build_attention_batch([1], [17], [[0]])
    with pytest.raises(ValueError, match="0 rows"):
        build_attention_batch([0], [17], [[0, 1]])
