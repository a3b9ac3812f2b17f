"""How others choose a member for a request, by their code as it was read, for comparison.

They see the true state of the members at each request; in a cluster they see it some milliseconds late.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import ceil, floor

from support.placement.policies import Members, in_order
from support.placement.simulator import SimulatedMember
from support.placement.workloads import Arrival


def _holds(member: SimulatedMember, digest: str) -> bool:
    return digest in member.resident or digest in member.loading


def by_activity(member: SimulatedMember, digest: str) -> float:
    """llm-d's `lora-affinity-scorer`, which knows adapters with requests alone (llm-d-router#2605)."""
    active = {each for each, leases in member.resident.items() if leases} | member.loading.keys()
    return 1.0 if digest in active else 0.8 if len(active) < member.slots else 0.0


def by_residency(member: SimulatedMember, digest: str) -> float:
    """The `lora-load-state-scorer` that is proposed to llm-d (llm-d-router#2792)."""
    if _holds(member, digest):
        return 1.0
    if len(member.resident) + len(member.loading) < member.slots:
        return 0.6
    return 0.0 if all(member.resident.values()) else 0.3


class Llmd:
    """The sum of scorers: one of adapters, times `weight`, the queue's length between the shortest and the longest,
    and the share of KV blocks that are free (here: of places). Equals take turns. `filters`: the members are narrowed
    first by llm-d's `lora-residency-filter`: to those that hold the adapter, until all of these are saturated (8
    waiting, or 0.8 of the blocks used); then to others that are not."""

    period_s = 2.0

    def __init__(
        self, affinity: Callable[[SimulatedMember, str], float], *, weight: float = 1.0, filters: bool = False
    ) -> None:
        self._affinity = affinity
        self._weight = weight
        self._filters = filters
        self._turn = 0

    def choose(self, arrival: Arrival, members: Members, now: float) -> SimulatedMember:
        among = self._narrowed(arrival.digest, members) if self._filters else members
        queues = [member.load - member.running for member in among]
        least, most = min(queues), max(queues)
        values = [
            self._weight * self._affinity(member, arrival.digest)
            + (1.0 if most == least else (most - queue) / (most - least))
            + 1
            - member.running / member.places
            for member, queue in zip(among, queues, strict=True)
        ]
        best = [member for member, value in zip(among, values, strict=True) if value == max(values)]
        self._turn += 1
        return best[self._turn % len(best)]

    @staticmethod
    def _narrowed(digest: str, members: Members) -> Members:
        spare = [m for m in members if m.load - m.running <= 8 and m.running <= 0.8 * m.places]
        homes = [member for member in members if _holds(member, digest)]
        if not homes:
            return members
        if any(member in spare for member in homes):
            return homes
        return [member for member in spare if member not in homes] or homes

    def end(self, arrival: Arrival, now: float) -> None:
        pass

    def tick(self, members: Members, now: float) -> Iterator[tuple[SimulatedMember, str]]:
        return iter(())


WINDOW_TICKS, SMOOTHING, COOLDOWN_TICKS = 30, 0.3, 3


