"""Where adapters live among the members of a cluster.

An adapter gets as many copies as its sequences in flight need by Little's law, each filling `FILL` of a member's
places. Members come in the adapter's own rendezvous order. For an adapter that weighs, a member is passed over whose
planned load would exceed the mean by more than a fifth (bounded loads: Mirrokni, Thorup and Zadimoghaddam, 2018); for
the many light ones the order alone decides, so that one that comes or goes moves no other. A place is kept while it
fits with some slack. Where a member that comes would take a place over, few adapters move a round, and each is loaded
at its new place before it leaves the old one.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from loraplex.serving.placement.hashing import digest_key, key_of, scores

FILL = 0.6
"""Share of a member's places that an adapter's sequences may fill before it gets another copy."""
KEEP = 0.6
"""A copy is given up where demand is below this share of what the others take."""
WEIGHS = 0.2
"""Share of a member's places from which on an adapter's load is bounded."""
BOUND = 1.2
"""Most planned load of a member, over the mean."""
SLACK = 1.15
"""Factor by which a place that is kept may exceed the bound."""
MOVED = 0.01
"""Most adapters that move a round without need, of all that have places; at least one."""

Reason = Literal["home", "copy", "overflow", "leaving"]
"""Why a member has an adapter: it is first in the adapter's order; it is next, and demand needs more than one; those
before it are full; or it keeps the adapter until its new place has loaded it."""


@dataclass(frozen=True, slots=True)
class Member:
    """An engine that may get adapters. `places`: sequences at once; `adapter_bytes`: memory of its device for adapters;
    `resident`: digests that are on its device."""

    id: str
    places: int
    adapter_bytes: int
    resident: Collection[str] = frozenset()


@dataclass(frozen=True, slots=True)
class AdapterDemand:
    """`concurrency`: sequences in flight, smoothed. `size`: bytes on a device. Pinned adapters have a place whether or
    not anybody asks for them."""

    concurrency: float
    size: int
    is_pinned: bool = False


class AdapterPlace(NamedTuple):
    """A member that has an adapter, by its id. (A tuple, since ten thousand of them are compared in a round.)"""

    member: str
    reason: Reason


Places = Mapping[str, tuple[AdapterPlace, ...]]
"""Places by digest."""


@dataclass(frozen=True, slots=True)
class PlacedAdapters:
    """`unplaced`: digests that no member has room for; all of them where there is no member. `moved`: adapters that
    began to move without need in this round."""

    places: Places
    unplaced: frozenset[str] = frozenset()
    moved: int = 0


def place(members: Collection[Member], demand: Mapping[str, AdapterDemand], before: Places) -> PlacedAdapters:
    """Places of all adapters with demand, by those of the round before. The result depends on neither the order of the
    members nor that of the adapters. `members`: those that take requests; one that is draining is not among them."""
    if not members:
        return PlacedAdapters({}, frozenset(demand))
    return _Round(sorted(members, key=lambda member: member.id), demand, before).run()


def elsewhere(member: Member, places: Places) -> frozenset[str]:
    """Digests on a member's device that are at home on others alone: evicted first."""
    return frozenset(
        digest
        for digest in member.resident
        if digest in places and all(place.member != member.id for place in places[digest])
    )


