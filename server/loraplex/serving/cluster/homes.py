"""Where adapters live in a running cluster: demand as it is measured, `placement`'s word on it, and what has engines
follow it."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass

from loraplex.adapters.ref import AdapterRef
from loraplex.serving.client.cluster_view import PlacedVersion
from loraplex.serving.cluster.demand import DemandLevels
from loraplex.serving.cluster.hashing import digest_key, score
from loraplex.serving.cluster.placement import Demand, Place, Places, elsewhere, place
from loraplex.serving.cluster.replica import Replica
from loraplex.serving.errors import ServingError

ROUND_S = 2.0
"""Time between two rounds of placement."""
FIRST_LOAD_S = 0.5
"""The assumed duration of a load before one was seen."""
_NEWEST = 0.1
"""Weight of the last load in the mean duration."""
_MOST_AT_ONCE = 8192
"""Adapters times members up to which a round is computed on the event loop: less than a millisecond. Ten thousand among
64 members take 35 ms."""
_ASKED = 64
"""Adapters whose size one round asks for."""


@dataclass(slots=True)
class _Known:
    ref: AdapterRef
    size: int | None = None  # bytes on a device


class Homes:
    """`clock` gives seconds and does not go back. For one event loop's thread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._levels = DemandLevels()
        self._known: dict[str, _Known] = {}
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
        self._known.setdefault(ref.digest, _Known(ref))
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

    def of(self, digest: str) -> Sequence[Place]:
        """The places of a version, of the last round; none where it had none."""
        return self.places.get(digest, ())

    def placed(self, limit: int, after: str) -> list[PlacedVersion]:
        """The first `limit` versions with a place whose digest comes after this one, by digest."""
        digests = heapq.nsmallest(
            limit, (each for each in self.places if each > after and each in self._known)
        )
        return [PlacedVersion(self._known[digest].ref, self.places[digest]) for digest in digests]

    def home(self, digest: str, replicas: Iterable[Replica]) -> Replica | None:
        """The first of these replicas where a version lives, or would."""
        order = self.order(digest, replicas)
        named = {each.member for each in self.of(digest) if each.reason != "leaving"}
        return next((replica for replica in order if replica.id in named), order[0] if order else None)

    @staticmethod
    def order(digest: str, replicas: Iterable[Replica]) -> list[Replica]:
        """Replicas in the rendezvous order of a version."""
        key = digest_key(digest)
        return sorted(replicas, key=lambda replica: (score(key, replica.key), replica.id), reverse=True)

    # A round.

    async def round(self, replicas: Sequence[Replica]) -> None:
        """Place all adapters among these replicas, which take requests, and have them follow."""
        levels = self._levels.levels(self._clock())
        self._known = {
            digest: known for digest, known in self._known.items() if digest in levels or digest in self.pins
        }
        for digest, ref in self.pins.items():
            self._known.setdefault(digest, _Known(ref))
        if len(replicas) > 1:
            await self._learn_sizes(replicas)
        demand = {
            digest: Demand(levels.get(digest, 0.0), known.size or 0, digest in self.pins)
            for digest, known in self._known.items()
        }
        members = [replica.member() for replica in replicas]
        if len(members) * len(demand) <= _MOST_AT_ONCE:
            placed = place(members, demand, self.places)
        else:
            placed = await asyncio.to_thread(place, members, demand, self.places)
        self.places, self.unplaced = placed.places, placed.unplaced
        self.num_moved += placed.moved
        if len(replicas) > 1:
            self._bring(replicas)
            for replica, member in zip(replicas, members, strict=True):
                replica.session.set_elsewhere(elsewhere(member, self.places))
        await self._move_pins(replicas)

    def _bring(self, replicas: Sequence[Replica]) -> None:
        """Load adapters of several places where they are not yet. One with a single place comes with its request."""
        for replica in replicas:
            hot = replica.session.hot
            refs = [
                self._known[digest].ref
                for digest, places in self.places.items()
                if len(places) > 1
                and digest not in hot
                and digest in self._known
                and self._known[digest].size
                is not None  # one that no engine has loaded may be what ends them
                and any(each.member == replica.id and each.reason != "leaving" for each in places)
            ]
            replica.session.prefetch(refs)

    async def _move_pins(self, replicas: Sequence[Replica]) -> None:
        """Pin where pinned versions live now. A replica is left when another one has the version."""
        by_name = {replica.id: replica for replica in replicas}
        for digest, ref in list(self.pins.items()):
            targets = [
                by_name[each.member]
                for each in self.of(digest)
                if each.reason != "leaving" and each.member in by_name
            ]
            for replica in targets:
                if digest in self.pins and digest not in replica.session.pins:
                    await _try(replica.session.pin(ref))
            if digest in self.pins and any(digest in replica.session.hot for replica in targets):
                for replica in replicas:
                    if replica not in targets and digest in replica.session.pins:
                        await _try(replica.session.unpin(digest))
        for replica in replicas:
            # A pin that was taken away while it was on its way to this engine.
            for digest in replica.session.pins.keys() - self.pins.keys():
                await _try(replica.session.unpin(digest))

    async def _learn_sizes(self, replicas: Sequence[Replica]) -> None:
        unknown = [digest for digest, known in self._known.items() if known.size is None]
        for replica in replicas:
            asked = [digest for digest in unknown if digest in replica.session.hot][:_ASKED]
            if not asked:
                continue
            try:
                entries = await replica.session.cache(asked)
            except ServingError:
                continue  # it has just gone
            for entry in entries:
                if entry.device_bytes and entry.ref.digest in self._known:
                    self._known[entry.ref.digest].size = entry.device_bytes


async def _try(call: Awaitable[None]) -> None:
    """Await a call to an engine; the next round tries again what it refuses now."""
    with contextlib.suppress(ServingError):
        await call
