"""States and windows: what layers keep of a sequence in one size, however long the sequence is. No torch.

A layer whose `CacheKind` has `state_bytes` has `window_bytes` too. It writes a state at the end of a window of 16
positions alone (`loraplex.engine.kv.sequence_states`), and what came since into the window, its sequence's own.

A sequence takes the place of a window when it starts, or resumes after a preemption, and releases it when it ends or
is preempted (`SequenceBlocks`). Nothing is cleared: each row of a window is written before it is read. A step in flight
may still write for the last owner. Steps run in the order of submission.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate

from loraplex.engine.kv.layers import CacheKind

_ALIGN = 64
_SNAPSHOTS_OF_REST = 4
_MOST_OF_BUDGET = 2
"""Places take at most one part in this number of the memory that they share with the blocks."""


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


def most_places(max_num_seqs: int, num_bytes: int, budget: int, for_blocks: int) -> int:
    """The number of places of `num_bytes` each, in `budget` bytes for places and blocks, where blocks need at least
    `for_blocks`: one a running sequence, fewer where they would take too much, and one at least. 0 where places have no
    bytes."""
    if not num_bytes:
        return 0
    return min(max_num_seqs, max(1, min(budget // _MOST_OF_BUDGET, budget - for_blocks) // num_bytes))


class Places:
    """The places of windows, numbered from 0, and which of them are free. With 0 of them no layer keeps a state.

    Taking one where none is free, and releasing one that is not held, are bugs of the engine's own and raise
    AssertionError.
    """

    def __init__(self, num_places: int) -> None:
        self.num_places = num_places
        self._free = [*reversed(range(num_places))]
        self._held: set[int] = set()

    def lacks(self, count: int) -> bool:
        """Whether `count` more sequences find no place each."""
        return self.num_places > 0 and len(self._free) < count

    def take(self) -> int:
        assert self._free, "no place is free: check lacks first"
        place = self._free.pop()
        self._held.add(place)
        return place

    def release(self, place: int) -> None:
        assert place in self._held, f"place {place} is released, but nobody holds it"
        self._held.remove(place)
        self._free.append(place)
