"""Ways to choose a member for a request: ours, by the product's own functions, and the two extremes, which load least
and wait least. `peers` has those of others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache

from loraplex.serving.placement.choice import MemberLoad, choose
from loraplex.serving.placement.hashing import digest_key, first, key_of, score
from loraplex.serving.placement.levels import DemandLevels
from loraplex.serving.placement.placement import AdapterDemand, Member, Places, elsewhere, place
from support.placement.simulator import LOAD_S, SimulatedMember
from support.placement.workloads import Arrival

MEAN_S = 2.0
Members = Sequence[SimulatedMember]


class _Stateless:
    period_s = 2.0

    def end(self, arrival: Arrival, now: float) -> None:
        pass

    def tick(self, members: Members, now: float) -> Iterator[tuple[SimulatedMember, str]]:
        return iter(())


def in_order(digest: str, members: Members) -> list[SimulatedMember]:
    """Members in the rendezvous order of a version."""
    by_name = {member.name: member for member in members}
    return [by_name[name] for name in _names_in_order(digest, tuple(by_name))]


@cache
def _names_in_order(digest: str, names: tuple[str, ...]) -> list[str]:
    key = digest_key(digest)
    return sorted(names, key=lambda name: score(key, key_of(name.encode())), reverse=True)


class Rendezvous(_Stateless):
    """One copy."""

    def choose(self, arrival: Arrival, members: Members, now: float) -> SimulatedMember:
        return in_order(arrival.digest, members)[0]


class LeastLoaded(_Stateless):
    def choose(self, arrival: Arrival, members: Members, now: float) -> SimulatedMember:
        return min(members, key=lambda member: (member.load, member.name))


class Ours:
    """`place` every two seconds, and `choose` for each request. `evicts_foreign`: adapters that are at home elsewhere
    go first."""

    period_s = 2.0

    def __init__(self, *, evicts_foreign: bool = True) -> None:
        self._evicts_foreign = evicts_foreign
        self._demand = DemandLevels()
        self._keys: dict[str, int] = {}
        self.places: Places = {}
        self.moved = 0
        self._number = 0

    def choose(self, arrival: Arrival, members: Members, now: float) -> SimulatedMember:
        digest = arrival.digest
        self._demand.begin(digest, now)
        for member in members:
            if member.name not in self._keys:
                self._keys[member.name] = key_of(member.name.encode())
        loads = {m.name: MemberLoad(self._keys[m.name], m.load, m.places, MEAN_S) for m in members}
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

    def tick(self, members: Members, now: float) -> Iterator[tuple[SimulatedMember, str]]:
        demand = {digest: AdapterDemand(level, 1) for digest, level in self._demand.levels(now).items()}
        seen = {m.name: Member(m.name, m.places, m.slots, m.resident.keys()) for m in members}
        placed = place(seen.values(), demand, self.places)
        self.places = placed.places
        self.moved += placed.moved
        by_name = {member.name: member for member in members}
        for name, member in seen.items() if self._evicts_foreign else ():
            by_name[name].first_to_go = elsewhere(member, self.places)
        for digest, found in self.places.items():
            if len(found) > 1:
                yield from ((by_name[each.member], digest) for each in found if each.reason != "leaving")
