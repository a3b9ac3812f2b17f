"""Changes that adapters make by token: LoRA on the embedding, and rows of the embedding and of the head that they
replace.

For each row t of a step, with token v and adapter a, and for each row s of the logits with hidden state x[s]:

    y[t]         = E_a[v]                                      v is one of a's replaced rows of the embedding
    y[t]        += scale · A_{a}[:, v]ᵀ · B_a                  a has LoRA on the embedding
    logits[s, v] = x[s] · W_a[v]ᵀ                              for each v of a's replaced rows of the head

    A [R, V], stored transposed; B [R, C] with the scaling in it; E_a, W_a [n, C]; `scale` is the embedding's own

All are torch operations over all rows at once, and every one of their sums is made of element-wise products and
additions in an order of its own, in float32: over the ranks one after the other, over C by halves. So no bit of a row
depends on the other rows, on any device. A step without such adapters pays nothing.

The rows lie in tiles of one flat storage (`LoraWeights.storage`), anywhere at whole granules; the storage begins with
zeros, which stand for the ranks that an adapter does not have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from loraplex.kernels.lora.types import CHUNK, GRANULE_BYTES, Segment

_PART_BYTES = 32 << 20
"""The largest float32 operand that is gathered at a time."""

_Ints = NDArray[np.int64]


class Upload(Protocol):
    """Copies numbers to the device, see `loraplex.engine.host_to_device`."""

    def ints(self, values: _Ints) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class ReplacedRows:
    """Token ids [n], ascending, and the granule at which the row of each begins."""

    ids: _Ints
    granules: _Ints


@dataclass(frozen=True, slots=True)
class TokenTables:
    """Where one adapter's rows lie. `a_tiles` are the granules of the tiles of A, of `a_tile_rows` tokens each, all
    ranks of a token adjacent; `b_tiles` those of B, one for each chunk of ranks. Both are empty without LoRA on the
    embedding."""

    a_tiles: _Ints
    a_tile_rows: int
    b_tiles: _Ints
    embedding: ReplacedRows
    head: ReplacedRows


class TokenRowPass:
    """One step's rows, prepared: see the module. Make it with `begin_token_rows`."""

    def __init__(
        self,
        storage: torch.Tensor,
        hidden_size: int,
        lora: _LoraRows | None,
        replaced: _ReplacedInEmbedding | None,
        head: _ReplacedInHead | None,
    ) -> None:
        self._storage = storage
        self._hidden_size = hidden_size
        self._lora = lora
        self._replaced = replaced
        self._head = head

    def replace_embeddings(self, token_ids: torch.Tensor, y: torch.Tensor) -> None:
        """token_ids [T] int64, y [T, C]: the base's rows of its table, as they are stored there, changed in place."""
        rows = self._replaced
        if rows is None:
            return
        keys = token_ids.index_select(0, rows.rows) + rows.first_keys
        at = torch.searchsorted(rows.keys, keys).clamp_(max=rows.keys.shape[0] - 1)
        is_own = rows.keys.index_select(0, at) == keys
        found = _rows_at(self._storage, rows.granules.index_select(0, at), self._hidden_size)
        kept = y.index_select(0, rows.rows)
        y.index_copy_(0, rows.rows, torch.where(is_own[:, None], found, kept))

    def add_embeddings(self, token_ids: torch.Tensor, y: torch.Tensor, scale: float) -> None:
        """token_ids [T] int64, y [T, C]: the scaled embeddings, changed in place."""
        lora = self._lora
        if lora is None:
            return
        for first, last in _parts(lora.rows.shape[0], CHUNK * self._hidden_size):
            rows = lora.rows[first:last]
            hidden = self._hidden(lora, token_ids.index_select(0, rows), first, last)
            change = self._expand(lora, hidden, first, last).mul_(scale)
            y.index_copy_(0, rows, y.index_select(0, rows).float().add_(change).to(y.dtype))

    def replace_logits(self, x: torch.Tensor, logits: torch.Tensor) -> None:
        """x [S, C], logits [S, V]: the base's, changed in place."""
        head = self._head
        if head is None:
            return
        for first, last in _parts(head.rows.shape[0], self._hidden_size):
            products = _rows_at(self._storage, head.granules[first:last], self._hidden_size).float()
            rows = head.rows[first:last]
            products.mul_(x.index_select(0, rows).float())
            values = _sum_by_halves(products).to(logits.dtype)
            logits.index_put_((rows, head.columns[first:last]), values)

    def hidden_sums(self, token_ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """weights [P, T] of the tokens [T] int64: the sums of their A, [P, ranks] float32. For a pass with LoRA on the
        embedding whose T rows all use one adapter: what the numerical check measures."""
        assert self._lora is not None
        return weights @ self._hidden(self._lora, token_ids, 0, token_ids.shape[0])

    def expand(self, hidden: torch.Tensor) -> torch.Tensor:
        """[P, ranks] float32 of the pass's first P rows → their change [P, C] float32."""
        assert self._lora is not None
        return self._expand(self._lora, hidden, 0, hidden.shape[0])

    def _hidden(self, lora: _LoraRows, tokens: torch.Tensor, first: int, last: int) -> torch.Tensor:
        """The A of these tokens, which are those of the rows [first, last): [n, chunks · CHUNK] float32."""
        units = self._storage.view(-1, CHUNK)
        per_granule = GRANULE_BYTES // (CHUNK * self._storage.element_size())
        chunks, tile_rows = lora.chunks[first:last], lora.tile_rows[first:last]
        tile = lora.first_tile[first:last] + tokens.div(tile_rows, rounding_mode="floor")
        start = lora.a_tiles.index_select(0, tile) * per_granule + tokens.remainder(tile_rows) * chunks
        numbers = torch.arange(lora.b_tiles.shape[1], device=tokens.device)
        # A chunk that an adapter does not have is the zeros that the storage begins with.
        where = torch.where(numbers < chunks[:, None], start[:, None] + numbers, 0)
        return units.index_select(0, where.view(-1)).view(where.shape[0], -1).float()

    def _expand(self, lora: _LoraRows, hidden: torch.Tensor, first: int, last: int) -> torch.Tensor:
        change = torch.zeros(
            hidden.shape[0], self._hidden_size, dtype=torch.float32, device=self._storage.device
        )
        for chunk in range(lora.b_tiles.shape[1]):
            tiles = lora.b_tiles[:, chunk].index_select(0, lora.owner[first:last])
            b = _rows_at(self._storage, tiles, CHUNK * self._hidden_size).float()
            b = b.view(-1, CHUNK, self._hidden_size)
            b.mul_(hidden[:, chunk * CHUNK : (chunk + 1) * CHUNK, None])
            for rank in range(CHUNK):
                change.add_(b[:, rank])
        return change


def begin_token_rows(
    storage: torch.Tensor,
    hidden_size: int,
    vocab_size: int,
    tables: Mapping[int, TokenTables],
    segments: Sequence[Segment],
    logits_segments: Sequence[Segment],
    upload: Upload,
) -> TokenRowPass | None:
    """Prepare a step. `tables` by slot, of the slots whose adapters have any; `segments` are over the step's rows,
    `logits_segments` over those of its logits. None if no row has such an adapter."""
    if not any(slot in tables for slot, _, _ in segments):
        return None
    own = [segment for segment in segments if segment[0] in tables]
    sampled = [segment for segment in logits_segments if segment[0] in tables]
    lora = _lora_rows(tables, [s for s in own if len(tables[s[0]].b_tiles)], upload)
    replaced = _replaced(tables, [s for s in own if len(tables[s[0]].embedding.ids)], vocab_size, upload)
    head = _replaced_in_head(tables, [s for s in sampled if len(tables[s[0]].head.ids)], upload)
    return TokenRowPass(storage, hidden_size, lora, replaced, head)


@dataclass(frozen=True, slots=True)
class _LoraRows:
    """Rows [n] of the step with LoRA on the embedding, and for each the number of its adapter among those, its chunks,
    the tokens of its tiles of A, and where those begin in `a_tiles`. `b_tiles` [adapters, most chunks]."""

    rows: torch.Tensor
    owner: torch.Tensor
    chunks: torch.Tensor
    tile_rows: torch.Tensor
    first_tile: torch.Tensor
    a_tiles: torch.Tensor
    b_tiles: torch.Tensor


@dataclass(frozen=True, slots=True)
class _ReplacedInEmbedding:
    """Rows [n] of the step whose adapter replaces rows of the embedding. A key is a token of one of those adapters:
    `keys` ascending, with the granule of its row; a row's key is its token plus `first_keys`."""

    rows: torch.Tensor
    first_keys: torch.Tensor
    keys: torch.Tensor
    granules: torch.Tensor


@dataclass(frozen=True, slots=True)
class _ReplacedInHead:
    """Row and column [n] of the logits that are replaced, and the granule of the row of the head."""

    rows: torch.Tensor
    columns: torch.Tensor
    granules: torch.Tensor


def _lora_rows(
    tables: Mapping[int, TokenTables], segments: Sequence[Segment], upload: Upload
) -> _LoraRows | None:
    if not segments:
        return None
    slots, rows, owner = _rows_and_owners(segments)
    found = [tables[slot] for slot in slots]
    tiles = [len(table.a_tiles) for table in found]
    chunks = [len(table.b_tiles) for table in found]
    b_tiles = np.zeros((len(slots), max(chunks)), np.int64)
    for number, table in enumerate(found):
        b_tiles[number, : chunks[number]] = table.b_tiles
    tile_rows = [table.a_tile_rows for table in found]
    first_tile = np.cumsum([0, *tiles[:-1]])
    return _LoraRows(
        rows=upload.ints(rows),
        owner=upload.ints(owner),
        chunks=upload.ints(np.array(chunks, np.int64)[owner]),
        tile_rows=upload.ints(np.array(tile_rows, np.int64)[owner]),
        first_tile=upload.ints(first_tile[owner]),
        a_tiles=upload.ints(np.concatenate([table.a_tiles for table in found])),
        b_tiles=upload.ints(b_tiles.reshape(-1)).view(b_tiles.shape),
    )


def _replaced(
    tables: Mapping[int, TokenTables], segments: Sequence[Segment], vocab_size: int, upload: Upload
) -> _ReplacedInEmbedding | None:
    if not segments:
        return None
    slots, rows, owner = _rows_and_owners(segments)
    found = [tables[slot].embedding for slot in slots]
    keys = np.concatenate([number * vocab_size + one.ids for number, one in enumerate(found)])
    granules = np.concatenate([one.granules for one in found])
    return _ReplacedInEmbedding(
        upload.ints(rows), upload.ints(owner * vocab_size), upload.ints(keys), upload.ints(granules)
    )


def _replaced_in_head(
    tables: Mapping[int, TokenTables], segments: Sequence[Segment], upload: Upload
) -> _ReplacedInHead | None:
    if not segments:
        return None
    rows, columns, granules = [], [], []
    for slot, first, count in segments:
        head = tables[slot].head
        rows.append(np.repeat(np.arange(first, first + count, dtype=np.int64), len(head.ids)))
        columns.append(np.tile(head.ids, count))
        granules.append(np.tile(head.granules, count))
    return _ReplacedInHead(*(upload.ints(np.concatenate(each)) for each in (rows, columns, granules)))


def _rows_and_owners(segments: Sequence[Segment]) -> tuple[list[int], _Ints, _Ints]:
    """The slots, the rows [n] of all segments, and the place [n] of each one's slot among the slots."""
    slots = list(dict.fromkeys(slot for slot, _, _ in segments))
    rows = np.concatenate([np.arange(first, first + count, dtype=np.int64) for _, first, count in segments])
    owner = np.repeat(
        np.array([slots.index(slot) for slot, _, _ in segments], np.int64),
        [count for _, _, count in segments],
    )
    return slots, rows, owner


def _rows_at(storage: torch.Tensor, granules: torch.Tensor, size: int) -> torch.Tensor:
    """[n] granules → [n, size], in the storage's dtype."""
    granule = GRANULE_BYTES // storage.element_size()
    count = (storage.numel() - size) // granule + 1
    return storage.as_strided((count, size), (granule, 1)).index_select(0, granules)


def head_logits(
    storage: torch.Tensor, granules: torch.Tensor, x: torch.Tensor, rows: torch.Tensor
) -> torch.Tensor:
    """Logits of classifiers' heads, [n] float32. Each is of one row of x [P, C], whose numbers are `rows` [n], and one
    row of a head: C weights and a bias in float32, which begin at the granule with its number in `granules` [n]. The
    sums are made as in `TokenRowPass`, so no logit depends on the others."""
    numbers, width = storage.view(torch.float32), x.shape[1]
    logits = torch.empty(rows.shape[0], dtype=torch.float32, device=x.device)
    for first, last in _parts(rows.shape[0], width):
        head = _rows_at(numbers, granules[first:last], width + 1)
        products = x.index_select(0, rows[first:last]).float().mul_(head[:, :width])
        torch.add(_sum_by_halves(products), head[:, width], out=logits[first:last])
    return logits


def _sum_by_halves(values: torch.Tensor) -> torch.Tensor:
    """[n, C] → [n], overwriting the values. A library's own sum may cut them by n."""
    width = values.shape[1]
    while width > 1:
        half = (width + 1) // 2
        values[:, : width - half].add_(values[:, half:width])
        width = half
    return values[:, 0]


def _parts(count: int, elements: int) -> list[tuple[int, int]]:
    """Ranges of rows, of `elements` float32 values each, that stay below _PART_BYTES."""
    step = max(1, _PART_BYTES // (4 * elements))
    return [(first, min(first + step, count)) for first in range(0, count, step)]
