"""The list of work of a step's batched LoRA on a GPU: what the host writes and the programs walk.

The buffer is int32 throughout, so that it can travel with a step's other inputs in one copy:

    head     LIST_FIELDS numbers a list: where it begins in the buffer, how many pieces it has, into how many planes
             their K is cut, and how many columns a plane has. For B sides of large pieces of gate and up, the last is
             the number of pieces that follow: of slot -1, of all rows that no large piece has, for the activation there
    pieces   PIECE_FIELDS each, list by list

A piece is a run of adjacent rows of one adapter, with of `shrink` a block of ranks. There is a list for each group of
sites, for both stages and for both kinds: small pieces, as decoding has them, and large ones, as prompts have them. An
adapter that has no site of a group is not on the group's lists, nor is a row of the base model on any.

Neither layers nor sites are listed: programs look them up in the adapters' records. So the list is the same for all
layers, and its length does not depend on the model's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from loraplex.kernels.lora.site_groups import HEAD, SiteGroup
from loraplex.kernels.lora.triton_fields import LIST_FIELDS, PIECE_FIELDS, RECORD_HEAD, ROW_ROWS
from loraplex.kernels.lora.triton_tiling import STRIP_TILES, LoraTiling
from loraplex.kernels.lora.types import CHUNK, LoraWeights, Segment

_GATED = "gate_up"
SMALL, LARGE = 0, 1
SHRINK, EXPAND = 0, 1
_PROGRAMS_ON_HOST = 3
"""Where kernels are interpreted, one program after the other."""


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """The properties of a group that do not depend on the batch. `hidden_sites`: those that have hidden values of their
    own; the head's blocks share one A. A small piece's K is cut into `max_splits` planes at most."""

    group: SiteGroup
    first_site: int
    hidden_sites: int
    max_splits: int

    @property
    def gated(self) -> bool:
        """Whether its sites are gate and up."""
        widths = self.group.out_features
        return self.group.key == _GATED and len(widths) == 2 and widths[0] == widths[1]

    @property
    def aligned(self) -> bool:
        return all(width % 16 == 0 for width in self.group.out_features)

    def units(self, block_n: int) -> NDArray[np.int32]:
        """[units, UNIT_FIELDS]: the parts of block_n columns that the group's sites fall into."""
        found = []
        begin = 0
        for site, width in enumerate(self.group.out_features):
            shared = site if self.hidden_sites > 1 else 0
            found += [(site, shared, first, width, begin, 0, 0, 0) for first in range(0, width, block_n)]
            begin += width
        return np.array(found, np.int32)


@dataclass(frozen=True, slots=True)
class Work:
    """The sizes of a list that the host wrote. `size` int32 of the buffer are used, `hidden` float32 are
    needed for hidden values. `pieces[kind][stage][group]` and `splits[kind][group]` count: pieces, and planes of K.
    `block_r` ranks of large pieces are shrunk at a time. `others[group]`: pieces of slot -1 behind the large ones."""

    num_rows: int
    size: int
    hidden: int
    pieces: tuple[tuple[tuple[int, ...], ...], ...]
    splits: tuple[tuple[int, ...], ...]
    block_r: int
    others: tuple[int, ...]


def count_programs(
    tiling: LoraTiling, multiprocessors: int | None, given: int | None
) -> dict[tuple[int, int], int]:
    """The most programs of a launch, by (kind, stage): those that a device of these multiprocessors runs at a time,
    unless they are given. None: there is no device."""
    of_one = {
        (SMALL, SHRINK): tiling.shrink_programs,
        (SMALL, EXPAND): tiling.row_programs or tiling.expand_programs,
        (LARGE, SHRINK): tiling.shrink_programs,
        (LARGE, EXPAND): tiling.expand_programs,
    }
    if given or multiprocessors is None:
        return dict.fromkeys(of_one, given or _PROGRAMS_ON_HOST)
    return {launch: multiprocessors * programs for launch, programs in of_one.items()}


def site_records(weights: LoraWeights, slots: Sequence[int]) -> NDArray[np.int32]:
    """[slots, layers, sites, RECORD_HEAD + 2·max_chunks]: the tables of these slots, as the programs read them."""
    # [slots, chunks, layers, sites, 2] → [slots, layers, sites, 2, chunks], less the chunk that no adapter has
    tiles = weights.tables[list(slots), :-1].transpose(0, 2, 3, 4, 1)
    records = np.zeros((*tiles.shape[:3], RECORD_HEAD + 2 * tiles.shape[4]), np.int32)
    records[..., 0] = np.count_nonzero(tiles[..., 0, :], axis=-1)
    records[..., 1] = weights.vectors[list(slots)]
    records[..., RECORD_HEAD:] = tiles.reshape(*tiles.shape[:3], -1)
    return records


