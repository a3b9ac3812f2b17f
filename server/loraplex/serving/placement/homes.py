"""Where adapters live in a running cluster: demand as it is measured, and `placement`'s word on it."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from loraplex.adapters.ref import AdapterRef
from loraplex.serving.placement.levels import DemandLevels
from loraplex.serving.placement.placement import AdapterDemand, AdapterPlace, Member, Places, place

FIRST_LOAD_S = 0.5
"""The assumed duration of a load before one was seen."""
_NEWEST = 0.1
"""Weight of the last load in the mean duration."""
_MOST_AT_ONCE = 8192
"""Adapters times members up to which a round is computed on the event loop: less than a millisecond. Ten thousand among
64 members take 35 ms."""


@dataclass(frozen=True, slots=True)
class PlacedVersion:
    """Where the version of `ref` lives. Equal bytes of several tenants are one; `ref` names the one that came first."""

    ref: AdapterRef
    places: Sequence[AdapterPlace]


@dataclass(slots=True)
class _KnownVersion:
    ref: AdapterRef
    size: int | None = None  # bytes on a device


class Homes:
    """`clock` gives seconds and does not go back. For one event loop's thread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._levels = DemandLevels()
        self._asked: dict[str, float] = {}  # sequences in flight by digest, as of the last `advance`
        self._known: dict[str, _KnownVersion] = {}
        self.pins: dict[str, AdapterRef] = {}
        """The versions that are kept on a device, by digest."""
        self.places: Places = {}
        self.unplaced: frozenset[str] = frozenset()
        """Versions that are asked for, and that no engine has room for."""
        self.load_s = FIRST_LOAD_S
        """Seconds that a load takes, lately."""
        self.num_moved = 0
        """Adapters that began to move without need."""

    # What is asked for.

    def begin(self, ref: AdapterRef, count: int) -> None:
        """Sequences of this version have begun."""
        self._known.setdefault(ref.digest, _KnownVersion(ref))
        self._levels.begin(ref.digest, self._clock(), count)

    def end(self, digest: str, load_s: float | None = None) -> None:
        """A sequence has ended; it waited `load_s` for the adapter, if at all."""
        self._levels.end(digest, self._clock())
        if load_s is not None:
            self.load_s += _NEWEST * (load_s - self.load_s)

    def forget(self, digest: str) -> None:
        """Forget a version that was deleted."""
        self.pins.pop(digest, None)

    # Where it is.

    def of(self, digest: str) -> Sequence[AdapterPlace]:
        """The places of a version, of the last round; none where it had none."""
        return self.places.get(digest, ())

    def placed(self, limit: int, after: str) -> list[PlacedVersion]:
        """The first `limit` versions with a place whose digest comes after this one, by digest."""
        digests = heapq.nsmallest(
            limit, (each for each in self.places if each > after and each in self._known)
        )
        return [PlacedVersion(self._known[digest].ref, self.places[digest]) for digest in digests]

    def staying(self, digest: str) -> set[str]:
        """The members where a version lives, without those that it leaves."""
        return {each.member for each in self.of(digest) if each.reason != "leaving"}

    def to_bring(self, member: str, hot: Collection[str]) -> list[AdapterRef]:
        """The versions that a member should load ahead of requests: those that live here and elsewhere. One with a
        single place comes with its request."""
        return [
            known.ref
            for digest, places in self.places.items()
            if len(places) > 1
            and digest not in hot
            and (known := self._known.get(digest)) is not None
            and known.size is not None  # one that no engine has loaded may be what ends them
            and member in self.staying(digest)
        ]

    # A round.

    def advance(self) -> None:
        """Bring the demand to this moment; what is neither asked for nor pinned is forgotten."""
        self._asked = self._levels.levels(self._clock())
        self._known = {
            digest: known
            for digest, known in self._known.items()
            if digest in self._asked or digest in self.pins
        }
        for digest, ref in self.pins.items():
            self._known.setdefault(digest, _KnownVersion(ref))

    def without_size(self) -> list[str]:
        """The versions whose size on a device is not known."""
        return [digest for digest, known in self._known.items() if known.size is None]

    def learn_size(self, digest: str, device_bytes: int) -> None:
        """Note the size of a version; 0: it is not known."""
        if device_bytes and digest in self._known:
            self._known[digest].size = device_bytes

    async def place(self, members: Sequence[Member]) -> None:
        """Place all adapters among these members, which take requests."""
        demand = {
            digest: AdapterDemand(self._asked.get(digest, 0.0), known.size or 0, digest in self.pins)
            for digest, known in self._known.items()
        }
        if len(members) * len(demand) <= _MOST_AT_ONCE:
            placed = place(members, demand, self.places)
        else:
            placed = await asyncio.to_thread(place, members, demand, self.places)
        self.places, self.unplaced = placed.places, placed.unplaced
        self.num_moved += placed.moved
