"""What is remembered of adapters that could not be brought to the device, so that nobody waits for them again and
again."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from loraplex.adapters.ref import AdapterRef

FIRST_BACKOFF_S = 1.0
LAST_BACKOFF_S = 30.0
"""A failed load is answered from memory for so long before it is tried again: the first time, and at most."""
MAX_FAILURES = 4096


@dataclass(slots=True)
class Failure:
    """`num_pages` is its size where it was loaded and had no place; 0 where it is not known."""

    ref: AdapterRef
    message: str
    retry_at: float
    backoff_s: float
    num_pages: int = 0

    def again(self, message: str, now: float) -> None:
        """The same adapter, found to have no place without another load."""
        self.message, self.retry_at = message, now + self.backoff_s


class Failures:
    """By digest, the oldest forgotten first. `count` is how many there were."""

    def __init__(self) -> None:
        self._by_digest: OrderedDict[str, Failure] = OrderedDict()
        self.count = 0

    @property
    def refs(self) -> dict[str, AdapterRef]:
        return {digest: failure.ref for digest, failure in self._by_digest.items()}

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

    def add(self, ref: AdapterRef, message: str, now: float, num_pages: int) -> None:
        """Each failure doubles the wait after it."""
        self.count += 1
        last = self._by_digest.pop(ref.digest, None)
        backoff_s = FIRST_BACKOFF_S if last is None else min(2 * last.backoff_s, LAST_BACKOFF_S)
        self._by_digest[ref.digest] = Failure(ref, message, now + backoff_s, backoff_s, num_pages)
        if len(self._by_digest) > MAX_FAILURES:
            self._by_digest.popitem(last=False)

    def forget(self, digest: str) -> None:
        self._by_digest.pop(digest, None)
