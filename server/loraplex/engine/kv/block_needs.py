"""How many KV blocks sequences need."""

from __future__ import annotations

from loraplex.engine.kv.blocks import BlockManager
from loraplex.engine.types import Sequence
from loraplex.kernels.attention import BLOCK_SIZE

_GROWTH = 1
"""Blocks that are reserved for the growth of each running sequence before another one starts."""


def blocks_for(num_tokens: int) -> int:
    """How many blocks hold `num_tokens` positions."""
    return -(-num_tokens // BLOCK_SIZE)


def holds_blocks(seq: Sequence) -> bool:
    """Whether preempting a running sequence may free blocks at once: those of one whose last token is in flight become
    free by themselves, and one that is measured has none."""
    return seq.measured is None and not seq.all_sampled


def blocks_missing(seq: Sequence) -> int:
    """Blocks that a running sequence still needs for the tokens that it has."""
    return max(0, blocks_for(seq.num_tokens) - len(seq.block_ids))


def lacks_blocks(blocks: BlockManager, seqs: list[Sequence]) -> bool:
    """Whether these running sequences need more blocks than are free."""
    return blocks.num_free < len(seqs) and blocks.num_free < sum(map(blocks_missing, seqs))


def reserved_blocks(seq: Sequence) -> int:
    """Blocks that a running sequence still needs for its tokens, and one more if it may outgrow them. Without that
    reserve a request could start in blocks that others are about to need; it would be preempted some steps later, and
    its work lost."""
    # Called for every running sequence in every step that may admit a request.
    missing, room = 0, len(seq.block_ids) * BLOCK_SIZE
    if room < len(seq.token_ids) + seq.num_pending:
        missing = blocks_missing(seq)
        room += missing * BLOCK_SIZE
    return missing + _GROWTH if seq.most_computed > room else missing


def blocks_short(blocks: BlockManager, seq: Sequence, reserved: int, found: list[int]) -> int:
    """The number of blocks, if above 0, that a waiting sequence lacks to start beside the reserved ones. `found` hold
    its beginning."""
    needed = blocks_for(seq.num_tokens) - len(found)
    return needed and needed - (blocks.num_free - blocks.num_idle(found) - reserved)
