"""The order in which lanes of requests have their turn: tenants in turns, and of each tenant one lane at a time."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator

from loraplex.engine.scheduling.tenant_heap import Entry, TenantLane


class TenantTurns:
    """Lanes by tenant. Tenants take turns; each tenant's lanes keep their order."""

    def __init__(self) -> None:
        self._tenants: OrderedDict[str, dict[TenantLane, None]] = OrderedDict()

    def append_lane(self, lane: TenantLane) -> None:
        self._tenants.setdefault(lane.tenant_id, {})[lane] = None

    def remove_lane(self, lane: TenantLane) -> None:
        lanes = self._tenants.get(lane.tenant_id)
        if lanes is not None and lane in lanes:
            del lanes[lane]
            if not lanes:
                del self._tenants[lane.tenant_id]

    def end_turn(self, lane: TenantLane) -> None:
        """Remove a lane that had its turn, and put its tenant last."""
        self.remove_lane(lane)
        if lane.tenant_id in self._tenants:
            self._tenants.move_to_end(lane.tenant_id)

    def __iter__(self) -> Iterator[TenantLane]:
        for lanes in self._tenants.values():
            yield from lanes

    def num_before(self, tenant_id: str) -> int:
        """The lanes whose turn comes before that of another one of this tenant."""
        own = len(self._tenants.get(tenant_id, ()))
        return own + sum(
            min(len(lanes), own + 1) for tenant, lanes in self._tenants.items() if tenant != tenant_id
        )

    def first(self, count: int) -> list[TenantLane]:
        """The first lane of each of the first `count` tenants."""
        return [self._first_lane(tenant) for tenant, _ in zip(self._tenants, range(count), strict=False)]

    def _first_lane(self, tenant_id: str) -> TenantLane:
        return next(iter(self._tenants[tenant_id]))


class AgedTurns(TenantTurns):
    """Turns in which each tenant's lane that has waited longest is first."""

    def return_turn(self, lane: TenantLane) -> None:
        """Put back a lane that did not use its turn: it and its tenant are first again."""
        self._tenants[lane.tenant_id] = {lane: None, **self._tenants.get(lane.tenant_id, {})}
        self._tenants.move_to_end(lane.tenant_id, last=False)


class LoadTurns(TenantTurns):
    """Turns in which each tenant's lane with the first request is first, by the order in which its requests would run,
    so that a load follows a request's priority. No lane may be empty. Costs O(log lanes) for each change."""

    def __init__(self) -> None:
        super().__init__()
        # By tenant, the first request of each lane, and stale entries: those that are no lane's first any more.
        self._firsts: dict[str, list[Entry]] = {}

    def append_lane(self, lane: TenantLane) -> None:
        super().append_lane(lane)
        self.first_changed(lane)

    def remove_lane(self, lane: TenantLane) -> None:
        super().remove_lane(lane)
        if lane.tenant_id not in self._tenants:
            self._firsts.pop(lane.tenant_id, None)

    def first_changed(self, lane: TenantLane) -> None:
        """A request was added to a lane. Does nothing for a lane that has no turn here."""
        lanes = self._tenants.get(lane.tenant_id, {})
        if lane not in lanes:
            return
        firsts = self._firsts.setdefault(lane.tenant_id, [])
        heapq.heappush(firsts, _first(lane))
        if len(firsts) > 2 * len(lanes) + 8:
            firsts[:] = map(_first, lanes)
            heapq.heapify(firsts)

    def _first_lane(self, tenant_id: str) -> TenantLane:
        lanes, firsts = self._tenants[tenant_id], self._firsts[tenant_id]
        while True:
            lane = firsts[0].lane
            if lane not in lanes:
                heapq.heappop(firsts)
            elif (first := _first(lane)) is firsts[0]:
                return lane
            else:
                heapq.heapreplace(firsts, first)


def _first(lane: TenantLane) -> Entry:
    first = lane.first()
    assert first is not None, "an empty lane waits for an adapter"
    return first
