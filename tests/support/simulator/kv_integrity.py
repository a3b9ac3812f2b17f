"""Whether the tables, the lists and the counts of KV blocks and state slots agree with each other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Row
from itertools import chain

from loraplex.engine.kv.blocks import BlockManager
from loraplex.engine.kv.layers import blocks_for, blocks_unseen
from loraplex.engine.kv.prefix_blocks import GIVEN_BACK
from loraplex.engine.kv.sequence_blocks import SequenceBlocks
from loraplex.engine.kv.states import Places
from loraplex.engine.types import Sequence


def check_blocks(
    blocks: BlockManager, tables: Iterable[Row[int]], is_resident: Callable[[str], bool] = lambda digest: True
) -> None:
    """Raise AssertionError unless `tables`, the block lists of all sequences that there are, account for
    every reference, and the free lists and the indexes agree with them. `is_resident` says of a digest whether
    the adapter is in memory."""
    held = Counter(chain.from_iterable(tables))
    refs = {block: count for block, count in enumerate(blocks._refs) if count}
    assert refs == held, f"blocks are counted as {refs}, but held as {dict(held)}"
    free = sorted(block for block, count in enumerate(blocks._refs) if not count)
    listed = sorted((*blocks._empty, *blocks._of_departed, *blocks._cached))
    assert free == listed, f"free blocks are {free}, the free lists have {listed}"
    assert all(block in blocks._free_list(block) for block in free), "a free block is in another's list"
    named = {key: block for block, key in enumerate(blocks._key_of) if key is not None}
    assert named == blocks._block_of, "the prefix index and the blocks' own keys differ"
    of_adapter: dict[str, dict[int, None]] = {}
    for (_, digest), block in ((key[0], block) for key, block in named.items()):
        if digest is not None:
            of_adapter.setdefault(digest, {})[block] = None
    assert of_adapter == blocks._of_adapter, "the blocks of an adapter are miscounted"
    departed = {digest for digest in of_adapter if not is_resident(digest)}
    assert blocks._departed == departed, (
        f"{sorted(departed)} left memory, but the blocks of {sorted(blocks._departed)} are evicted first"
    )


def check_tables(blocks: SequenceBlocks, seqs: Iterable[Sequence]) -> None:
    """Raise AssertionError unless each sequence has what its rows may still read, and no more of a window's blocks. One
    whose prefix is on its way has no rows."""
    for seq in seqs:
        name, groups = seq.request_id, blocks._num_groups
        if seq.measured is None:
            assert blocks_for(seq.num_computed) * groups <= len(seq.block_ids), f"{name} lacks blocks"
        assert seq.num_given_back == seq.block_ids.count(GIVEN_BACK), (
            f"{name} holds other blocks than it counts"
        )
        if seq in blocks.restoring:  # its table has gaps
            continue
        for group, window in enumerate(blocks.needs.windows):
            unseen = 0 if window is None else blocks_unseen(window, seq.blocks_done)
            gone = [block == GIVEN_BACK for block in seq.block_ids[group::groups]]
            assert sum(gone[:unseen]) == unseen == sum(gone), f"{name} gave back the wrong blocks"


def check_windows(places: Places, taken: Iterable[int]) -> None:
    """Raise AssertionError unless `taken`, of all sequences that have begun, are the held ones, each once."""
    found = sorted(taken)
    assert found == sorted(places._held), f"places {sorted(places._held)} are held, sequences have {found}"
    every = sorted((*places._held, *places._free))
    assert every == [*range(places.num_places)], f"of {places.num_places} places there are {every}"
