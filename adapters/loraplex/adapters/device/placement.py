"""Where the tiles of an adapter lie in its image, and the tables that say so."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from loraplex.adapters.device.expert_tiles import SIDES, ExpertKey, ExpertTile, Side
from loraplex.adapters.device.layout import (
    CLASSIFIER,
    IN_FLOAT32,
    REPLACED,
    ArenaLayout,
    SiteKey,
    Tile,
    TileKind,
    place_tiles,
)
from loraplex.adapters.spec import AdapterSpec
from loraplex.kernels.lora.dispatch import CHUNK, GRANULE_BYTES
from loraplex.kernels.lora.site_groups import EMBEDDING, HEAD

HEAD_LAYER = -1
"""The layer by which an image's tables name the head."""
_ROW_KINDS: dict[TileKind, int] = {"token_ranks": 0, "b": 1, "token_rows": 2, "head_rows": 3}
"""How `HostImage.rows` names the tiles of the embedding, and the rows of a head."""


@dataclass(frozen=True, slots=True)
class Piece:
    """The part of a site's matrix that belongs into a tile, and which elements of the image it takes: in the layout's
    dtype, or in float32 (`IN_FLOAT32`). Of the last chunk, the rows that there are. What is looked up by token lies
    transposed in the tile, a token's `stride` elements behind the one before it."""

    rows: slice
    columns: slice
    elements: slice
    stride: int = 0


@dataclass(frozen=True, slots=True)
class ExpertPlacement:
    """`pieces` by the index of a key, the side and the expert that holds them: rows of its matrix [rank, features].
    `tiles` int32 [k, 6] and `heights` int32 [m, 3] are `experts` and `heights` of `HostImage`."""

    keys: tuple[ExpertKey, ...]
    pieces: Mapping[tuple[int, Side, int], tuple[Piece, ...]]
    tiles: NDArray[np.int32]
    heights: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Placement:
    """`pieces` by the index of a site in `spec.sites` and the kind of tile; `fillers` are the bytes between and within
    tiles that belong to no piece. `sites` int32 [n, 5], `vectors` int32 [m, 3] and `rows` int32 [k, 3] are those of
    `HostImage`; images share them, so they can't be written to."""

    num_pages: int
    pieces: Mapping[tuple[int, TileKind], tuple[Piece, ...]]
    fillers: tuple[slice, ...]
    sites: NDArray[np.int32]
    vectors: NDArray[np.int32]
    rows: NDArray[np.int32]
    experts: ExpertPlacement


def place(spec: AdapterSpec, layout: ArenaLayout, experts: Sequence[ExpertKey] = ()) -> Placement:
    """`experts`: what `examine_experts` found. Adapters of one recipe differ in values alone: the placements of the
    last few recipes are kept, but those of experts. They are large, and which experts have no effect differs."""
    keys = [SiteKey(s.layer, s.site, s.rank, s.magnitude is not None) for s in spec.sites]
    if spec.tokens:
        keys.append(SiteKey(0, REPLACED, sum(len(table.ids) for table in spec.tokens), False))
    if spec.head is not None:
        keys.append(SiteKey(0, CLASSIFIER, spec.head.num_labels, False))
    if experts:
        return _place(layout, tuple(keys), tuple(experts))
    return _place_without_experts(layout, tuple(keys))


@lru_cache(maxsize=32)
def _place_without_experts(layout: ArenaLayout, keys: tuple[SiteKey, ...]) -> Placement:
    return _place(layout, keys, ())


