"""From the tables of an image to those that a step looks tokens up in."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from loraplex.adapters.device.host_image import IN_EMBEDDING, IN_HEAD, HostImage
from loraplex.adapters.device.layout import ArenaLayout
from loraplex.kernels.lora.dispatch import GRANULE_BYTES
from loraplex.kernels.lora.token_rows import ReplacedRows, TokenTables

_RANKS, _B, _ROWS = range(3)


def describe_tokens(
    image: HostImage, layout: ArenaLayout, place: Callable[[NDArray[np.int32]], NDArray[np.int64]]
) -> TokenTables | None:
    """`place` turns the granules of an image into those of the storage that it was written to. None where the adapter
    changes nothing by token."""
    if not len(image.rows):
        return None
    kinds, _, starts = image.rows.T
    a_tiles, b_tiles, row_tiles = (place(starts[kinds == kind]) for kind in (_RANKS, _B, _ROWS))
    row_bytes = layout.replaced_row_bytes
    numbers = np.arange(len(image.tokens))
    per_tile = layout.page_bytes // row_bytes
    granules = (
        row_tiles[numbers // per_tile] + numbers % per_tile * (row_bytes // GRANULE_BYTES)
        if len(row_tiles)
        else np.empty(0, np.int64)
    )
    return TokenTables(
        a_tiles,
        layout.page_bytes // layout.token_rank_bytes(len(b_tiles)) if len(b_tiles) else 1,
        b_tiles,
        _replaced(image.tokens, granules, IN_EMBEDDING),
        _replaced(image.tokens, granules, IN_HEAD),
    )


def _replaced(tokens: NDArray[np.int32], granules: NDArray[np.int64], where: int) -> ReplacedRows:
    own = (tokens[:, 1] & where) != 0
    ids, starts = tokens[own, 0].astype(np.int64), granules[own]
    order = np.argsort(ids)
    return ReplacedRows(ids[order], starts[order])