@dataclass(slots=True)
class _Round:
    members: Sequence[Member]
    demand: Mapping[str, AdapterDemand]
    before: Places
    loads: NDArray[np.float64] = field(init=False)  # planned sequences, by member
    room: NDArray[np.float64] = field(init=False)  # bytes that are not promised yet, by member
    most: NDArray[np.float64] = field(init=False)  # sequences that a member may get, by member
    index: dict[str, int] = field(init=False)
    budget: int = field(init=False)
    moved: int = 0

    def run(self) -> PlacedAdapters:
        digests = sorted(self.demand)
        order = scores([digest_key(each) for each in digests], [key_of(m.id.encode()) for m in self.members])
        places = np.array([member.places for member in self.members], np.float64)
        asked = np.array([self.demand[digest].concurrency for digest in digests], np.float64)
        total = float(asked.sum())
        self.index = {member.id: number for number, member in enumerate(self.members)}
        self.room = np.array([member.adapter_bytes for member in self.members], np.float64)
        self.most = BOUND * total * places / places.sum()
        self.loads = np.zeros(len(self.members))
        self.budget = max(1, int(MOVED * len(digests)))
        mean = float(places.mean())
        pinned = np.array([self.demand[digest].is_pinned for digest in digests], bool)
        is_bounded = pinned | (asked > WEIGHS * mean)
        found = self._place_light(digests, order, ~is_bounded, asked)
        # The largest first; the digest decides between equals.
        bounded = np.flatnonzero(is_bounded).tolist()
        for number in sorted(bounded, key=lambda number: (-asked[number], digests[number])):
            digest = digests[number]
            if placed := self._place_bounded(digest, order[number], mean):
                found[digest] = placed
        return PlacedAdapters(found, frozenset(digests) - found.keys(), self.moved)

    def _place_light(
        self,
        digests: Sequence[str],
        order: NDArray[np.uint64],
        is_light: NDArray[np.bool_],
        asked: NDArray[np.float64],
    ) -> dict[str, tuple[AdapterPlace, ...]]:
        sizes = np.array([self.demand[digest].size for digest in digests], np.float64)
        fits = sizes[:, None] <= self.room[None, :]
        homes = np.where(fits, order, 0).argmax(1)
        placed = is_light & fits.any(1)
        self.loads += np.bincount(homes[placed], asked[placed], len(self.members))
        at = [(AdapterPlace(member.id, "home"),) for member in self.members]
        found: dict[str, tuple[AdapterPlace, ...]] = {}
        for number, member in zip(np.flatnonzero(placed).tolist(), homes[placed].tolist(), strict=True):
            digest = digests[number]
            home = at[member]
            found[digest] = home if self.before.get(digest) == home else self._settle(digest, home)
        return found

    def _place_bounded(self, digest: str, order: NDArray[np.uint64], mean: float) -> tuple[AdapterPlace, ...]:
        demand = self.demand[digest]
        current = {each.member for each in self.before.get(digest, ()) if each.reason != "leaving"}
        current &= self.index.keys()
        copies = min(self._copies(demand, len(current), mean), len(self.members))
        share = demand.concurrency / copies
        ranked = np.argsort(order)[::-1].tolist()
        fitting = [number for number in ranked if self.room[number] >= demand.size]
        taken: list[int] = []
        # An adapter that needs no place takes one that is clearly free only: demand that swings moves nothing.
        entry = 1.0 if len(current) < copies else 1 / SLACK
        for number in fitting:
            limit = self.most[number] * (SLACK if self.members[number].id in current else entry)
            if len(taken) < copies and self.loads[number] + share <= limit:
                taken.append(number)
        # Where all are full, the least full ones: its requests must be served.
        rest = [number for number in fitting if number not in taken]
        rest.sort(key=lambda number: (self.loads[number] / self.members[number].places, ranked.index(number)))
        taken += rest[: copies - len(taken)]
        if not taken:
            return ()
        wanted = tuple(
            AdapterPlace(self.members[number].id, self._reason(number, ranked, at))
            for at, number in enumerate(taken)
        )
        placed = self._settle(digest, wanted)
        kept = [self.index[each.member] for each in placed if each.reason != "leaving"]
        for number in kept:
            self.loads[number] += demand.concurrency / len(kept)
        for each in placed:
            self.room[self.index[each.member]] -= demand.size
        return placed

    @staticmethod
    def _reason(number: int, ranked: Sequence[int], at: int) -> Reason:
        if ranked.index(number) > at:
            return "overflow"
        return "copy" if at else "home"

    @staticmethod
    def _copies(demand: AdapterDemand, current: int, mean: float) -> int:
        step = FILL * mean
        needed = max(1, math.ceil(demand.concurrency / step))
        is_kept = needed < current and demand.concurrency >= KEEP * step * (current - 1)
        return current if is_kept else needed

    def _settle(self, digest: str, wanted: tuple[AdapterPlace, ...]) -> tuple[AdapterPlace, ...]:
        """`wanted`, with the places that are left for as long as the new ones have not loaded the adapter; where too
        many move in this round, the places of before."""
        # A member that is gone, or has no room any more, is left at once.
        size = self.demand[digest].size
        before = [
            each
            for each in self.before.get(digest, ())
            if each.member in self.index and self.room[self.index[each.member]] >= size
        ]
        settled = {each.member for each in before if each.reason != "leaving"}
        targets = {each.member for each in wanted}
        if not settled:
            return wanted
        if settled - targets and not targets <= {each.member for each in before}:
            if self.moved == self.budget:
                return tuple(before)
            self.moved += 1
        staying = tuple(AdapterPlace(each.member, "leaving") for each in before if each.member not in targets)
        is_loaded = all(digest in self.members[self.index[member]].resident for member in targets)
        return wanted if is_loaded else wanted + staying
