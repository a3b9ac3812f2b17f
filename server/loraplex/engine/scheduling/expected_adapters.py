"""Adapters to load though no request in the queue waits for them.

A request was refused that did not want to wait for the load, or one waits elsewhere and will enter the queue.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from loraplex.adapters.ref import AdapterRef

MAX_EXPECTED = 64
MAX_EXPECTED_OF_TENANT = 2
EXPECTED_S = 60.0
"""Loads that take longer are given up."""


@dataclass(slots=True)
class ExpectedAdapter:
    """`is_charged`: its tenant was charged for the load."""

    ref: AdapterRef
    until: float
    is_charged: bool = False


class ExpectedAdapters:
    """Expected adapters by digest, in the order in which they were first expected."""

    def __init__(self) -> None:
        self._by_digest: OrderedDict[str, ExpectedAdapter] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_digest)

    def expect(self, ref: AdapterRef, now: float) -> None:
        """Load this adapter for its tenant. Ignored while as many are expected for the tenant as may be."""
        known = self._by_digest.get(ref.digest)
        if known is not None:
            known.until = now + EXPECTED_S
            return
        of_tenant = sum(other.ref.tenant_id == ref.tenant_id for other in self._by_digest.values())
        if of_tenant < MAX_EXPECTED_OF_TENANT and len(self._by_digest) < MAX_EXPECTED:
            self._by_digest[ref.digest] = ExpectedAdapter(ref, now + EXPECTED_S)

    def pending(self, now: float) -> list[ExpectedAdapter]:
        """Those that are not there yet and were not given up."""
        for digest, expected in list(self._by_digest.items()):
            if expected.until <= now:
                del self._by_digest[digest]
        return list(self._by_digest.values())

    def is_charged(self, digest: str, tenant_id: str) -> bool:
        """Whether this tenant was charged for this load."""
        expected = self._by_digest.get(digest)
        return expected is not None and expected.is_charged and expected.ref.tenant_id == tenant_id

    def remove(self, digest: str) -> None:
        """Does nothing for one that is not expected."""
        self._by_digest.pop(digest, None)
