"""How many KV blocks sequences need."""

from __future__ import annotations

from loraplex.engine.config import BLOCK_SIZE
from loraplex.engine.types import Sequence

_GROWTH = 1
"""Blocks that are kept for each running sequence to grow into before another one starts."""


def blocks_for(num_tokens: int) -> int:
    """How many blocks hold `num_tokens` positions."""
    return -(-num_tokens // BLOCK_SIZE)


def blocks_missing(seq: Sequence) -> int:
    """Blocks that a running sequence still needs for the tokens that it has."""
    return max(0, blocks_for(seq.num_tokens) - len(seq.block_ids))


def blocks_to_come(seq: Sequence) -> int:
    """Blocks that a running sequence still needs for the tokens that it has, and one more if it may outgrow them: who
    is let in where the others are about to grow is preempted some steps later, its work done in vain."""
    # Asked of every running sequence in every step that might let one in.
    missing, room = 0, len(seq.block_ids) * BLOCK_SIZE
    if room < len(seq.token_ids) + seq.num_pending:
        missing = blocks_missing(seq)
        room += missing * BLOCK_SIZE
    return missing + _GROWTH if seq.most_computed > room else missing
