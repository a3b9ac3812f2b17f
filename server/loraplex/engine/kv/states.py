"""State slots: what layers keep of a sequence in one size, however long the sequence is. No torch.

A layer whose `CacheKind` has `state_bytes` writes over its state at each position. So no state can be shared, found by
a prefix key, or cut back to an earlier position. A slot holds one sequence's states of all such layers.

A sequence takes a slot when it starts, or resumes after a preemption, and releases it when it ends or is preempted
(`SequenceBlocks`). The step that computes its position 0 clears the slot before any layer runs: the last owner may have
left anything there, and a step in flight may still write for that owner. Steps run in the order of submission.

A layer with `window_bytes` too writes its state at the end of a window alone: `loraplex.engine.kv.sequence_states` has
those states, and the slots here are the places of windows.

What computes a position twice begins at position 0 again: a sequence whose step did not fit into the device's memory,
and one that was preempted. Tokens are not drafted, for a rejected one could not be taken back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate

from loraplex.engine.kv.layers import CacheKind

_ALIGN = 64
_SNAPSHOTS_OF_REST = 4
_MOST_OF_BUDGET = 2
"""Slots take at most one part in this number of the memory that they share with the blocks."""


def offsets(sizes: Iterable[int]) -> tuple[int, ...]:
    """Where the part of each layer begins in memory for parts of these sizes, in bytes, and last the size of all."""
    return tuple(accumulate((-(-size // _ALIGN) * _ALIGN for size in sizes), initial=0))


def slot_bytes(caches: Sequence[CacheKind]) -> int:
    """Bytes of a sequence's state and window."""
    return state_bytes(caches) + window_bytes(caches)


def state_bytes(caches: Sequence[CacheKind]) -> int:
    return offsets(layer.state_bytes for layer in caches)[-1]


def window_bytes(caches: Sequence[CacheKind]) -> int:
    return offsets(layer.window_bytes for layer in caches)[-1]


def num_snapshots(state: int, rest: int, for_blocks: int, wanted: int = 0) -> int:
    """States for the prefix cache, of `state` bytes each: in `wanted` bytes, else in a quarter of the `rest` bytes
    behind those of the running sequences, as far as blocks keep `for_blocks`; and one at least."""
    return max(1, min(wanted or rest // _SNAPSHOTS_OF_REST, rest - for_blocks) // state)


def most_slots(max_num_seqs: int, num_bytes: int, budget: int, for_blocks: int) -> int:
    """The number of slots of `num_bytes` each, in `budget` bytes for slots and blocks, where blocks need at least
    `for_blocks`: one a running sequence, fewer where they would take too much, and one at least. 0 where slots have no
    bytes."""
    if not num_bytes:
        return 0
    return min(max_num_seqs, max(1, min(budget // _MOST_OF_BUDGET, budget - for_blocks) // num_bytes))


class StateSlots:
    """The slots, numbered from 0, and which of them are free. With 0 slots no layer keeps a state.

    Taking a slot where none is free, and releasing one that is not held, are bugs of the engine's own and raise
    AssertionError.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = [*reversed(range(num_slots))]
        self._held: set[int] = set()

    @property
    def num_used(self) -> int:
        return len(self._held)

    def lacks(self, count: int) -> bool:
        """Whether `count` more sequences find no slot each."""
        return 0 < self.num_slots < len(self._held) + count

    def take(self) -> int:
        assert self._free, "no state slot is free: check lacks first"
        slot = self._free.pop()
        self._held.add(slot)
        return slot

    def release(self, slot: int) -> None:
        assert slot in self._held, f"state slot {slot} is released, but nobody holds it"
        self._held.remove(slot)
        self._free.append(slot)
