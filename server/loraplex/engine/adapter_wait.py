"""Requests that wait for their adapter to come to the device, and what may be lent to others meanwhile."""

from __future__ import annotations

from loraplex.adapters.ref import AdapterRef
from loraplex.engine.types import Sequence


class AdapterWait:
    """Where requests are parked that the scheduler passed by for want of their adapter.

    A request ages from when it was first passed by until it runs. When the oldest has aged `aging_s`, it has
    precedence: it is asked for before all others, and while it finds no room on the device, no adapter but its own
    is lent out or sent for. Leases only end then and pages only come free, so that it can't be overtaken for ever
    by adapters that others keep in use. Requests on base pass it still.
    """

    def __init__(self, aging_s: float) -> None:
        self._aging_s = aging_s
        self._parked: dict[str, dict[Sequence, None]] = {}  # by digest
        self._aging: dict[Sequence, None] = {}  # in the order in which they were first passed by

    def __len__(self) -> int:
        """Requests that are parked now."""
        return sum(map(len, self._parked.values()))

    def __contains__(self, seq: Sequence) -> bool:
        adapter = seq.request.adapter
        return adapter is not None and seq in self._parked.get(adapter.digest, ())

    def precedence(self, now: float) -> Sequence | None:
        """The oldest request that has aged enough to go before all other adapters, parked or not."""
        oldest = next(iter(self._aging), None)
        if oldest is None or oldest.adapter_wait_since is None:
            return None
        return oldest if now - oldest.adapter_wait_since >= self._aging_s else None

    def park(self, seq: Sequence, now: float) -> None:
        assert seq.request.adapter is not None
        self._parked.setdefault(seq.request.adapter.digest, {})[seq] = None
        if seq.adapter_wait_since is None:
            seq.adapter_wait_since = now
            self._aging[seq] = None

    def refs(self) -> list[AdapterRef]:
        """The adapters that somebody is parked for, the longest wait first."""
        heads = sorted(
            (next(iter(line)) for line in self._parked.values()),
            key=lambda seq: seq.adapter_wait_since or 0.0,
        )
        return [ref for seq in heads if (ref := seq.request.adapter) is not None]

    def take(self, digest: str) -> list[Sequence]:
        """Everyone who is parked for this adapter. They are parked no more, but their age goes on."""
        return list(self._parked.pop(digest, ()))

    def forget(self, seq: Sequence) -> None:
        """It runs now, or it has ended. Does nothing for a request that never waited."""
        adapter = seq.request.adapter
        if adapter is None:
            return
        line = self._parked.get(adapter.digest)
        if line is not None and seq in line:
            del line[seq]
            if not line:
                del self._parked[adapter.digest]
        self._aging.pop(seq, None)
        seq.adapter_wait_since = None
