"""Adapters to load when the disk is idle."""

from __future__ import annotations

from collections import OrderedDict

from loraplex.adapters.ref import AdapterRef

MAX_PREFETCHES = 4096


class PrefetchQueue:
    """Hints, in the order of their last one; one a digest, and at most `MAX_PREFETCHES`: the oldest are dropped."""

    def __init__(self) -> None:
        self._refs: OrderedDict[str, AdapterRef] = OrderedDict()

    def __len__(self) -> int:
        return len(self._refs)

    def enqueue(self, ref: AdapterRef) -> None:
        self._refs[ref.digest] = ref
        self._refs.move_to_end(ref.digest)
        if len(self._refs) > MAX_PREFETCHES:
            self._refs.popitem(last=False)

    def put_back(self, ref: AdapterRef) -> None:
        """Make it the first again."""
        self._refs[ref.digest] = ref
        self._refs.move_to_end(ref.digest, last=False)

    def first(self) -> AdapterRef:
        """The one that has waited longest. Raises StopIteration if there is none."""
        return next(iter(self._refs.values()))

    def clear(self) -> None:
        self._refs.clear()

    def remove(self, digest: str) -> bool:
        """Whether it was in the queue."""
        return self._refs.pop(digest, None) is not None
