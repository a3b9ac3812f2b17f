"""The list of work of batched LoRA on a GPU, as the programs would walk it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.kernels.lora.site_groups import HEAD, SiteGroup
from loraplex.kernels.lora.triton_fields import LIST_FIELDS, PIECE_FIELDS, ROW_ROWS
from loraplex.kernels.lora.triton_plan import (
    EXPAND,
    LARGE,
    SHRINK,
    SMALL,
    LoraPlanner,
    Work,
)
from loraplex.kernels.lora.triton_tiling import LoraTiling

GROUPS = (
    SiteGroup("qkv", ("q_proj", "k_proj", "v_proj"), 4096, (4096, 1024, 1024)),
    SiteGroup("down", ("down_proj",), 14336, (4096,)),
)
PLANNER = LoraPlanner(GROUPS, 32, LoraTiling(), 528)
BY_ROWS = LoraPlanner(GROUPS, 32, LoraTiling(row_programs=12), 528)
GATE_UP = SiteGroup("gate_up", ("gate_proj", "up_proj"), 4096, (14336, 14336))
BY_STRIPS = LoraPlanner((GATE_UP, GROUPS[1]), 8, LoraTiling(strip_stages=3), 528)
MANY_PLANES = LoraTiling(block_k=256, max_splits=16)
MAX_ROWS, MAX_SEGMENTS = 9000, 24


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[tuple[int, int, int]], int, np.ndarray]:
    """Segments of random lengths with gaps, and the chunks of each slot in each group, some without any."""
    num_slots = 8
    widest = np.array(
        draw(st.lists(st.tuples(*[st.integers(0, 32)] * 2), min_size=num_slots, max_size=num_slots)), np.int32
    )
    segments, row = [], 0
    lengths = st.one_of(st.just(1), st.integers(1, 20), st.integers(1, 300))
    for _ in range(draw(st.integers(0, MAX_SEGMENTS))):
        row += draw(st.integers(0, 3))
        count = draw(lengths)
        segments.append((draw(st.integers(-1, num_slots - 1)), row, count))
        row += count
    return segments, row + draw(st.integers(0, 3)), widest


def pieces(into: np.ndarray, work: Work, kind: int, stage: int, group: int) -> np.ndarray:
    """Pieces of a list, read as a program reads them."""
    number = PLANNER.list_number(kind, stage, group)
    start, count, splits, split = into[LIST_FIELDS * number : LIST_FIELDS * (number + 1)]
    assert count == work.pieces[kind][stage][group]
    assert splits == work.splits[kind][group]
    if count:
        features = GROUPS[group].in_features
        assert (splits - 1) * split < features <= splits * split
        assert split % 16 == 0
    assert start + count * PIECE_FIELDS <= work.size
    return into[start : start + count * PIECE_FIELDS].reshape(count, PIECE_FIELDS)


def hidden_of(work: Work, kind: int, group: int, piece: np.ndarray) -> Iterator[tuple[int, int]]:
    size = PLANNER.groups[group].hidden_sites * work.splits[kind][group] * piece[1] * piece[5]
    yield int(piece[4]), int(piece[4] + size)


@given(steps(), st.booleans())
def test_every_row_with_an_adapter_is_listed_once_and_no_other(step, fixed: bool) -> None:
    segments, num_rows, widest = step
    into = np.full(PLANNER.capacity(MAX_ROWS, MAX_SEGMENTS), -1, np.int32)
    work = PLANNER.write(segments, widest, num_rows, into, fixed=fixed)
    assert (into[work.size :] == -1).all()
    assert work.hidden <= PLANNER.hidden_capacity(num_rows, MAX_SEGMENTS, fixed=fixed)
    for group in range(len(GROUPS)):
        wanted = {
            (row, slot)
            for slot, first, count in segments
            if slot >= 0 and widest[slot, group]
            for row in range(first, first + count)
        }
        expanded: list[tuple[int, int]] = []
        hidden: list[tuple[int, int]] = []
        for kind in (SMALL, LARGE):
            limit = (PLANNER.tiling.small_rows, PLANNER.tiling.large_rows)[kind]
            block = (PLANNER.tiling.block_r, work.block_r)[kind] // 8
            shrunk: dict[tuple[int, ...], set[int]] = {}
            for piece in pieces(into, work, kind, SHRINK, group):
                shrunk.setdefault(tuple(piece[[0, 1, 2, 4, 5]]), set()).add(int(piece[3]))
            for piece in pieces(into, work, kind, EXPAND, group):
                first, count, slot = piece[:3].tolist()
                assert 1 <= count <= limit
                chunks = int(widest[slot, group])
                assert piece[5] == chunks * 8
                assert shrunk.pop(tuple(piece[[0, 1, 2, 4, 5]])) == set(range(0, chunks, block))
                expanded += [(row, slot) for row in range(first, first + count)]
                hidden += hidden_of(work, kind, group, piece)
            assert not shrunk
        assert sorted(expanded) == sorted(wanted)
        hidden.sort()
        assert all(end <= start for (_, end), (start, _) in pairwise(hidden))
        assert not hidden or hidden[-1][1] <= work.hidden
    if fixed:
        assert not any(map(any, work.pieces[LARGE]))


@given(steps())
def test_behind_large_pieces_of_gate_and_up_come_all_other_rows(step) -> None:
    segments, num_rows, widest = step
    into = np.full(BY_STRIPS.capacity(MAX_ROWS, MAX_SEGMENTS), -1, np.int32)
    work = BY_STRIPS.write(segments, np.minimum(widest, 8), num_rows, into)
    number = BY_STRIPS.list_number(LARGE, EXPAND, 0)
    start, count, _, others = into[LIST_FIELDS * number : LIST_FIELDS * (number + 1)]
    assert (count, others) == (work.pieces[LARGE][EXPAND][0], work.others[0])
    if not count:
        return
    listed = into[start : start + (count + others) * PIECE_FIELDS].reshape(-1, PIECE_FIELDS)
    assert (listed[:count, 2] >= 0).all()
    assert (listed[count:, 2] == -1).all()
    assert (listed[:, 1] <= BY_STRIPS.tiling.large_rows).all()
    found = [row for first, rows in listed[:, :2].tolist() for row in range(first, first + rows)]
    assert sorted(found) == list(range(num_rows))


@given(steps(), st.booleans())
def test_by_rows_b_sides_take_parts_of_what_a_sides_leave(step, fixed: bool) -> None:
    segments, num_rows, widest = step
    into = np.full(BY_ROWS.capacity(MAX_ROWS, MAX_SEGMENTS), -1, np.int32)
    work = BY_ROWS.write(segments, widest, num_rows, into, fixed=fixed)
    for group in range(len(GROUPS)):
        left = {
            row: piece
            for piece in pieces(into, work, SMALL, SHRINK, group)
            for row in range(piece[0], piece[0] + piece[1])
        }
        expanded: list[int] = []
        for first, count, slot, _, at, ranks, height, _ in pieces(into, work, SMALL, EXPAND, group).tolist():
            assert 1 <= count <= ROW_ROWS
            whole = left[first]
            assert (slot, ranks, height) == (whole[2], whole[5], whole[1])
            assert at == whole[4] + (first - whole[0]) * ranks
            assert first + count <= whole[0] + height
            expanded += range(first, first + count)
        assert sorted(expanded) == sorted(left)


def test_the_heaviest_pieces_begin_first() -> None:
    into = np.zeros(PLANNER.capacity(64, 8), np.int32)
    widest = np.array([[1, 1], [8, 8], [2, 2]], np.int32)
    work = PLANNER.write([(0, 0, 1), (1, 1, 1), (2, 2, 1)], widest, 3, into)
    assert pieces(into, work, SMALL, EXPAND, 0)[:, 2].tolist() == [1, 2, 0]


def test_adjacent_rows_of_an_adapter_are_one_piece() -> None:
    into = np.zeros(PLANNER.capacity(64, 8), np.int32)
    work = PLANNER.write([(0, 0, 1), (0, 1, 1), (0, 2, 3), (0, 6, 1)], np.ones((1, 2), np.int32), 7, into)
    assert pieces(into, work, SMALL, EXPAND, 0)[:, :2].tolist() == [[0, 5], [6, 1]]


def test_a_list_of_64_adapters_takes_a_few_kilobytes() -> None:
    """A step copies it. The shape is of 8B, at rank 16."""
    into = np.zeros(PLANNER.capacity(64, 64), np.int32)
    work = PLANNER.write([(slot, slot, 1) for slot in range(64)], np.full((64, 2), 2, np.int32), 64, into)
    assert work.size * 4 <= 64 * 2 * len(GROUPS) * 32 + 160


def test_a_prompt_of_few_pieces_is_split_for_all_programs() -> None:
    into = np.zeros(PLANNER.capacity(8192, 8), np.int32)
    widest = np.full((1, 2), 2, np.int32)
    few = PLANNER.write([(0, 0, 512)], widest, 512, into)
    assert few.splits[LARGE] == (8, 8)
    many = PLANNER.write([(0, 0, 8192)], widest, 8192, into)
    assert many.splits[LARGE][0] == 2
    assert few.block_r == 16
    assert PLANNER.write([(0, 0, 512)], np.full((1, 2), 8, np.int32), 512, into).block_r == 64


def decoding(planner: LoraPlanner, pieces: int, *, fixed: bool) -> Work:
    """A step of a row an adapter, all of rank 16."""
    into = np.zeros(planner.capacity(256, 256), np.int32)
    widest = np.full((pieces, len(GROUPS)), 2, np.int32)
    return planner.write([(slot, slot, 1) for slot in range(pieces)], widest, pieces, into, fixed=fixed)


@pytest.mark.parametrize("fixed", [False, True])
def test_k_is_cut_into_as_few_planes_as_give_every_program_work(fixed: bool) -> None:
    planner = LoraPlanner(GROUPS, 32, MANY_PLANES, 528)
    found = {pieces: decoding(planner, pieces, fixed=fixed).splits[SMALL] for pieces in (1, 8, 64, 256)}
    # 64 pieces of three sites: 4 planes make 768 items for 528 programs. 14 of 1,024 columns are the most of `down`.
    assert found == {1: (16, 14), 8: (16, 14), 64: (4, 14), 256: (1, 4)}


def test_planes_may_follow_from_the_site_alone() -> None:
    planner = LoraPlanner(GROUPS, 32, replace(MANY_PLANES, batch_invariant=True), 528)
    assert {decoding(planner, pieces, fixed=True).splits[SMALL] for pieces in (1, 64, 256)} == {(16, 14)}


def test_batches_beyond_the_capacity_are_refused() -> None:
    with pytest.raises(ValueError, match="does not fit"):
        PLANNER.write([(0, 0, 1)], np.ones((1, 2), np.int32), 1, np.zeros(20, np.int32))


def test_the_blocks_of_the_head_share_hidden_values() -> None:
    head = SiteGroup(HEAD, ("lm_head.0", "lm_head.1"), 64, (256, 44))
    plan = LoraPlanner([head], 8, LoraTiling(), 4).groups[0]
    assert plan.hidden_sites == 1
    # site, whose hidden values, first column, the site's columns, where they begin in y
    assert plan.units(128)[:, :5].tolist() == [
        [0, 0, 0, 256, 0],
        [0, 0, 128, 256, 0],
        [1, 0, 0, 44, 256],
    ]


def test_bad_tilings_are_refused() -> None:
    with pytest.raises(ValueError, match="power of two"):
        LoraTiling(block_k=100)
    with pytest.raises(ValueError, match="WGMMA"):
        LoraTiling(expand_rows=64)