class LoraPlanner:
    """Writes lists of work for one arena's groups of sites.

    `programs`: how many run at a time; pieces are split so that as many have something to do.
    """

    def __init__(
        self, groups: Sequence[SiteGroup], max_chunks: int, tiling: LoraTiling, programs: int
    ) -> None:
        self.tiling = tiling
        self.max_ranks = max_chunks * CHUNK
        self.by_strips = tiling.strip_stages > 0 and self.max_ranks <= tiling.large_blocks_r[-1]
        """Whether B sides of large pieces go by strips."""
        self.recorded_block_r = self._fitting(self.max_ranks)
        """Ranks of large pieces that are computed at a time in recorded launches, whatever the step's adapters have."""
        self._programs = programs
        plans = []
        first = 0
        for group in groups:
            _, most = tiling.split(group.in_features, tiling.max_splits)
            hidden_sites = 1 if group.key == HEAD else len(group.sites)
            plans.append(GroupPlan(group, first, hidden_sites, most))
            first += len(group.sites)
        self.groups = tuple(plans)
        self.head_size = LIST_FIELDS * 4 * len(plans)
        """Numbers at the buffer's beginning: the lists' heads."""

    def units(self) -> list[NDArray[np.int32]]:
        """Units of small and of large pieces of each group."""
        large = self.tiling.large_block_n * (STRIP_TILES if self.by_strips else 1)
        return [plan.units(size) for plan in self.groups for size in (self.tiling.block_n, large)]

    def list_number(self, kind: int, stage: int, group: int) -> int:
        return (2 * kind + stage) * len(self.groups) + group

    def widest(self, records: NDArray[np.int32]) -> NDArray[np.int32]:
        """[slots, layers, sites, …] → [slots, groups]: the largest number of chunks of any site."""
        found = [
            records[:, :, plan.first_site : plan.first_site + len(plan.group.sites), 0].max(axis=(1, 2))
            for plan in self.groups
        ]
        return np.stack(found, axis=1)

    def present(self, records: NDArray[np.int32]) -> NDArray[np.bool_]:
        """[slots, layers, sites, …] → [slots, layers, groups]: whether there is any site of the group."""
        starts = [plan.first_site for plan in self.groups]
        found: NDArray[np.bool_] = np.logical_or.reduceat(records[..., 0] > 0, starts, axis=2)
        return found

    def capacity(self, max_rows: int, max_segments: int) -> int:
        """int32 that the list of any step of `max_rows` rows, of `max_segments` sequences with adapters, can take."""
        # Each run of rows is cut into pieces of small_rows at least, except its last.
        pieces = min(max_rows, max_rows // self.tiling.small_rows + max_segments)
        expanded = min(max_rows, max_rows // ROW_ROWS + max_segments) if self.tiling.row_programs else pieces
        blocks = -(-self.max_ranks // self.tiling.block_r)
        gated = sum(plan.gated for plan in self.groups) if self.by_strips else 0
        # Rows without a large piece are before, between and behind those of sequences.
        others = min(max_rows, max_rows // self.tiling.large_rows + max_segments + 1)
        listed = len(self.groups) * (pieces * blocks + expanded) + gated * others
        return self.head_size + PIECE_FIELDS * listed

    def hidden_capacity(self, max_rows: int, max_segments: int, *, fixed: bool) -> int:
        """float32 that the hidden values of any step of `max_rows` rows can take; `fixed` as for `write`."""
        fixed = fixed or self.tiling.batch_invariant
        small = max_rows if fixed else min(max_rows, max(self.tiling.max_small_rows, ROW_ROWS * max_segments))
        most = 0
        for plan in self.groups:
            values = self._most_planes(plan, small) * plan.hidden_sites
            if not fixed:
                # Planes of large pieces are several only while there are fewer pieces than programs.
                values += max(max_rows * plan.hidden_sites, 2 * self.tiling.large_rows * self._programs)
            most = max(most, values * self.max_ranks)
        return most

    def write(
        self,
        segments: Sequence[Segment],
        widest: NDArray[np.int32],
        num_rows: int,
        into: NDArray[np.int32],
        *,
        fixed: bool = False,
        prompts: bool = False,
    ) -> Work:
        """Write the list of a step into the beginning of `into`. `widest` [slots, groups] as `widest` makes it.

        `fixed`: with small pieces alone, for launches that were recorded before the step was known; with `prompts`, as
        `records_large` says. Segments of slot -1 are left out. Raises ValueError where `into` is too small.
        """
        slots, firsts, counts = _runs(segments)
        large = self.records_large(prompts) if fixed else not self.tiling.batch_invariant
        small = np.full(len(slots), not large) | (counts <= self.tiling.small_rows)
        if large and counts[small].sum() > self.tiling.max_small_rows:
            small = counts <= ROW_ROWS
        kinds = [
            _cut(slots[chosen], firsts[chosen], counts[chosen], height)
            for chosen, height in ((small, self.tiling.small_rows), (~small, self.tiling.large_rows))
        ]
        block_r = self.recorded_block_r if fixed else self._block_r(widest, slots[~small])
        steps = (self.tiling.block_r, block_r)
        lists: list[NDArray[np.int32]] = [np.empty((0, PIECE_FIELDS), np.int32)] * (4 * len(self.groups))
        # Of small pieces and of large ones, by group.
        splits = [[(1, 1)] * len(self.groups) for _ in kinds]
        others = [0] * len(self.groups)
        hidden = 0
        for g, plan in enumerate(self.groups):
            first = 0
            for kind, pieces in enumerate(kinds):
                listed, chunks = _heaviest_first(pieces, widest[pieces[:, 2], g])
                if not len(listed):
                    continue
                blocks = -(-chunks * CHUNK // steps[kind])
                splits[kind][g] = self._split(kind, plan, int(blocks.sum()))
                sizes = plan.hidden_sites * splits[kind][g][1] * listed[:, 1] * chunks * CHUNK
                ends = first + np.cumsum(sizes, dtype=np.int64)
                listed[:, 4] = ends - sizes
                listed[:, 5] = chunks * CHUNK
                first = int(ends[-1])
                by_rows = kind == SMALL and self.tiling.row_programs
                lists[self.list_number(kind, EXPAND, g)] = _by_rows(listed) if by_rows else listed
                lists[self.list_number(kind, SHRINK, g)] = _by_blocks(listed, blocks, steps[kind] // CHUNK)
            hidden = max(hidden, first)
            number = self.list_number(LARGE, EXPAND, g)
            if self.by_strips and plan.gated and (len(lists[number]) or (fixed and large)):
                rest = _others(lists[number], num_rows, self.tiling.large_rows)
                lists[number], others[g] = np.concatenate((lists[number], rest)), len(rest)
        if hidden >= 2**31:
            raise ValueError(
                f"a step of {num_rows} rows needs {hidden} hidden values: more than can be counted"
            )
        size = self._fill(lists, splits, others, into)
        lengths = [len(pieces) for pieces in lists]
        n = len(self.groups)
        for g, count in enumerate(others):
            lengths[self.list_number(LARGE, EXPAND, g)] -= count
        return Work(
            num_rows=num_rows,
            size=size,
            hidden=hidden,
            pieces=tuple(
                tuple(tuple(lengths[(2 * kind + stage) * n : (2 * kind + stage + 1) * n]) for stage in (0, 1))
                for kind in (SMALL, LARGE)
            ),
            splits=tuple(tuple(count for _, count in of_kind) for of_kind in splits),
            block_r=block_r,
            others=tuple(others),
        )

    def records_large(self, prompts: bool) -> bool:
        """Whether recorded launches of steps with prompt chunks, or of decoding rows alone, have large pieces."""
        return prompts and self.by_strips and not self.tiling.batch_invariant

    def _fitting(self, ranks: int) -> int:
        blocks = self.tiling.large_blocks_r
        return next((size for size in blocks if size >= ranks), blocks[-1])

    def _block_r(self, widest: NDArray[np.int32], slots: NDArray[np.int32]) -> int:
        """Ranks at a time: as many as the widest adapter with large pieces has, if they fit, so that x is read once."""
        return self._fitting(int(widest[slots].max(initial=0)) * CHUNK)

    def _split(self, kind: int, plan: GroupPlan, tiles: int) -> tuple[int, int]:
        """The columns in a plane, and the number of planes: enough that all programs have work."""
        wanted = -(-self._programs // max(1, tiles * plan.hidden_sites))
        features, block = plan.group.in_features, self.tiling.large_block_k
        if kind == SMALL:
            return self.tiling.split(features, wanted)
        wanted = max(1, min(wanted, features // (4 * block)))
        splits = max(size for size in self.tiling.large_splits if size <= wanted)
        split = -(-features // (splits * block)) * block
        return split, -(-features // split)

    def _most_planes(self, plan: GroupPlan, max_rows: int) -> int:
        """Rows by planes, of any step of up to `max_rows` rows in small pieces: the fewer pieces, the more planes."""
        height = self.tiling.small_rows
        pieces = range(1, -(-max_rows // height) + 1)
        return max(
            (min(max_rows, height * count) * self._split(SMALL, plan, count)[1] for count in pieces),
            default=0,
        )

    def _fill(
        self,
        lists: Sequence[NDArray[np.int32]],
        splits: Sequence[Sequence[tuple[int, int]]],
        others: Sequence[int],
        into: NDArray[np.int32],
    ) -> int:
        size = self.head_size + sum(pieces.size for pieces in lists)
        if size > len(into):
            raise ValueError(f"a list of work of {size} numbers does not fit into {len(into)}")
        start = self.head_size
        n = len(self.groups)
        for number, pieces in enumerate(lists):
            split, count = splits[number // (2 * n)][number % n]
            head = LIST_FIELDS * number
            into[head : head + LIST_FIELDS] = start, len(pieces), count, split
            into[start : start + pieces.size] = pieces.reshape(-1)
            start += pieces.size
        for g, plan in enumerate(self.groups):
            if self.by_strips and plan.gated:
                head = LIST_FIELDS * self.list_number(LARGE, EXPAND, g)
                into[head + 1] -= others[g]
                into[head + 3] = others[g]
        return size


def _runs(segments: Sequence[Segment]) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
    """(slot, first row, rows) of each run of adjacent rows of one adapter, by row."""
    table = np.array(segments, np.int32).reshape(-1, 3)
    table = table[table[:, 0] >= 0]
    table = table[np.argsort(table[:, 1], kind="stable")]
    slots, firsts, counts = table.T
    if not len(slots):
        return slots, firsts, counts
    begins = np.ones(len(slots), np.bool_)
    begins[1:] = (slots[1:] != slots[:-1]) | (firsts[1:] != firsts[:-1] + counts[:-1])
    at = np.flatnonzero(begins)
    return slots[at], firsts[at], np.add.reduceat(counts, at).astype(np.int32)


def _cut(
    slots: NDArray[np.int32], firsts: NDArray[np.int32], counts: NDArray[np.int32], height: int
) -> NDArray[np.int32]:
    """[pieces, PIECE_FIELDS], of `height` rows each; the last of a run may have fewer."""
    owner, offset = _repeat(-(-counts // height))
    pieces = np.zeros((len(owner), PIECE_FIELDS), np.int32)
    pieces[:, 0] = firsts[owner] + offset * height
    pieces[:, 1] = np.minimum(counts[owner] - offset * height, height)
    pieces[:, 2] = slots[owner]
    return pieces


def _by_blocks(pieces: NDArray[np.int32], blocks: NDArray[np.int32], step: int) -> NDArray[np.int32]:
    """Each piece as often as it has blocks of ranks, `step` chunks each."""
    owner, offset = _repeat(blocks)
    repeated = pieces[owner]
    repeated[:, 3] = offset * step
    return repeated


def _by_rows(pieces: NDArray[np.int32]) -> NDArray[np.int32]:
    """Pieces of up to ROW_ROWS rows, which find their hidden values among those of the pieces that they are cut
    from."""
    owner, offset = _repeat(-(-pieces[:, 1] // ROW_ROWS))
    cut = pieces[owner]
    skipped = offset * ROW_ROWS
    cut[:, 6] = cut[:, 1]
    cut[:, 0] += skipped
    cut[:, 1] = np.minimum(cut[:, 1] - skipped, ROW_ROWS)
    cut[:, 4] += skipped * cut[:, 5]
    return cut


def _others(pieces: NDArray[np.int32], num_rows: int, height: int) -> NDArray[np.int32]:
    """Pieces of slot -1, of `height` rows each, of the rows of a step that none of these pieces has."""
    order = pieces[np.argsort(pieces[:, 0])]
    begins = np.concatenate(([0], order[:, 0] + order[:, 1])).astype(np.int32)
    counts = np.concatenate((order[:, 0], [num_rows])).astype(np.int32) - begins
    there = counts > 0
    begins, counts = begins[there], counts[there]
    return _cut(np.full(len(begins), -1, np.int32), begins, counts, height)


def _repeat(times: NDArray[np.int32]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Each index `times[index]` times, and how often it came before."""
    owner = np.repeat(np.arange(len(times)), times)
    starts = np.cumsum(times, dtype=np.int64) - times
    return owner, np.arange(len(owner)) - starts[owner]


def _heaviest_first(
    pieces: NDArray[np.int32], chunks: NDArray[np.int32]
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Orders work items by cost, the longest first; empty ones are left out."""
    order = np.argsort(-chunks, kind="stable")
    order = order[: np.count_nonzero(chunks)]
    return pieces[order], chunks[order]