def _place(layout: ArenaLayout, keys: tuple[SiteKey, ...], experts: tuple[ExpertKey, ...]) -> Placement:
    tiles = layout.tiles(keys)
    of_experts = [] if layout.experts is None else [*layout.experts.tiles(experts)]
    sizes = [tile.num_bytes for tile in tiles] + [tile.num_bytes for tile in of_experts]
    offsets, num_pages = place_tiles(sizes, layout.page_bytes)
    pieces: dict[tuple[int, TileKind], list[Piece]] = defaultdict(list)
    spans: list[tuple[int, int]] = []
    tables = _Tables(layout, keys)
    for tile, offset in zip(tiles, offsets[: len(tiles)], strict=True):
        itemsize = 4 if tile.kind in IN_FLOAT32 else layout.dtype.itemsize
        first = offset // itemsize
        if tile.kind in ("token_ranks", "token_rows", "head_rows"):
            piece = _row_piece(layout, tile, first, keys[tile.index].rank)
        else:
            piece = _piece(tile, first, keys[tile.index].rank)
        pieces[tile.index, tile.kind].append(piece)
        spans.append((offset, piece.elements.stop * itemsize))
        tables.put(tile, offset // GRANULE_BYTES)
    placed = _place_experts(layout, experts, of_experts, offsets[len(tiles) :])
    size = layout.dtype.itemsize
    spans += [
        (piece.elements.start * size, piece.elements.stop * size)
        for pieces_of_one in placed.pieces.values()
        for piece in pieces_of_one
    ]
    unused = range(num_pages, layout.expert_pages if of_experts else 0)
    return Placement(
        num_pages + len(unused),
        {key: tuple(some) for key, some in pieces.items()},
        (
            *_gaps(spans, num_pages * layout.page_bytes),
            *(slice(page * layout.page_bytes, (page + 1) * layout.page_bytes) for page in unused),
        ),
        tables.sites(),
        tables.vectors(),
        tables.rows(),
        placed,
    )


def _place_experts(
    layout: ArenaLayout, keys: tuple[ExpertKey, ...], tiles: Sequence[ExpertTile], offsets: Sequence[int]
) -> ExpertPlacement:
    pieces: dict[tuple[int, Side, int], list[Piece]] = defaultdict(list)
    starts: dict[tuple[int, Side, int, int], int] = {}
    tall = [key.height for key in keys]  # once a site: there are thousands of tiles
    for tile, offset in zip(tiles, offsets, strict=True):
        key, height = keys[tile.key], tall[tile.key]
        first = tile.chunk * height
        rows = slice(first, min(first + height, key.ranks[tile.expert]))
        begin = offset // layout.dtype.itemsize
        elements = slice(begin, begin + (rows.stop - rows.start) * tile.features)
        pieces[tile.key, tile.side, tile.expert].append(Piece(rows, slice(None), elements))
        starts[tile.key, tile.side, tile.expert, tile.chunk] = offset // GRANULE_BYTES
    listed = []
    heights = []
    for index, (key, height) in enumerate(zip(keys, tall, strict=True)):
        assert layout.experts is not None
        place = key.layer, layout.experts.number(key.site)
        heights.append((*place, height))
        for expert, rank in enumerate(key.ranks):
            holders = [(side, key.holder(side, expert)) for side in SIDES if rank]
            for chunk in range(-(-rank // height) if rank else 0):
                where = (starts[index, side, holder, chunk] for side, holder in holders)
                listed.append((*place, expert, chunk, *where))
    found = {key: tuple(some) for key, some in pieces.items()}
    return ExpertPlacement(keys, found, _table(listed, 6), _table(heights, 3))


def _gaps(spans: list[tuple[int, int]], end: int) -> tuple[slice, ...]:
    """The gaps between the spans in [0, end)."""
    spans.sort()
    ends = [0, *(span[1] for span in spans)]
    starts = [*(span[0] for span in spans), end]
    return tuple(slice(a, b) for a, b in zip(ends, starts, strict=True) if a < b)


def _piece(tile: Tile, first: int, rank: int) -> Piece:
    begin, end = (0, 2) if tile.kind == "vectors" else (tile.chunk * CHUNK, (tile.chunk + 1) * CHUNK)
    rows = slice(begin, end if tile.kind == "vectors" else min(end, rank))
    size = (rows.stop - rows.start) * (tile.end - tile.start)
    return Piece(rows, slice(tile.start, tile.end), slice(first, first + size))


def _row_piece(layout: ArenaLayout, tile: Tile, first: int, rank: int) -> Piece:
    tokens = slice(tile.start, tile.end)
    if tile.kind == "token_ranks":
        stride = layout.token_rank_bytes(-(-rank // CHUNK)) // layout.dtype.itemsize
        rows, columns = slice(0, rank), tokens
    elif tile.kind == "head_rows":
        stride = layout.head_row_bytes // 4
        rows, columns = tokens, slice(None)
    else:
        stride = layout.replaced_row_bytes // layout.dtype.itemsize
        rows, columns = tokens, slice(None)
    size = (tile.end - tile.start) * stride
    return Piece(rows, columns, slice(first, first + size), stride)


class _Tables:
    """The rows of `HostImage.sites`, `HostImage.vectors` and `HostImage.rows`, tile by tile."""

    def __init__(self, layout: ArenaLayout, keys: tuple[SiteKey, ...]) -> None:
        self._layout = layout
        self._keys = keys
        self._sites: dict[tuple[int, int, int], list[int]] = {}
        self._vectors: list[tuple[int, int, int]] = []
        self._rows: list[tuple[int, int, int]] = []

    def put(self, tile: Tile, start: int) -> None:
        key = self._keys[tile.index]
        if key.site == CLASSIFIER:
            step = self._layout.head_row_bytes // GRANULE_BYTES
            labels = range(tile.start, tile.end)
            kind = _ROW_KINDS[tile.kind]
            self._rows += [(kind, label, start + (label - tile.start) * step) for label in labels]
            return
        if key.site in (EMBEDDING, REPLACED):
            number = tile.chunk if tile.kind == "b" else tile.start
            self._rows.append((_ROW_KINDS[tile.kind], number, start))
            return
        columns = self._layout.columns(key.layer, key.site)
        layer = HEAD_LAYER if key.site == HEAD else key.layer
        first = 0 if key.site == HEAD else self._layout.sites[key.layer, key.site]
        if tile.kind == "a":
            for block in range(len(columns)):
                self._sites[layer, first + block, tile.chunk] = [start, 0]
            return
        number = first + columns.index((tile.start, tile.end))
        if tile.kind == "b":
            self._sites[layer, number, tile.chunk][1] = start
        else:
            self._vectors.append((layer, number, start))

    def sites(self) -> NDArray[np.int32]:
        return _table([(*key, *starts) for key, starts in self._sites.items()], 5)

    def vectors(self) -> NDArray[np.int32]:
        return _table(self._vectors, 3)

    def rows(self) -> NDArray[np.int32]:
        return _table(self._rows, 3)


def _table(rows: Sequence[tuple[int, ...]], width: int) -> NDArray[np.int32]:
    table = np.array(rows, np.int32).reshape(-1, width)
    table.flags.writeable = False
    return table
