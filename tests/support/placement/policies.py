"""Ways to choose a member for a request: ours, by the product's own functions, and those of others for comparison.

The others follow their code as it was read: Ray Serve's and KubeAI's kin have one copy by rendezvous; llm-d's router
scores residency and load; Dynamo gives an adapter copies by its share of the load times all slots, in rendezvous order,
and takes them in turn, either those that have loaded it first or the whole set.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from loraplex.serving.cluster.choice import Load, choose
from loraplex.serving.cluster.demand import DemandLevels
from loraplex.serving.cluster.hashing import digest_key, first, key_of, score
from loraplex.serving.cluster.placement import Demand, Member, Places, elsewhere, place
from support.placement.simulator import LOAD_S, SimulatedMember
from support.placement.workloads import Arrival

MEAN_S = 2.0


class _Stateless:
    period_s = 2.0

    def end(self, arrival: Arrival, now: float) -> None:
        pass

    def tick(self, members: Sequence[SimulatedMember], now: float) -> Iterator[tuple[SimulatedMember, str]]:
        return iter(())


def in_order(digest: str, members: Sequence[SimulatedMember]) -> list[SimulatedMember]:
    """Members in the rendezvous order of a version."""
    key = digest_key(digest)
    return sorted(members, key=lambda member: score(key, key_of(member.name.encode())), reverse=True)


class Rendezvous(_Stateless):
    """One copy."""

    def choose(self, arrival: Arrival, members: Sequence[SimulatedMember], now: float) -> SimulatedMember:
        return in_order(arrival.digest, members)[0]


class LeastLoaded(_Stateless):
    def choose(self, arrival: Arrival, members: Sequence[SimulatedMember], now: float) -> SimulatedMember:
        return min(members, key=lambda member: (member.load, member.name))


class AffinityAndLoad(_Stateless):
    """The sum of three scorers of alike weight: residency (1, a free slot 0.8, none 0), the queue's length between the
    shortest and the longest, and the share of places that are free."""

    def choose(self, arrival: Arrival, members: Sequence[SimulatedMember], now: float) -> SimulatedMember:
        queues = {member.name: member.load - member.running for member in members}
        least, most = min(queues.values()), max(queues.values())

        def value(member: SimulatedMember) -> float:
            held = arrival.digest in member.resident or arrival.digest in member.loading
            is_full = len(member.resident) + len(member.loading) >= member.slots
            affinity = 1.0 if held else 0.0 if is_full else 0.8
            queue = 1.0 if most == least else (most - queues[member.name]) / (most - least)
            return affinity + queue + 1 - member.running / member.places

        return max(members, key=lambda member: (value(member), member.name))


@dataclass
class Dynamo:
    """`loaded_first`: as its filter reads; else the whole set is used."""

    loaded_first: bool
    period_s: float = 5.0
    _counts: Counter[str] = field(default_factory=Counter)
    _copies: dict[str, tuple[int, float]] = field(default_factory=dict)
    _turns: Counter[str] = field(default_factory=Counter)

    def choose(self, arrival: Arrival, members: Sequence[SimulatedMember], now: float) -> SimulatedMember:
        digest = arrival.digest
        self._counts[digest] += 1
        among = in_order(digest, members)[: self._copies.get(digest, (1, 0.0))[0]]
        if self.loaded_first:
            among = [member for member in among if digest in member.resident] or among
        self._turns[digest] += 1
        return among[self._turns[digest] % len(among)]

    def end(self, arrival: Arrival, now: float) -> None:
        pass

    def tick(self, members: Sequence[SimulatedMember], now: float) -> Iterator[tuple[SimulatedMember, str]]:
        total = max(1, sum(self._counts.values()))
        slots = sum(member.slots for member in members)
        for digest in self._counts.keys() | self._copies.keys():
            wanted = min(len(members), max(1, math.ceil(self._counts[digest] / total * slots)))
            before, since = self._copies.get(digest, (1, now))
            # Fewer only after a minute, so that a pause costs no copy.
            if wanted >= before or now - since > 60.0:
                self._copies[digest] = wanted, now
        self._counts = Counter({digest: number // 2 for digest, number in self._counts.items() if number > 1})
        return iter(())


class Ours:
    """`place` every two seconds, and `choose` for each request."""

    period_s = 2.0

    def __init__(self) -> None:
        self._demand = DemandLevels()
        self._keys: dict[str, int] = {}
        self.places: Places = {}
        self.moved = 0
        self._number = 0

    def choose(self, arrival: Arrival, members: Sequence[SimulatedMember], now: float) -> SimulatedMember:
        digest = arrival.digest
        self._demand.begin(digest, now)
        for member in members:
            if member.name not in self._keys:
                self._keys[member.name] = key_of(member.name.encode())
        loads = {m.name: Load(self._keys[m.name], m.load, m.places, MEAN_S) for m in members}
        places = [each.member for each in self.places.get(digest, ())]
        self._number += 1
        found = choose(
            loads,
            places=places or [first(digest_key(digest), self._keys)],
            resident={m.name for m in members if digest in m.resident or digest in m.loading},
            load_s=LOAD_S,
            prefix=digest.encode() + self._number.to_bytes(8, "big"),
        )
        return next(member for member in members if member.name == found)

    def end(self, arrival: Arrival, now: float) -> None:
        self._demand.end(arrival.digest, now)

    def tick(self, members: Sequence[SimulatedMember], now: float) -> Iterator[tuple[SimulatedMember, str]]:
        demand = {digest: Demand(level, 1) for digest, level in self._demand.levels(now).items()}
        seen = {m.name: Member(m.name, m.places, m.slots, m.resident.keys()) for m in members}
        placed = place(seen.values(), demand, self.places)
        self.places = placed.places
        self.moved += placed.moved
        by_name = {member.name: member for member in members}
        for name, member in seen.items():
            by_name[name].first_to_go = elsewhere(member, self.places)
        for digest, found in self.places.items():
            if len(found) > 1:
                yield from ((by_name[each.member], digest) for each in found if each.reason != "leaving")
