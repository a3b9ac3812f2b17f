"""Which adapters come to the device next, and which may be lent out.

Nothing here costs more for more requests or more tenants: lines of requests are moved, not requests.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from loraplex.adapters.cache import AdapterCache, Lease, Residency
from loraplex.engine.fairness import FairQueue
from loraplex.engine.fairness_lines import Line
from loraplex.engine.types import Sequence

MAX_COMPARED = 16
"""Tenants of whom the one that got least has precedence; the next in turn comes in for each that goes."""
MAX_ASKED = 8
"""Adapters that one step may begin to send for."""
MAX_STUCK = 16
"""No other adapter is sent for while this number of them lies in host memory and waits for room on the device."""
MAX_STUCK_OF_TENANT = 2
"""No other adapter of a tenant is sent for while this number of its own waits so."""

Running = dict[Sequence, Lease | None]


@dataclass(slots=True)
class Coming:
    """What a step found of the adapters that are waited for: the digests on their way, and why others can't come."""

    loading: dict[str, None] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


class _Turns:
    """Lines by tenant. Tenants take turns; each tenant's lines keep their order."""

    def __init__(self) -> None:
        self._tenants: OrderedDict[str, dict[Line, None]] = OrderedDict()

    def add(self, line: Line) -> None:
        self._tenants.setdefault(line.tenant_id, {})[line] = None

    def discard(self, line: Line) -> None:
        lines = self._tenants.get(line.tenant_id)
        if lines is not None and line in lines:
            del lines[line]
            if not lines:
                del self._tenants[line.tenant_id]

    def take(self, line: Line) -> None:
        """It has had its turn, and so has its tenant."""
        self.discard(line)
        if line.tenant_id in self._tenants:
            self._tenants.move_to_end(line.tenant_id)

    def put_back(self, line: Line) -> None:
        """It had its tenant's turn, and has not used it."""
        self._tenants[line.tenant_id] = {line: None, **self._tenants.get(line.tenant_id, {})}
        self._tenants.move_to_end(line.tenant_id, last=False)

    def __iter__(self) -> Iterator[Line]:
        for lines in self._tenants.values():
            yield from lines

    def first(self, count: int) -> list[Line]:
        """The first line of each of the first `count` tenants."""
        heads = zip(range(count), self._tenants.values(), strict=False)
        return [next(iter(lines)) for _, lines in heads]


