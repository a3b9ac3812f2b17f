"""Requests that wait for their adapter to come to the device, and what may be lent to others meanwhile."""

from __future__ import annotations

from collections import Counter

from loraplex.adapters.ref import AdapterRef
from loraplex.engine.types import Sequence


class AdapterWait:
    """Where requests are parked that the scheduler passed by for want of their adapter.

    A request ages from when it was first passed by until it runs. One that has aged `aging_s` may get precedence:
    then it is asked for before all others until it runs, and while it finds no room on the device, no adapter but
    its own is lent out or sent for. Leases only end then and pages only come free, so that it can't be overtaken for
    ever by adapters that others keep in use. Requests on base pass it still.

    Tenants take turns, in what is loaded and in precedence: who asks for a thousand adapters delays another tenant's
    one by a load or two, and by one precedence, not by a thousand.
    """

    def __init__(self, aging_s: float) -> None:
        self._aging_s = aging_s
        self._parked: dict[str, dict[Sequence, None]] = {}  # by digest
        # By tenant, each in the order in which they were first passed by.
        self._aging: dict[str, dict[Sequence, None]] = {}
        self._first: Sequence | None = None  # has precedence
        # By tenant, when an adapter last came for it, and when it last had precedence. Of those that age.
        self._came: dict[str, int] = {}
        self._preceded: dict[str, int] = {}
        self._turn = 0

    def __len__(self) -> int:
        """Requests that are parked now."""
        return sum(map(len, self._parked.values()))

    def __contains__(self, seq: Sequence) -> bool:
        adapter = seq.request.adapter
        return adapter is not None and seq in self._parked.get(adapter.digest, ())

    def precedence(self, now: float) -> Sequence | None:
        """The request that goes before all other adapters, parked or not; the same one until it is forgotten. Then
        it is the oldest of the tenant whose last precedence is the longest ago, of those whose oldest has aged."""
        if self._first is None:
            aged = [
                seq for line in self._aging.values() if now - _since(seq := next(iter(line))) >= self._aging_s
            ]
            if not aged:
                return None
            self._first = min(
                aged, key=lambda seq: (self._preceded.get(seq.request.tenant_id, 0), _since(seq))
            )
            self._turn += 1
            self._preceded[self._first.request.tenant_id] = self._turn
        return self._first

    def park(self, seq: Sequence, now: float) -> None:
        assert seq.request.adapter is not None
        self._parked.setdefault(seq.request.adapter.digest, {})[seq] = None
        if seq.adapter_wait_since is None:
            seq.adapter_wait_since = now
            self._aging.setdefault(seq.request.tenant_id, {})[seq] = None

    def refs(self) -> list[AdapterRef]:
        """The adapters that somebody is parked for: one of each tenant, then a second of each, and so on. Each
        tenant's own by age; the tenants of one round by how long ago an adapter came for them, then by age."""
        heads = sorted((next(iter(line)) for line in self._parked.values()), key=_since)
        rounds: Counter[str] = Counter()
        places: list[tuple[int, int, float, AdapterRef]] = []
        for seq in heads:
            tenant, ref = seq.request.tenant_id, seq.request.adapter
            assert ref is not None
            places.append((rounds[tenant], self._came.get(tenant, 0), _since(seq), ref))
            rounds[tenant] += 1
        return [ref for *_, ref in sorted(places, key=lambda place: place[:3])]

    def take(self, digest: str) -> list[Sequence]:
        """Everyone who is parked for this adapter. They are parked no more, but their age goes on."""
        taken = list(self._parked.pop(digest, ()))
        self._turn += 1
        self._came |= {seq.request.tenant_id: self._turn for seq in taken}
        return taken

    def forget(self, seq: Sequence) -> None:
        """It runs now, or it has ended. Does nothing for a request that never waited."""
        adapter = seq.request.adapter
        if adapter is None or seq.adapter_wait_since is None:
            return
        line = self._parked.get(adapter.digest)
        if line is not None and seq in line:
            del line[seq]
            if not line:
                del self._parked[adapter.digest]
        tenant = seq.request.tenant_id
        del self._aging[tenant][seq]
        if not self._aging[tenant]:
            del self._aging[tenant]
            self._came.pop(tenant, None)
            self._preceded.pop(tenant, None)
        if seq is self._first:
            self._first = None
        seq.adapter_wait_since = None


def _since(seq: Sequence) -> float:
    assert seq.adapter_wait_since is not None
    return seq.adapter_wait_since
