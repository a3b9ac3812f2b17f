"""Log probabilities as the engine packs them, made by hand."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import replace

from loraplex.engine.logprobs import Logprobs

Row = tuple[float, Sequence[tuple[int, float]]]
"""A token's own log probability, and (token id, log probability) of the most likely ones."""


def pack_logprobs(rows: Sequence[Row], num_top: int) -> Logprobs:
    values = [value for own, top in rows for value in (own, *(value for _, value in top))]
    ids = [token_id for _, top in rows for token_id, _ in top]
    return Logprobs(num_top, struct.pack(f"<{len(values)}f", *values), struct.pack(f"<{len(ids)}i", *ids))


def with_ranks(logprobs: Logprobs, ranks: Sequence[int]) -> Logprobs:
    return replace(logprobs, ranks=struct.pack(f"<{len(ranks)}i", *ranks))
