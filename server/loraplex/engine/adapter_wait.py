"""Requests that wait for their adapter to come to the device: what is sent for next, and since when they wait.

Nothing here costs more for more requests or more tenants: lines of requests are moved, not requests.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from loraplex.adapters.ref import AdapterRef
from loraplex.engine.types import Sequence

MAX_COMPARED = 16
"""Tenants of whom the one that got least has precedence; the next in turn comes in for each that goes."""


@dataclass(slots=True, eq=False)
class Line:
    """One tenant's waiting requests for one adapter. `since`: when the adapter was first missing for one of them; None
    once one has started since. `opened`: when the adapter came, None while it is missing; `level`: the tenant's
    counter then."""

    tenant_id: str
    ref: AdapterRef
    since: float | None = None
    opened: float | None = None
    level: float = 0.0
    seqs: dict[Sequence, None] = field(default_factory=dict)


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

    def first(self, count: int) -> list[Line]:
        """The first line of each of the first `count` tenants."""
        heads = zip(range(count), self._tenants.values(), strict=False)
        return [next(iter(lines)) for _, lines in heads]


class AdapterWait:
    """All waiting requests that name an adapter, in lines: open ones, whose adapter may be lent out, and closed ones.

    A line ages from when its adapter was first missing until one of its requests runs. Once it has aged `aging_s` it
    may get precedence: then its adapter is asked for before all others until a request of the line runs (or has not
    for another `aging_s` with the adapter there), and while it finds no room on the device, no other is sent for, and
    the scheduler lets one after the other of those that are there run out of use. Pages only come free then, so that
    it can't be kept out for ever by adapters that others keep in use. Requests on base pass it still. Precedence
    brings the adapter, not a place in the batch: that is fairness's to give.

    Tenants take turns in what is sent for, and of those whose turn is near it is the one that got least which has
    precedence: who asks for a thousand adapters delays another tenant's one by a load or two, not by a thousand.
    """

    def __init__(self, aging_s: float, quantum: float) -> None:
        self._aging_s = aging_s
        self._quantum = quantum
        self._lines: dict[str, dict[str, Line]] = {}  # by digest and tenant, those with somebody in them
        self._open: frozenset[str] = frozenset()
        self._num_closed = 0
        self._unasked = _Turns()  # closed lines whose adapter was not sent for
        self._coming: dict[str, Line] = {}  # by digest, those for whom it was
        self._young: deque[tuple[float, Line]] = deque()
        self._aged = _Turns()  # closed lines
        self._first: Line | None = None  # has precedence

    def __len__(self) -> int:
        """Requests whose adapter can't be lent to them now."""
        return self._num_closed

    def __contains__(self, seq: Sequence) -> bool:
        """Whether it is among them."""
        adapter = seq.request.adapter
        return (
            adapter is not None
            and adapter.digest not in self._open
            and (line := self._lines.get(adapter.digest, {}).get(seq.request.tenant_id)) is not None
            and seq in line.seqs
        )

    # Requests.

    def add(self, seq: Sequence, now: float, level: float) -> None:
        """A request waits, from `now` on; `level` is its tenant's counter. Does nothing for one on the base model."""
        ref = seq.request.adapter
        if ref is None:
            return
        tenants = self._lines.setdefault(ref.digest, {})
        line = tenants.get(seq.request.tenant_id)
        if line is None:
            line = tenants[seq.request.tenant_id] = Line(seq.request.tenant_id, ref)
            if ref.digest in self._open:
                line.opened, line.level = now, level
            else:
                self._close(line, now)
        line.seqs[seq] = None
        self._num_closed += ref.digest not in self._open

    def discard(self, seq: Sequence, *, started: bool = False) -> None:
        """It waits no more: it has `started`, or it has ended. Does nothing for one that did not wait."""
        ref = seq.request.adapter
        line = None if ref is None else self._lines.get(ref.digest, {}).get(seq.request.tenant_id)
        if line is None or seq not in line.seqs:
            return
        del line.seqs[seq]
        self._num_closed -= line.ref.digest not in self._open
        if started:
            line.since = None
            if line is self._first:
                self._first = None
        if not line.seqs:
            self._forget(line)

    def of(self, digest: str) -> list[Sequence]:
        """Everyone who waits for this adapter."""
        return [seq for line in self._lines.get(digest, {}).values() for seq in line.seqs]

    def lines(self, digest: str) -> Iterable[Line]:
        """The lines of those who wait for this adapter."""
        return self._lines.get(digest, {}).values()

    # Adapters.

    def set_open(self, digests: frozenset[str], now: float, counter: Callable[[str], float]) -> None:
        """From now on these adapters and no others may be lent out. `counter` tells a tenant's."""
        before, self._open = self._open, digests
        for digest in sorted(before - digests):
            for line in self._lines.get(digest, {}).values():
                self._num_closed += len(line.seqs)
                self._close(line, now)
        for digest in sorted(digests - before):
            self._coming.pop(digest, None)
            for line in self._lines.get(digest, {}).values():
                self._num_closed -= len(line.seqs)
                line.opened, line.level = now, counter(line.tenant_id)
                self._unasked.discard(line)
                self._aged.discard(line)

    def precedence(self, now: float, counter: Callable[[str], float]) -> Line | None:
        """The line whose adapter goes before all others: of the tenants whose turn is near that which got least, as
        `counter` tells. One whose adapter has not come gives way to a tenant that got less by more than a quantum."""
        while self._young and now - self._young[0][0] >= self._aging_s:
            since, line = self._young.popleft()
            if line.since == since and line.ref.digest not in self._open and line is not self._first:
                self._aged.add(line)
        first = self._first
        if first is not None and first.opened is not None and now - first.opened >= self._aging_s:
            first = self._first = None
        if first is None or first.opened is None:
            least = min(
                self._aged.first(MAX_COMPARED), key=lambda line: counter(line.tenant_id), default=None
            )
            if least is not None and (
                first is None or counter(first.tenant_id) - counter(least.tenant_id) > self._quantum
            ):
                self._aged.take(least)
                if first is not None:
                    self._aged.put_back(first)
                self._first = least
        return self._first

    def coming(self) -> list[Line]:
        """Those whose adapters were sent for and have not come."""
        return list(self._coming.values())

    def unasked(self, count: int) -> list[Line]:
        """Whose adapters to send for next: the oldest of each of the next `count` tenants."""
        return self._unasked.first(count)

    def send_for(self, line: Line) -> bool:
        """This line's adapter is on its way. False if that was known."""
        self._unasked.take(line)
        if line.ref.digest in self._coming:
            return False
        self._coming[line.ref.digest] = line
        return True

    def _close(self, line: Line, now: float) -> None:
        line.opened = None
        if line.since is None:
            line.since = now
            self._young.append((now, line))
        elif now - line.since >= self._aging_s and line is not self._first:
            self._aged.add(line)
        self._unasked.add(line)

    def _forget(self, line: Line) -> None:
        digest = line.ref.digest
        tenants = self._lines[digest]
        del tenants[line.tenant_id]
        if not tenants:
            del self._lines[digest]
        line.since = None
        self._unasked.discard(line)
        self._aged.discard(line)
        if line is self._first:
            self._first = None
        if self._coming.get(digest) is line:
            del self._coming[digest]
            for other in tenants.values():
                self._coming[digest] = other
                break

    def check_integrity(self, waiting: Iterable[Sequence]) -> None:
        """Raise AssertionError unless it holds the `waiting` requests that name an adapter and no others. For tests."""
        held = {seq for tenants in self._lines.values() for line in tenants.values() for seq in line.seqs}
        named = {seq for seq in waiting if seq.request.adapter is not None}
        assert held == named, "requests wait for an adapter and are not in its line, or the reverse"
        assert self._num_closed == sum(seq in self for seq in held), "the closed lines are miscounted"
