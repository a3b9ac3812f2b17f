"""Adapters to load when the disk is idle. Hints: the oldest are dropped when there are many."""

from __future__ import annotations

from collections import OrderedDict

from loraplex.adapters.ref import AdapterRef

MAX_PREFETCHES = 1024


class PrefetchQueue:
    """In the order of their last hint; one a digest, and at most `MAX_PREFETCHES`."""

    def __init__(self) -> None:
        self._refs: OrderedDict[str, AdapterRef] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._refs)

    def enqueue(self, ref: AdapterRef) -> None:
        self._refs[ref.digest] = ref
        self._refs.move_to_end(ref.digest)
        if len(self._refs) > MAX_PREFETCHES:
            self._refs.popitem(last=False)

    def first(self) -> AdapterRef:
        """The one that has waited longest. Raises StopIteration if there is none."""
        return next(iter(self._refs.values()))

    def remove(self, digest: str) -> None:
        """Does nothing for a digest that is not in the queue."""
        self._refs.pop(digest, None)
