"""Members of a cluster in virtual time: places, slots for adapters, loads that take a while, one rule of eviction."""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple, Protocol

import numpy as np

from support.placement.workloads import Arrival

LOAD_S = 0.5
USE_HALF_LIFE_S = 60.0


@dataclass(eq=False)
class SimulatedMember:
    """An engine. `resident`: leases by digest; `use`: decayed requests by digest, and when that was."""

    name: str
    places: int
    slots: int
    running: int = 0
    resident: dict[str, int] = field(default_factory=dict)
    loading: dict[str, float] = field(default_factory=dict)
    ready: deque[_Request] = field(default_factory=deque)
    waiting: dict[str, list[_Request]] = field(default_factory=lambda: defaultdict(list))
    use: dict[str, tuple[float, float]] = field(default_factory=dict)
    first_to_go: Collection[str] = frozenset()

    @property
    def load(self) -> int:
        return self.running + len(self.ready) + sum(map(len, self.waiting.values()))

    def used(self, digest: str, now: float) -> float:
        value, at = self.use.get(digest, (0.0, now))
        return float(value * 0.5 ** ((now - at) / USE_HALF_LIFE_S))


@dataclass(eq=False)
class _Request:
    arrival: Arrival
    member: SimulatedMember


class Policy(Protocol):
    """Where a request goes. `tick` is called every `period_s` seconds."""

    period_s: float

    def choose(self, arrival: Arrival, members: Sequence[SimulatedMember], now: float) -> SimulatedMember: ...
    def end(self, arrival: Arrival, now: float) -> None: ...
    def tick(self, members: Sequence[SimulatedMember], now: float) -> Iterator[tuple[SimulatedMember, str]]:
        """Loads to begin without a request."""
        ...


class Outcome(NamedTuple):
    """Loads for 1,000 requests; the 99th percentile of the seconds until a request began, and of the largest load of a
    member over the mean."""

    loads: float
    wait_s: float
    imbalance: float


class Simulator:
    """One run of a policy."""

    def __init__(self, policy: Policy, *, members: int = 8, places: int = 16, slots: int = 16) -> None:
        self.policy = policy
        self.members = [SimulatedMember(f"m{number}", places, slots) for number in range(members)]
        self.loads = 0
        self.waits: list[float] = []
        self._imbalances: list[float] = []
        self._events: list[tuple[float, int, str, object]] = []
        self._order = count()

    def run(self, arrivals: Sequence[Arrival]) -> Outcome:
        for arrival in arrivals:
            self._at(arrival.at, "arrive", arrival)
        last = arrivals[-1].at
        for number in range(int(last / self.policy.period_s)):
            self._at(number * self.policy.period_s, "tick", None)
        while self._events:
            now, _, kind, what = heapq.heappop(self._events)
            getattr(self, f"_{kind}")(now, what)
        return Outcome(
            1000 * self.loads / len(arrivals),
            float(np.quantile(self.waits, 0.99)),
            float(np.quantile(self._imbalances, 0.99)),
        )

    def _at(self, when: float, kind: str, what: object) -> None:
        heapq.heappush(self._events, (when, next(self._order), kind, what))

    def _tick(self, now: float, _: object) -> None:
        loads = [member.load for member in self.members]
        if sum(loads) > len(loads):
            self._imbalances.append(max(loads) * len(loads) / sum(loads))
        for member, digest in self.policy.tick(self.members, now):
            if digest not in member.resident and digest not in member.loading:
                self._load(member, digest, now)

    def _arrive(self, now: float, arrival: Arrival) -> None:
        member = self.policy.choose(arrival, self.members, now)
        member.use[arrival.digest] = member.used(arrival.digest, now) + 1, now
        request = _Request(arrival, member)
        if arrival.digest in member.resident:
            member.resident[arrival.digest] += 1
            member.ready.append(request)
            self._start(member, now)
            return
        member.waiting[arrival.digest].append(request)
        if arrival.digest not in member.loading:
            self._load(member, arrival.digest, now)

    def _load(self, member: SimulatedMember, digest: str, now: float) -> None:
        """Begin a load where there is a slot, or an adapter that nobody uses can leave one."""
        if len(member.resident) + len(member.loading) >= member.slots:
            idle = [each for each, leases in member.resident.items() if not leases]
            if not idle:
                return
            victim = min(
                idle, key=lambda each: (each not in member.first_to_go, member.used(each, now), each)
            )
            del member.resident[victim]
        self.loads += 1
        member.loading[digest] = now
        self._at(now + LOAD_S, "loaded", (member, digest))

    def _loaded(self, now: float, what: tuple[SimulatedMember, str]) -> None:
        member, digest = what
        del member.loading[digest]
        requests = member.waiting.pop(digest, [])
        member.resident[digest] = len(requests)
        member.ready.extend(requests)
        self._start(member, now)

    def _start(self, member: SimulatedMember, now: float) -> None:
        while member.ready and member.running < member.places:
            request = member.ready.popleft()
            member.running += 1
            self.waits.append(now - request.arrival.at)
            self._at(now + request.arrival.service_s, "finish", request)

    def _finish(self, now: float, request: _Request) -> None:
        member, digest = request.member, request.arrival.digest
        member.running -= 1
        member.resident[digest] -= 1
        self.policy.end(request.arrival, now)
        for waiting in list(member.waiting):  # for a slot that nobody could leave before
            if waiting not in member.loading:
                self._load(member, waiting, now)
        self._start(member, now)
