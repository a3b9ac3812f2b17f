"""Adapters to load though no request in the queue waits for them.

A request was refused that did not want to wait for the load, or one waits elsewhere and will enter the queue.
"""

from __future__ import annotations

from collections import OrderedDict

from loraplex.adapters.ref import AdapterRef

MAX_EXPECTED = 64
MAX_EXPECTED_OF_TENANT = 2
EXPECTED_S = 60.0
"""Loads that take longer are given up."""


class ExpectedAdapters:
    """By digest, in the order in which they were first expected."""

    def __init__(self) -> None:
        self._until: OrderedDict[str, tuple[AdapterRef, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._until)

    def expect(self, ref: AdapterRef, now: float) -> None:
        """Load this adapter. Ignored while as many are expected for its tenant as may be."""
        of_tenant = sum(other.tenant_id == ref.tenant_id for other, _ in self._until.values())
        if ref.digest in self._until or (
            of_tenant < MAX_EXPECTED_OF_TENANT and len(self._until) < MAX_EXPECTED
        ):
            self._until[ref.digest] = ref, now + EXPECTED_S

    def refs(self, now: float) -> list[AdapterRef]:
        """Those that are not there yet and were not given up."""
        for digest, (_, until) in list(self._until.items()):
            if until <= now:
                del self._until[digest]
        return [ref for ref, _ in self._until.values()]

    def remove(self, digest: str) -> None:
        """Does nothing for one that is not expected."""
        self._until.pop(digest, None)