class AdapterScheduler:
    """Sends for the adapters that the queue's closed lines wait for; opens and closes lines as adapters come and go.

    A line ages from when its adapter was first missing until one of its requests runs. Once it has aged `aging_s` it
    may get precedence: then its adapter is asked for before all others until a request of the line runs (or has not
    for another `aging_s` with the adapter there), and while it finds no room on the device, no other is sent for, and
    one after the other of those that are there runs out of use. Pages only come free then, so that it can't be kept
    out by adapters that others keep in use. Requests on base pass it still. Precedence brings the adapter, not a place
    in the batch: that is fairness's to give.

    Tenants take turns in what is sent for, and of those whose turn is near it is the one that got least which has
    precedence: who asks for a thousand adapters delays another tenant's one by a load or two, not by a thousand.

    An adapter that somebody waits for is not evicted for a tenant that got more than that one.
    `load_charge` is what bringing an adapter is charged, for each of its ranks.
    """

    def __init__(
        self,
        cache: AdapterCache[Any],
        queue: FairQueue,
        *,
        aging_s: float,
        load_charge: float,
    ) -> None:
        self._cache = cache
        self._queue = queue
        self._aging_s = aging_s
        self._load_charge = load_charge
        self._lent: frozenset[str] = frozenset()  # may be lent out
        self._unasked = _Turns()  # closed lines whose adapter was not sent for
        self._coming: dict[str, Line] = {}  # by digest, those for whom it was
        self._young: deque[tuple[float, Line]] = deque()
        self._aged = _Turns()  # closed lines
        self._first: Line | None = None  # has precedence
        self._drained_for: Line | None = None
        self._draining: set[str] = set()

    # Requests.

    def joined(self, line: Line, now: float) -> None:
        """A request has come into a line, at `now`."""
        if line.ref is None or line.size > 1:
            return
        if line.is_open:
            line.opened, line.level = now, self._queue.counter(line.tenant_id)
        else:
            self._close(line, now)

    def left(self, line: Line, *, started: bool = False) -> None:
        """A request has gone from a line: it has `started`, or it has ended."""
        if line.ref is None:
            return
        if started:
            line.since = None
            if line is self._first:
                self._first = None
        if not line.size:
            self._forget(line, line.ref.digest)

    # Adapters.

    def step(self, now: float, running: Running) -> Coming:
        """Go on with the adapters that are waited for, and say from now on what may be lent out."""
        coming = Coming()
        if not self._lent <= self._cache.on_device:  # what was deleted is to be sent for again
            self._lend(self._lent & self._cache.on_device, now)
        kept = self._send_for(coming, now, running)
        self._lend(self._cache.on_device - kept, now)
        return coming

    def _send_for(self, coming: Coming, now: float, running: Running) -> Collection[str]:
        """Returns the adapters that may not be lent: while one that has precedence waits for room on the device, some
        must leave it, and no other is sent for.

        The cache evicts nothing that was asked for in the same pass. So what has precedence is asked for first; that
        also keeps its adapter there while its request waits for a place in the batch.
        """
        first = self._precedence(now)
        if first is not None and first.ref is not None:
            residency = self._ask(coming, first, _always)
            if residency is Residency.NO_ROOM and self._cache.state(first.ref.digest) == "warm":
                return self._drain(first, running)
        self._drained_for = None
        stuck: Counter[str] = Counter()
        for line in sorted(self._coming.values(), key=lambda line: self._queue.counter(line.tenant_id)):
            stuck[line.tenant_id] += self._ask(coming, line, self._may_evict(line)) is Residency.NO_ROOM
        asked, begun = 0, True
        while begun and asked < MAX_ASKED and stuck.total() < MAX_STUCK:
            begun = False
            for line in self._unasked.first(MAX_ASKED - asked):
                asked += 1
                if stuck[line.tenant_id] < MAX_STUCK_OF_TENANT:
                    residency = self._ask(coming, line, self._may_evict(line))
                    stuck[line.tenant_id] += residency is Residency.NO_ROOM
                    begun |= residency is Residency.LOADING
        return ()

    def _drain(self, line: Line, running: Running) -> Collection[str]:
        """Adapters that nobody may begin to use, so that the one that this line waits for finds room: one at a time,
        that whose running requests can end the soonest. The others are lent on, and the batch stays full. What is
        pinned would not leave for it anyway."""
        if line is not self._drained_for:
            self._drained_for, self._draining = line, set()
        left: dict[str, int] = {}  # of those in use, the most tokens that one of its requests may draw yet
        for seq, lease in running.items():
            ref = seq.request.adapter
            if lease is not None and ref is not None and not self._cache.is_held(ref.digest):
                most = seq.request.sampling.max_tokens - seq.num_outputs
                left[ref.digest] = max(most, left.get(ref.digest, 0))
        if not left:
            return {digest for digest in self._cache.on_device if not self._cache.is_held(digest)}
        if self._draining.isdisjoint(left):
            self._draining.add(min(left, key=lambda digest: (left[digest], digest)))
        return self._draining

    def _ask(self, coming: Coming, line: Line, may_evict: Callable[[str], bool]) -> Residency:
        """Ask for the adapter that a line waits for."""
        ref = line.ref
        assert ref is not None, "who is on the base model waits for no adapter"
        residency = self._cache.request(ref, may_evict)
        if residency is Residency.FAILED:
            coming.failed[ref.digest] = self._cache.failure(ref.digest)
        elif residency is Residency.LOADING:
            coming.loading[ref.digest] = None
        sent_for = residency is Residency.LOADING or (
            residency is Residency.NO_ROOM and self._cache.state(ref.digest) == "warm"
        )
        if sent_for:
            self._unasked.take(line)
            entry = line.first()
            if ref.digest not in self._coming and entry is not None and entry.seq is not None:
                self._coming[ref.digest] = line
                self._queue.charge(entry.seq, self._load_charge * ref.rank)
        return residency

    def _may_evict(self, line: Line) -> Callable[[str], bool]:
        """What may leave the device for this line's adapter: nothing that somebody waits for who got no more service,
        and none of the tenant's own that it has not used since it came."""
        counter = self._queue.counter
        own = counter(line.tenant_id)

        def may_evict(digest: str) -> bool:
            return all(
                own > other.level if other.tenant_id == line.tenant_id else counter(other.tenant_id) > own
                for other in self._queue.lines(digest)
            )

        return may_evict

    def _lend(self, digests: Collection[str], now: float) -> None:
        """These adapters and no others may be lent out from now on: the only place where lines open and close."""
        if digests == self._lent:
            return
        before, self._lent = self._lent, frozenset(digests)
        # Sorted: what follows from an order of sets would differ from one process to the next.
        for digest in sorted(before - self._lent):
            self._queue.close(digest)
            for line in self._queue.lines(digest):
                self._close(line, now)
        for digest in sorted(self._lent - before):
            self._queue.open(digest)
            self._coming.pop(digest, None)
            for line in self._queue.lines(digest):
                line.opened, line.level = now, self._queue.counter(line.tenant_id)
                self._unasked.discard(line)
                self._aged.discard(line)

    def _precedence(self, now: float) -> Line | None:
        """The line whose adapter goes before all others: of the tenants whose turn is near that which got least. One
        whose adapter has not come gives way to a tenant that got less."""
        counter = self._queue.counter
        while self._young and now - self._young[0][0] >= self._aging_s:
            since, line = self._young.popleft()
            if line.since == since and not line.is_open and line is not self._first:
                self._aged.add(line)
        first = self._first
        if first is not None and first.opened is not None and now - first.opened >= self._aging_s:
            first = self._first = None
        if first is None or first.opened is None:
            least = min(
                self._aged.first(MAX_COMPARED), key=lambda line: counter(line.tenant_id), default=None
            )
            if least is not None and (first is None or counter(first.tenant_id) > counter(least.tenant_id)):
                self._aged.take(least)
                if first is not None:
                    self._aged.put_back(first)
                self._first = least
        return self._first

    def _close(self, line: Line, now: float) -> None:
        line.opened = None
        if line.since is None:
            line.since = now
            self._young.append((now, line))
        elif now - line.since >= self._aging_s and line is not self._first:
            self._aged.add(line)
        self._unasked.add(line)

    def _forget(self, line: Line, digest: str) -> None:
        line.since = None
        self._unasked.discard(line)
        self._aged.discard(line)
        if line is self._first:
            self._first = None
        if self._coming.get(digest) is line:
            del self._coming[digest]
            for other in self._queue.lines(digest):
                self._coming[digest] = other
                break

    def check_integrity(self, waiting: Iterable[Line]) -> None:
        """Raise AssertionError unless every line that it remembers is one of those that are `waiting`. For tests."""
        known = {*waiting}
        held = {*self._coming.values(), *self._unasked, *self._aged, *([self._first] if self._first else [])}
        assert held <= known, "an adapter is waited for by a line that has nobody in it"


def _always(digest: str) -> bool:
    return True
