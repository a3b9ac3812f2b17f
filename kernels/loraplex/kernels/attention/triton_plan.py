"""The work of a step's paged attention on a GPU, as lists of work items in one array of int32.

The lists are made on the host, once a step for all layers, and travel in one copy. Where each lies in the array depends
on the capacity alone: a CUDA graph recorded over the array replays whatever it holds. Layers with different windows
have lists of their own, so that nothing outside of a window is ever visited.

Long contexts are cut into splits (Flash-Decoding; Dao et al., 2023), evenly, so that no program of a launch has more
to read than half of what each of `num_programs` has on average. Each writes its part of the answer with the logarithm
of its sum of exponentials; a second kernel adds the parts in their order. The cuts follow from the step alone: the same
step gives the same bits.

With batch-invariant tilings they follow from a row's position alone, so that a row gets the same bits in every step
(ADR 0040). Rows are computed in tiles that begin at multiples of a tile's rows, by one program for decodes and prompts
alike. A tile's splits end at multiples of their length, which is a power of two that grows with the tile's position:
there are never more than MAX_SPLITS, one more with a window. What a step holds of a tile is a part of its rows and none
of the positions behind them; neither changes an operation on the others: a hidden score has weight 0, and adds 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from loraplex.kernels.attention.previous import previous_slots, rows_among
from loraplex.kernels.attention.triton_tiling import AttentionShape, Tiling, Tilings

Int32 = NDArray[np.int32]
_Int64 = NDArray[np.int64]

ITEM_INTS = 8
"""A work item: first row, number of rows, position of the first row, first position to read, position where to stop,
where the block table begins, row of the partial results (-1: straight into the output), 0. It stops a multiple of the
tiling's `block_n` behind where it begins, or where its last row's sight ends."""
ENTRY_INTS = 4
"""A row whose parts are to be added: row, row of its first partial result, rows between two, number of parts."""
MAX_SPLITS = 8
"""Parts that a batch-invariant plan cuts a row's positions into. Each takes scratch memory for every row of a step."""
_ALIGN = 4


@dataclass(frozen=True, slots=True)
class AttentionCapacity:
    """The largest step that an array has room for: rows of the flat batch, sequences, entries of all block tables
    together, and rows of one sequence."""

    num_rows: int
    num_sequences: int
    num_blocks: int
    max_rows_per_sequence: int


@dataclass(frozen=True, slots=True)
class ListPlace:
    """Where one list lies, in int32s, how many items it has room for, and where its length stands."""

    count: int
    offset: int
    capacity: int


@dataclass(frozen=True, slots=True)
class WindowPlaces:
    """The lists of the layers with one window. `prefill` is None where no sequence can have enough rows."""

    decode: ListPlace
    prefill: ListPlace | None
    merge: ListPlace


@dataclass(frozen=True, slots=True)
class WindowCounts:
    """Items in the lists of one window."""

    decode: int
    prefill: int
    merge: int


@dataclass(frozen=True, slots=True)
class StepCounts:
    """The sizes of the lists that `AttentionPlan.write` wrote. `num_ints`: the array is used up to here, and no more
    need be copied. `windows`: by window."""

    num_rows: int
    num_ints: int
    windows: dict[int | None, WindowCounts]


@dataclass(slots=True)
class _Tiles:
    """Queries that are computed together: [n] each. `table`: where the block table begins."""

    row: _Int64
    rows: _Int64
    position: _Int64
    table: _Int64
    end: _Int64

    def where(self, chosen: NDArray[np.bool_]) -> _Tiles:
        return _Tiles(*(getattr(self, name)[chosen] for name in ("row", "rows", "position", "table", "end")))


