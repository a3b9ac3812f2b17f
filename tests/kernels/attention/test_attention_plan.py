"""The lists of work for paged attention on a GPU: everything once, within the capacity, evenly cut."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from loraplex.kernels.attention.triton_plan import AttentionCapacity, AttentionPlan
from loraplex.kernels.attention.triton_tiling import AttentionShape, Tiling, Tilings, choose_tilings

TILINGS = Tilings(Tiling(16, 16, 4, 3, 32), Tiling(32, 16, 4, 1, 64))


def lists_of(plan, array, window):
    """Decode items, prefill items and entries that the array holds."""
    places = plan.places[window]
    found = []
    for place, width in ((places.decode, 8), (places.prefill, 8), (places.merge, 4)):
        count = 0 if place is None else array[place.count]
        found.append(
            [] if place is None else array[place.offset : place.offset + count * width].reshape(-1, width)
        )
    return found


def check(plan, num_rows, lens, tables, padded, window):
    array = np.full(plan.num_ints, 1 << 30, dtype=np.int32)
    step = plan.write(array, num_rows, lens, tables, padded_rows=padded)
    decode, prefill, entries = lists_of(plan, array, window)
    counts = step.windows[window]
    assert (len(decode), len(prefill), len(entries)) == (counts.decode, counts.prefill, counts.merge)
    assert step.num_ints <= plan.num_ints
    # The owner of a row, and the positions that it must see.
    owner = {}
    for i, (count, length) in enumerate(zip(num_rows, lens, strict=True)):
        for row in range(count):
            owner[len(owner)] = (i, length - count + row)
    seen = {row: [] for row in range(padded or sum(num_rows))}
    parts = {row: {} for row in seen}
    scratch = set()
    for items in (decode, prefill):
        spans = [int(item[4] - item[3]) for item in items]
        assert spans == sorted(spans, reverse=True)
        for row, rows, position, begin, end, table, part, _ in (map(int, item) for item in items):
            for at in range(rows):
                assert all(end <= b or begin >= e for b, e in seen[row + at])
                seen[row + at].append((begin, end))
                if row + at in owner:
                    sequence, own = owner[row + at]
                    assert own == position + at
                    blocks = -(-lens[sequence] // plan.shape.block_size)
                    start = plan.tables_offset + table
                    assert list(array[start : start + blocks]) == list(tables[sequence][:blocks])
                if part >= 0:
                    assert part + at not in scratch
                    assert part + at < plan.partial_rows
                    scratch.add(part + at)
                    parts[row + at][begin] = part + at
    for row, pieces in seen.items():
        if row not in owner:
            assert [b == e for b, e in pieces] == [True]
            continue
        position = owner[row][1]
        first = 0 if window is None else max(0, position - window + 1)
        covered = sorted(pieces)
        assert covered[0][0] <= first
        assert covered[-1][1] > position
        assert all(before[1] == after[0] for before, after in itertools.pairwise(covered))
    merged = {int(e[0]): [int(e[1]) + k * int(e[2]) for k in range(int(e[3]))] for e in entries}
    assert len(merged) == len(entries)
    assert merged == {row: [at for _, at in sorted(found.items())] for row, found in parts.items() if found}
    slots = array[plan.slots_offset : plan.slots_offset + step.num_rows]
    size = plan.shape.block_size
    for row, slot in enumerate(slots.tolist()):
        if row not in owner:
            assert slot == -1
        else:
            sequence, position = owner[row]
            assert slot == tables[sequence][position // size] * size + position % size
    return counts


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (8, 2), (14, 2), (40, 40), (71, 1)])
def test_every_row_sees_what_it_must_once_and_capacities_hold(window, heads, kv_heads):
    rng = random.Random(f"{window}{heads}")
    shape = AttentionShape(heads, kv_heads, 64, 16)
    tilings = choose_tilings(shape, 2, (9, 0)) if heads == 71 else TILINGS
    for programs in (1, 7, 264):
        capacity = AttentionCapacity(
            num_rows=300, num_sequences=24, num_blocks=4000, max_rows_per_sequence=200
        )
        plan = AttentionPlan(shape, capacity, tilings, num_programs=programs, windows=(None, 7))
        for _ in range(12):
            size = rng.randint(0, 24)
            num_rows = [rng.choice((1, 1, 1, 2, 5, 90)) for _ in range(size)]
            while sum(num_rows) > 300:
                num_rows.pop()
            lens = [count + rng.choice((0, 1, 30, 500, 2000)) for count in num_rows]
            tables = [
                [rng.randrange(9999) for _ in range(-(-length // 16) + rng.randint(0, 1))] for length in lens
            ]
            if sum(-(-length // 16) for length in lens) > 4000:
                continue
            check(plan, num_rows, lens, tables, rng.choice((None, 300)), window)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (14, 2), (71, 1)])
def test_batch_invariant_plans_hold_the_same_and_cut_a_row_alike_in_every_step(heads, kv_heads):
    rng = random.Random(heads)
    shape = AttentionShape(heads, kv_heads, 64, 16)
    tiling = Tiling(32, 16, 4, 3, 32)
    capacity = AttentionCapacity(num_rows=300, num_sequences=24, num_blocks=4000, max_rows_per_sequence=200)
    plan = AttentionPlan(
        shape,
        capacity,
        Tilings(tiling, tiling, batch_invariant=True),
        num_programs=rng.choice((1, 264)),
        windows=(None, 70),
    )
    cuts = {}
    for _ in range(30):
        num_rows = [rng.choice((1, 1, 1, 2, 5, 90)) for _ in range(rng.randint(0, 24))]
        while sum(num_rows) > 300:
            num_rows.pop()
        lens = [count + rng.choice((0, 1, 30, 500, 2000)) for count in num_rows]
        tables = [list(range(-(-length // 16))) for length in lens]
        padded = rng.choice((None, 300))
        for window in (None, 70):
            check(plan, num_rows, lens, tables, padded, window)
            array = np.empty(plan.num_ints, np.int32)
            plan.write(array, num_rows, lens, tables, padded_rows=padded)
            found = {}
            for row, rows, position, begin, *_ in lists_of(plan, array, window)[0].tolist():
                for at in range(rows):
                    found.setdefault((row + at, position + at), []).append(begin)
            for (row, position), begins in found.items():
                if row < sum(num_rows):
                    cuts.setdefault((window, position), set()).add(tuple(sorted(begins)))
    assert {len(ways) for ways in cuts.values()} == {1}
    assert max(len(way) for ways in cuts.values() for way in ways) == 8


def test_a_full_batch_invariant_step_of_the_longest_sequences_fits():
    tiling = Tiling(32, 16, 4, 3, 32)
    for rows, longest, blocks in ((64, 1, 64 * 64), (64, 64, 64), (3, 1, 3)):
        capacity = AttentionCapacity(rows, 64, blocks, longest)
        tilings = Tilings(tiling, tiling, batch_invariant=True)
        plan = AttentionPlan(
            AttentionShape(8, 2, 64, 16), capacity, tilings, num_programs=64, windows=(None, 7)
        )
        sequences = rows // longest
        length = blocks * 16 // sequences
        for lens in ([length] * sequences, [longest] * sequences):
            tables = [list(range(-(-n // 16))) for n in lens]
            for window in (None, 7):
                check(plan, [longest] * sequences, lens, tables, None, window)


def test_a_full_step_of_the_shortest_and_of_the_longest_sequences_fits():
    shape = AttentionShape(8, 2, 64, 16)
    capacity = AttentionCapacity(num_rows=64, num_sequences=64, num_blocks=64 * 64, max_rows_per_sequence=1)
    plan = AttentionPlan(shape, capacity, TILINGS, num_programs=64)
    assert plan.places[None].prefill is None
    for lens in ([1] * 64, [1024] * 64, [1024] + [1] * 63, list(range(1, 1025, 16))):
        check(plan, [1] * 64, lens, [list(range(64))] * 64, None, None)


def test_a_lone_long_context_is_cut_for_all_programs_and_many_are_not():
    shape = AttentionShape(32, 8, 128, 16)
    capacity = AttentionCapacity(num_rows=64, num_sequences=64, num_blocks=1 << 16, max_rows_per_sequence=1)
    plan = AttentionPlan(shape, capacity, choose_tilings(shape, 2, (9, 0)), num_programs=264)
    alone = check(plan, [1], [32768], [list(range(2048))], 1, None)
    assert alone.decode * shape.units >= 264
    many = check(plan, [1] * 64, [1024] * 64, [list(range(64))] * 64, None, None)
    assert (many.decode, many.merge) == (64, 0)


def test_batches_beyond_the_capacity_are_refused():
    shape = AttentionShape(4, 2, 16, 4)
    capacity = AttentionCapacity(num_rows=8, num_sequences=2, num_blocks=4, max_rows_per_sequence=6)
    plan = AttentionPlan(shape, capacity, TILINGS, num_programs=4)
    array = np.zeros(plan.num_ints, dtype=np.int32)
    for num_rows, lens, tables, padded, message in (
        ([1], [17], [[0, 1, 2, 3]], None, "do not fit a table"),
        ([2], [1], [[0]], None, "do not fit a table"),
        ([1, 1, 1], [1, 1, 1], [[0]] * 3, None, "3 sequences"),
        ([5, 5], [5, 5], [[0, 1]] * 2, None, "10 rows"),
        ([7], [7], [[0, 1]], None, "7 rows of one sequence"),
        ([1, 1], [12, 8], [[0, 1, 2]] * 2, None, "5 blocks"),
        ([3], [3], [[0]], 2, "3 rows do not fit 2"),
        ([3], [3], [[0]], 9, "9 rows"),
    ):
        with pytest.raises(ValueError, match=message):
            plan.write(array, num_rows, lens, tables, padded_rows=padded)
    with pytest.raises(ValueError, match="do not divide"):
        AttentionShape(5, 2, 16, 4)
    with pytest.raises(ValueError, match="each once"):
        AttentionPlan(shape, capacity, TILINGS, num_programs=4, windows=(None, None))
    with pytest.raises(ValueError, match="32 rows"):
        AttentionPlan(AttentionShape(64, 1, 16, 4), capacity, TILINGS, num_programs=4)
    with pytest.raises(ValueError, match="powers of two"):
        Tiling(24, 16, 4, 1, 32)


def test_tiles_that_a_gpu_computes_wrong_are_refused():
    pipelined = Tiling(64, 64, num_warps=4, num_stages=2, min_split=256)
    pipelined.check((8, 0))
    with pytest.raises(ValueError, match="miscompiled for Hopper"):
        pipelined.check((9, 0))
    for head_dim in (64, 96, 128, 256):
        for heads in (1, 4, 8, 71):
            for itemsize in (2, 4):
                for capability in ((8, 0), (9, 0), (10, 0)):
                    tilings = choose_tilings(AttentionShape(heads, 1, head_dim, 16), itemsize, capability)
                    tilings.prefill.check(capability)
