"""From the tables of an image to those that a step looks tokens up in."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from loraplex.adapters.device.host_image import IN_EMBEDDING, IN_HEAD, HostImage
from loraplex.adapters.device.layout import ArenaLayout
from loraplex.kernels.lora.dispatch import GRANULE_BYTES
from loraplex.kernels.lora.token_rows import ReplacedRows, TokenTables

_RANKS, _B, _ROWS, _HEAD = range(4)
Place = Callable[[NDArray[np.int32]], NDArray[np.int64]]
"""Turns the granules of an image into those of the storage that it was written to."""


def describe_head(image: HostImage, place: Place) -> NDArray[np.int64] | None:
    """The granules at which the rows of an adapter's head begin, by label. None where it has no head."""
    kinds, _, starts = image.rows.T
    own = starts[kinds == _HEAD]
    return place(own) if len(own) else None


def describe_tokens(image: HostImage, layout: ArenaLayout, place: Place) -> TokenTables | None:
    """The tables of an image. None where the adapter changes nothing by token."""
    kinds, _, starts = image.rows.T
    if not (kinds != _HEAD).any():
        return None
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