class AttentionPlan:
    """The layout of the array for a capacity, and what fills it.

    `num_programs`: programs that the GPU runs at the same time, about twice its multiprocessors. `windows`: those
    of the model's layers, each once; none where layers only ask for the places of the `previous` positions before each
    row. An array takes `num_ints` int32s. `partial_rows`: rows of scratch memory for
    parts, [partial_rows, Hq, D] and [partial_rows, Hq] float32, shared by all layers. With P = num_programs, u =
    shape.units and m queries a tile, a list of n tiles becomes at most n + ⌈2P/u⌉ items; at most ⌈4P/u⌉ of them are
    parts, ⌈4P/u⌉·m rows of scratch.
    """

    def __init__(
        self,
        shape: AttentionShape,
        capacity: AttentionCapacity,
        tilings: Tilings,
        *,
        num_programs: int,
        windows: Sequence[int | None] = (None,),
        previous: int = 0,
    ) -> None:
        if not (windows or previous) or len(set(windows)) != len(windows):
            raise ValueError("the windows of the layers must be named, each once")
        if any(window is not None and window < 1 for window in windows):
            raise ValueError("a window has at least one position")
        self.shape = shape
        self.capacity = capacity
        self.tilings = tilings
        self._num_programs = num_programs
        self._decode_queries = tilings.decode.block_m // shape.heads_per_tile
        if tilings.batch_invariant:
            # So that no split ends within a tile.
            self._decode_queries = _power_of_two_below(self._decode_queries)
        self._prefill_queries = tilings.prefill.block_m // shape.heads_per_tile
        if min(self._decode_queries, self._prefill_queries) < 1:
            raise ValueError(
                f"a tile needs {shape.heads_per_tile} rows at least, one for each head of a group"
            )
        has_prefill = capacity.max_rows_per_sequence > self._decode_queries and not tilings.batch_invariant
        more = -(-2 * num_programs // shape.units)  # items that splitting adds
        self._first_prefill_part = 2 * more * self._decode_queries
        self.partial_rows = self._first_prefill_part
        rows = capacity.num_rows
        # A sequence's rows fill one item, rows of padding as many as they need.
        decode = min(rows, capacity.num_sequences + -(-rows // self._decode_queries)) + more
        prefill = 0
        merge = more * self._decode_queries
        if has_prefill:
            long = min(capacity.num_sequences, rows // (self._decode_queries + 1))
            prefill = rows // self._prefill_queries + long + more
            merge += more * self._prefill_queries
            self.partial_rows += 2 * more * self._prefill_queries
        if tilings.batch_invariant:
            positions = capacity.num_blocks * shape.block_size
            splits = min(-(-positions // tilings.decode.min_split), MAX_SPLITS + any(windows))
            # Each sequence begins and ends within a tile.
            decode = splits * min(rows, rows // self._decode_queries + 2 * capacity.num_sequences + 1)
            merge = rows if splits > 1 else 0
            self.partial_rows = splits * merge
        merge = min(merge, rows)
        counts = 0
        offset = _aligned(3 * len(windows))
        self.slots_offset, offset = offset, offset + _aligned(rows)
        self.previous = previous
        self.previous_offset, offset = offset, offset + _aligned(rows * previous)
        self.places: dict[int | None, WindowPlaces] = {}
        for window in windows:
            lists: list[ListPlace] = []
            for size, width in ((decode, ITEM_INTS), (prefill, ITEM_INTS), (merge, ENTRY_INTS)):
                lists.append(ListPlace(counts, offset, size))
                counts += 1
                offset += size * width
            self.places[window] = WindowPlaces(lists[0], lists[1] if has_prefill else None, lists[2])
        # Last, for it is the longest part and seldom full.
        self.tables_offset = offset
        self.num_ints = offset + _aligned(capacity.num_blocks)

    @property
    def decode_rows(self) -> int:
        """Rows of a sequence that the tiles of decoding take at most."""
        return self._decode_queries

    def write(
        self,
        array: Int32,
        num_rows: Sequence[int],
        seq_lens: Sequence[int],
        block_tables: Sequence[Sequence[int] | Int32],
        *,
        padded_rows: int | None = None,
        apart: Sequence[bool] | None = None,
    ) -> StepCounts:
        """Lay out a step in `array` [num_ints]: sequence i has the next num_rows[i] rows of the flat batch, seq_lens[i]
        positions at its end (those rows included) and the blocks block_tables[i]. Rows up to `padded_rows` are padding:
        their output is 0, and their K and V are not written.

        Sequences that are `apart` get slots, but no work. At `tables_offset` lie the block tables, one after the other.

        Raises ValueError where a table is too short, or the step exceeds the capacity.
        """
        counts = np.asarray(num_rows, dtype=np.int64)
        lens = np.asarray(seq_lens, dtype=np.int64)
        tables, starts = self._tables(counts, lens, block_tables)
        real = int(counts.sum())
        total = real if padded_rows is None else padded_rows
        self._check(counts, real, total, tables.size)
        used = self.tables_offset + tables.size
        array[self.tables_offset : used] = tables
        first_rows = np.cumsum(counts) - counts
        past = lens - counts
        self._write_slots(array, counts, past, starts, first_rows, tables, total)
        if self.previous:
            places = array[self.previous_offset :][: total * self.previous].reshape(total, self.previous)
            places[real:] = -1
            if real:
                before = previous_slots(counts, lens, starts, tables, self.previous)
                places[:real] = rows_among(before, array[self.slots_offset :][:real])
        sequences = _Tiles(first_rows, counts, past, starts, lens)
        if apart is not None:
            sequences = sequences.where(~np.array(apart, dtype=np.bool_))
        if self.tilings.batch_invariant:
            short = _cut_rows(sequences, self._decode_queries, sequences.position % self._decode_queries)
            prefill = sequences.where(sequences.rows < 0)  # none
        else:
            fits = sequences.rows <= self._decode_queries
            short = sequences.where(fits)
            prefill = _cut_rows(sequences.where(~fits), self._prefill_queries)
        decode = _with_padding(short, real, total, self._decode_queries)
        windows = {
            window: self._write_lists(array, places, window, decode, prefill)
            for window, places in self.places.items()
        }
        return StepCounts(total, used, windows)

    def _tables(
        self,
        counts: _Int64,
        lens: _Int64,
        block_tables: Sequence[Sequence[int] | Int32],
    ) -> tuple[Int32, _Int64]:
        """The block tables one after the other, and where each begins."""
        if not len(counts) == len(lens) == len(block_tables):
            raise ValueError("every sequence has a number of rows, a length and a block table")
        needed = -(-lens // self.shape.block_size)
        starts = np.cumsum(needed) - needed
        tables = np.empty(int(needed.sum()), dtype=np.int32)
        for count, length, blocks, start, table in zip(
            counts.tolist(), lens.tolist(), needed.tolist(), starts.tolist(), block_tables, strict=True
        ):
            if not 1 <= count <= length or len(table) < blocks:
                raise ValueError(
                    f"{count} rows of {length} positions do not fit a table of {len(table)} blocks"
                )
            tables[start : start + blocks] = table[:blocks]
        return tables, starts

    def _check(self, counts: _Int64, real: int, total: int, num_blocks: int) -> None:
        capacity = self.capacity
        longest = int(counts.max(initial=0))
        for what, size, most in (
            ("rows", max(real, total), capacity.num_rows),
            ("sequences", len(counts), capacity.num_sequences),
            ("blocks in tables", num_blocks, capacity.num_blocks),
            ("rows of one sequence", longest, capacity.max_rows_per_sequence),
        ):
            if size > most:
                raise ValueError(f"a step with {size} {what} does not fit a plan for {most}")
        if total < real:
            raise ValueError(f"{real} rows do not fit {total} with padding")

    def _write_slots(
        self,
        array: Int32,
        counts: _Int64,
        past: _Int64,
        starts: _Int64,
        first_rows: _Int64,
        tables: Int32,
        total: int,
    ) -> None:
        """Where each row's K and V go, block·P + offset; -1 for padding."""
        sequence = np.repeat(np.arange(len(counts)), counts)
        position = np.arange(len(sequence)) - first_rows[sequence] + past[sequence]
        size = self.shape.block_size
        slots = array[self.slots_offset : self.slots_offset + total]
        slots[: len(sequence)] = tables[starts[sequence] + position // size] * size + position % size
        slots[len(sequence) :] = -1

    def _write_lists(
        self, array: Int32, places: WindowPlaces, window: int | None, decode: _Tiles, prefill: _Tiles
    ) -> WindowCounts:
        decode_items, decode_rows = self._split(decode, window, self.tilings.decode, 0)
        prefill_items, prefill_rows = self._split(
            prefill, window, self.tilings.prefill, self._first_prefill_part
        )
        entries = np.concatenate((decode_rows, prefill_rows))
        _write_list(array, places.decode, decode_items)
        if places.prefill is not None:
            _write_list(array, places.prefill, prefill_items)
        _write_list(array, places.merge, entries)
        return WindowCounts(len(decode_items), len(prefill_items), len(entries))

    def _split(
        self, tiles: _Tiles, window: int | None, tiling: Tiling, first_part: int
    ) -> tuple[_Int64, _Int64]:
        """Items [n, ITEM_INTS], the longest first, so that the short ones fill the gaps; entries [m, ENTRY_INTS]."""
        if self.tilings.batch_invariant:
            begin, origin, length, parts = _splits_by_position(tiles, window, tiling, self._decode_queries)
        else:
            begin, length, parts = self._even_splits(tiles, window, tiling)
            origin = begin
        cut = parts > 1
        scratch = np.where(cut, parts * tiles.rows, 0)
        base = first_part + np.cumsum(scratch) - scratch
        tile = np.repeat(np.arange(len(parts)), parts)
        part = np.arange(len(tile)) - (np.cumsum(parts) - parts)[tile]
        edge = origin[tile] + part * length[tile]
        start = np.maximum(begin[tile], edge)
        # Rows of padding have no end.
        stop = np.maximum(start, np.minimum(edge + length[tile], tiles.end[tile]))
        items = np.zeros((len(tile), ITEM_INTS), dtype=np.int64)
        for column, values in enumerate((tiles.row, tiles.rows, tiles.position)):
            items[:, column] = values[tile]
        items[:, 3], items[:, 4], items[:, 5] = start, stop, tiles.table[tile]
        items[:, 6] = np.where(cut[tile], base[tile] + part * tiles.rows[tile], -1)
        items = items[np.argsort(start - stop, kind="stable")]
        split = np.flatnonzero(cut)
        rows = tiles.rows[split]
        of = np.repeat(split, rows)
        offset = np.arange(len(of)) - np.repeat(np.cumsum(rows) - rows, rows)
        columns = (tiles.row[of] + offset, base[of] + offset, tiles.rows[of], parts[of])
        return items, np.stack(columns, axis=1)

    def _even_splits(
        self, tiles: _Tiles, window: int | None, tiling: Tiling
    ) -> tuple[_Int64, _Int64, _Int64]:
        """Where each tile begins to read, how many positions it reads at a time, and how often: [n] each. By what there
        is to read in the whole step."""
        begin = np.zeros_like(tiles.end)
        if window is not None:
            begin = np.maximum(tiles.position - (window - 1), 0)
        span = np.where(tiles.end > 0, tiles.end - begin, 0)
        share = int(span.sum()) * self.shape.units / (2 * self._num_programs)
        longest = max(tiling.min_split, _multiple(int(np.ceil(share)), tiling.block_n))
        parts = np.maximum(1, -(-span // longest))
        length = np.maximum(1, -(-span // (parts * tiling.block_n)) * tiling.block_n)
        return begin, length, np.maximum(1, -(-span // length))


def _splits_by_position(
    tiles: _Tiles, window: int | None, tiling: Tiling, queries: int
) -> tuple[_Int64, _Int64, _Int64, _Int64]:
    """Where each tile begins to read, where the split begins that this is in, the positions of a split, and how many
    splits it reads: [n] each. By the number of the tile in its sequence, whichever of its rows are there."""
    first = tiles.position // queries * queries
    last = first + queries
    begin = np.zeros_like(first)
    if window is not None:
        begin = np.maximum(first - (window - 1), 0) // tiling.block_n * tiling.block_n
    share = -(-(last - begin) // MAX_SPLITS)
    length = np.maximum(tiling.min_split, np.exp2(np.ceil(np.log2(share))).astype(np.int64))
    origin = begin // length * length
    return begin, origin, length, -(-(last - origin) // length)


def _write_list(array: Int32, place: ListPlace, items: _Int64) -> None:
    assert len(items) <= place.capacity
    array[place.count] = len(items)
    array[place.offset : place.offset + items.size] = items.reshape(-1)


def _with_padding(tiles: _Tiles, first: int, total: int, queries: int) -> _Tiles:
    """Padding rows read nothing."""
    row = np.arange(first, total, queries, dtype=np.int64)
    none = np.zeros_like(row)
    added = (row, np.minimum(queries, total - row), none, none, none)
    old = (tiles.row, tiles.rows, tiles.position, tiles.table, tiles.end)
    return _Tiles(*(np.concatenate(pair) for pair in zip(old, added, strict=True)))


def _cut_rows(sequences: _Tiles, queries: int, lead: _Int64 | int = 0) -> _Tiles:
    """Tiles of `queries` rows each, which see no further than their last row. `lead` [n]: rows of the first tile that
    come before the sequence's own."""
    leads = np.broadcast_to(lead, sequences.rows.shape)
    pieces = -(-(leads + sequences.rows) // queries)
    of = np.repeat(np.arange(len(pieces)), pieces)
    edge = (np.arange(len(of)) - (np.cumsum(pieces) - pieces)[of]) * queries - leads[of]
    skip = np.maximum(edge, 0)
    rows = np.minimum(edge + queries, sequences.rows[of]) - skip
    position = sequences.position[of] + skip
    return _Tiles(sequences.row[of] + skip, rows, position, sequences.table[of], position + rows)


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


def _multiple(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def _power_of_two_below(size: int) -> int:
    """The largest that is not above `size`; 0 for 0."""
    return 1 << size.bit_length() - 1 if size else 0
