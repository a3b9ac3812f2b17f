"""Adapters to be brought when there is nothing better to do. Hints: the oldest are forgotten when there are many."""

from __future__ import annotations

from collections import OrderedDict

from loraplex.adapters.ref import AdapterRef

MAX_WISHES = 1024


class Wishes:
    """In the order in which they were last wished for; one a digest, and at most `MAX_WISHES`."""

    def __init__(self) -> None:
        self._refs: OrderedDict[str, AdapterRef] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._refs)

    def add(self, ref: AdapterRef) -> None:
        self._refs[ref.digest] = ref
        self._refs.move_to_end(ref.digest)
        if len(self._refs) > MAX_WISHES:
            self._refs.popitem(last=False)

    def first(self) -> AdapterRef:
        """The one that has waited longest. Raises StopIteration if there is none."""
        return next(iter(self._refs.values()))

    def remove(self, digest: str) -> None:
        """Does nothing for one that nobody wished for."""
        self._refs.pop(digest, None)