@dataclass
class Dynamo:
    """Dynamo's controller and filter: copies by an adapter's share of the requests of 90 s, smoothed, times all slots;
    fewer only after a while; in rendezvous order, prior places first, members without a free slot left out. Members
    take turns, as in its own simulator. `loaded_first`: as it reads: those of the set that hold the adapter, so that
    requests never load a second copy; else the whole set, whose slots are counted as planned, not as loaded, since sets
    do not grow any more once all slots have been loaded."""

    loaded_first: bool
    period_s: float = 3.0
    sets: dict[str, Members] = field(default_factory=dict)
    _arrived: deque[Counter[str]] = field(default_factory=lambda: deque([Counter()], WINDOW_TICKS))
    _smoothed: dict[str, float] = field(default_factory=dict)
    _fewer_since: dict[str, int] = field(default_factory=dict)
    _turns: Counter[str] = field(default_factory=Counter)
    _tick: int = 0

    def choose(self, arrival: Arrival, members: Members, now: float) -> SimulatedMember:
        digest = arrival.digest
        self._arrived[-1][digest] += 1
        loaded = [member for member in members if digest in member.resident]
        if digest not in self.sets:
            among: Members = loaded or members
        elif self.loaded_first:
            among = [member for member in loaded if member in self.sets[digest]] or self.sets[digest]
        else:
            among = self.sets[digest]
        self._turns[digest] += 1
        return among[self._turns[digest] % len(among)]

    def end(self, arrival: Arrival, now: float) -> None:
        pass

    def tick(self, members: Members, now: float) -> Iterator[tuple[SimulatedMember, str]]:
        self._tick += 1
        loads = self._loads()
        known = loads.keys() | {digest for member in members for digest in member.resident}
        copies = shared_out(loads, sum(member.slots for member in members), len(members))
        before, self.sets = self.sets, {}
        used = Counter({m.name: len(m.resident) for m in members} if self.loaded_first else {})
        for digest in sorted(copies):
            prior = before.get(digest, [])
            count = self._settled(digest, copies[digest], len(prior))
            ordered = in_order(digest, members)
            free = [m for m in ordered if used[m.name] - self._counted(m, digest) < m.slots]
            kept = [member for member in free if member in prior]
            found = (kept + [member for member in free if member not in prior])[:count]
            self.sets[digest] = found or ordered[:count]
            for member in self.sets[digest]:
                used[member.name] += not self._counted(member, digest)
        projected = Counter(member.name for found in self.sets.values() for member in found)
        for digest in sorted(loads.keys() - copies.keys()):
            warm = [member for member in before.get(digest, []) if digest in member.resident]
            free = [m for m in in_order(digest, members) if projected[m.name] < m.slots]
            self.sets[digest] = warm or (free or in_order(digest, members))[:1]
            projected.update(member.name for member in self.sets[digest])
        for digest in known - loads.keys():
            self.sets[digest] = in_order(digest, members)[:1]
            self._fewer_since.pop(digest, None)
        return iter(())

    def _counted(self, member: SimulatedMember, digest: str) -> bool:
        """Whether a member's slots in use include the version's."""
        return self.loaded_first and digest in member.resident

    def _loads(self) -> dict[str, int]:
        """Requests of the window by version, smoothed and rounded; those above 0."""
        window: Counter[str] = Counter()
        for each in self._arrived:
            window.update(each)
        self._arrived.append(Counter())
        for digest in window.keys() | self._smoothed.keys():
            before = self._smoothed.get(digest, float(window[digest]))
            self._smoothed[digest] = before + SMOOTHING * (window[digest] - before)
        rounded = {digest: round(value) for digest, value in self._smoothed.items()}
        return {digest: load for digest, load in rounded.items() if load}

    def _settled(self, digest: str, wanted: int, current: int) -> int:
        if wanted >= current:
            self._fewer_since.pop(digest, None)
            return wanted
        since = self._fewer_since.setdefault(digest, self._tick)
        if self._tick - since < COOLDOWN_TICKS:
            return current
        self._fewer_since[digest] = self._tick
        return wanted


def shared_out(loads: dict[str, int], slots: int, members: int) -> dict[str, int]:
    """Copies by version: its share of the slots, rounded up, at least one and at most one a member; scaled where these
    are more than the slots, the largest remainders rounded up. The versions beyond the slots get none."""
    ranked = sorted(loads, key=lambda digest: (-loads[digest], digest))[:slots]
    total = sum(loads[digest] for digest in ranked)
    wanted = {digest: float(min(members, max(1, ceil(loads[digest] / total * slots)))) for digest in ranked}
    if sum(wanted.values()) <= slots:
        return {digest: int(count) for digest, count in wanted.items()}
    scale = slots / sum(wanted.values())
    scaled = {digest: max(1.0, count * scale) for digest, count in wanted.items()}
    copies = {digest: floor(count) for digest, count in scaled.items()}
    left = slots - sum(copies.values())
    for digest in sorted(scaled, key=lambda digest: (copies[digest] - scaled[digest], digest)):
        if left <= 0:
            break
        if copies[digest] < members:
            copies[digest] += 1
            left -= 1
    return copies
