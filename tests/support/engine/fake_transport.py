"""Adapters that move without a disk and without a device, by a clock that the test owns.

`FakeTransport` decides each load's and each copy's fate when it begins, and completes it when `settle` is called
after its time. Device pages remember whose bytes they hold. A copy tears its pages the moment it begins and leaves
them whole when it is done, so that a page given away too early is seen by any step that still reads it. With a lead a
copy is usable at `usable_at` of its time: its pages are whole from then on, as a step that waits finds them, unless it
fails.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

from loraplex.adapters.cache.adapter_cache import AdapterCache
from loraplex.adapters.cache.residency import Ticket
from loraplex.adapters.ref import AdapterRef
from support.adapters.cache_fakes import PAGE_BYTES, FakeImage
from support.engine.fake_runner import GARBAGE, adapter_mark


@dataclass(frozen=True)
class Fate:
    """How a load or a copy goes: after `seconds` (None: never) it succeeds, or fails with `error`."""

    seconds: float | None = 0.0
    error: str | None = None


@dataclass
class FakeTransport:
    """`num_pages_of` sizes an adapter, by digest; `load_fate` and `copy_fate` tell how each move will go."""

    clock: Callable[[], float]
    num_pages: int
    num_pages_of: Callable[[str], int] = field(default=lambda digest: 1)
    load_fate: Callable[[str], Fate] = field(default=lambda digest: Fate())
    copy_fate: Callable[[str], Fate] = field(default=lambda digest: Fate())
    usable_at: Callable[[], float] = field(default=lambda: 0.5)

    def __post_init__(self) -> None:
        self.pages: list[int] = [GARBAGE] * self.num_pages
        self.slots: dict[int, tuple[int, ...]] = {}
        self.num_loads = 0
        self.num_copies = 0
        self.num_usable = 0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()

    def load(self, ref: AdapterRef) -> Ticket[FakeImage]:
        self.num_loads += 1
        # A cancelled load still finishes: nobody may care.
        ticket: Ticket[FakeImage] = Ticket()
        image = FakeImage(ref.digest, self.num_pages_of(ref.digest))
        fate = self.load_fate(ref.digest)
        self._schedule(fate, lambda: ticket.succeed(image), ticket)
        return ticket

    def copy(self, image: FakeImage, slot: int, pages: tuple[int, ...], lead_s: float = 0.0) -> Ticket[None]:
        self.num_copies += 1
        assert len(pages) == image.num_pages, "an image was given another number of pages than it has"
        ticket: Ticket[None] = Ticket()
        fate = self.copy_fate(image.digest)
        for page in pages:
            self.pages[page] = GARBAGE
        self.slots[slot] = pages

        def write(mark: int) -> None:
            assert image.is_live, "a copy reads host memory that was given back"
            for page in pages:
                self.pages[page] = mark

        def usable() -> None:
            write(self.mark_of(image))
            self.num_usable += 1
            ticket.ready()

        def done() -> None:
            write(self.mark_of(image))
            ticket.succeed(None)

        def failed() -> None:
            write(GARBAGE)
            assert fate.error is not None
            ticket.fail(fate.error)

        if fate.seconds is not None:
            if lead_s > 0.0:
                self._at(self.usable_at() * fate.seconds, usable)
            self._at(fate.seconds, done if fate.error is None else failed)
        return ticket

    def clear(self, slot: int) -> None:
        self.slots.pop(slot, None)

    def mark_of(self, image: FakeImage) -> int:
        """Whose bytes a copy of it leaves."""
        return adapter_mark(image.digest)

    def host_shortage(self) -> int:
        return 0

    def mark_in_slot(self, slot: int) -> int:
        """What a step that names this slot reads there now."""
        marks = {self.pages[page] for page in self.slots.get(slot, ())}
        return marks.pop() if len(marks) == 1 else GARBAGE

    def settle(self) -> int:
        """Complete everything whose time has come. Returns how many moves ended."""
        ended = 0
        while self._due and self._due[0][0] <= self.clock():
            heapq.heappop(self._due)[2]()
            ended += 1
        return ended

    @property
    def next_due(self) -> float | None:
        """When the next move ends; None if none will."""
        return self._due[0][0] if self._due else None

    def _schedule(self, fate: Fate, succeed: Callable[[], None], ticket: Ticket[FakeImage]) -> None:
        if fate.seconds is not None:
            error = fate.error
            self._at(fate.seconds, succeed if error is None else (lambda: ticket.fail(error)))

    def _at(self, seconds: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._due, (self.clock() + seconds, next(self._order), what))


def make_cache(
    transport: FakeTransport, *, num_slots: int = 8, host_pages: int = 64, load_timeout_s: float = 10.0
) -> AdapterCache[FakeImage]:
    return AdapterCache(
        transport=transport,
        num_pages=transport.num_pages,
        num_slots=num_slots,
        host_bytes=host_pages * PAGE_BYTES,
        load_timeout_s=load_timeout_s,
        clock=transport.clock,
    )
