"""Adapters that could not be loaded or copied, with a back-off, so that requests for them fail at once."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from loraplex.adapters.ref import AdapterRef

FIRST_BACKOFF_S = 1.0
LAST_BACKOFF_S = 30.0
"""Seconds before a failed load is tried again: after the first failure, and at most."""
MAX_FAILURES = 4096


@dataclass(slots=True)
class Failure:
    """`num_pages` is its size if it was loaded and did not fit; 0 if unknown."""

    ref: AdapterRef
    message: str
    retry_at: float
    backoff_s: float
    num_pages: int = 0

    def again(self, message: str, now: float) -> None:
        """The same adapter still does not fit, as found without another load."""
        self.message, self.retry_at = message, now + self.backoff_s


class Failures:
    """Failures by digest; the oldest are dropped first. `count` is the number of failures so far."""

    def __init__(self) -> None:
        self._by_digest: OrderedDict[str, Failure] = OrderedDict()
        self.count = 0

    @property
    def refs(self) -> dict[str, AdapterRef]:
        return {digest: failure.ref for digest, failure in self._by_digest.items()}

    def ref(self, digest: str) -> AdapterRef | None:
        """The version that failed under this digest."""
        failure = self._by_digest.get(digest)
        return None if failure is None else failure.ref

    def get(self, digest: str) -> Failure | None:
        return self._by_digest.get(digest)

    def message(self, digest: str) -> str:
        """Empty where nothing failed."""
        failure = self._by_digest.get(digest)
        return "" if failure is None else failure.message

    def retry_at(self, digest: str) -> float:
        """When it may be tried again."""
        failure = self._by_digest.get(digest)
        return float("-inf") if failure is None else failure.retry_at

    def record(self, ref: AdapterRef, message: str, now: float, num_pages: int) -> None:
        """Record a failure. Each one doubles the back-off."""
        self.count += 1
        last = self._by_digest.pop(ref.digest, None)
        backoff_s = FIRST_BACKOFF_S if last is None else min(2 * last.backoff_s, LAST_BACKOFF_S)
        self._by_digest[ref.digest] = Failure(ref, message, now + backoff_s, backoff_s, num_pages)
        if len(self._by_digest) > MAX_FAILURES:
            self._by_digest.popitem(last=False)

    def clear(self, digest: str) -> None:
        self._by_digest.pop(digest, None)
