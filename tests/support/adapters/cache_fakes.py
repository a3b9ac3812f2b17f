"""A transport whose every move the test makes by hand, and device pages that remember whose bytes they hold."""

from __future__ import annotations

from dataclasses import dataclass

from loraplex.adapters.cache.adapter_cache import AdapterCache
from loraplex.adapters.cache.residency import Residency, Ticket
from loraplex.adapters.cache.tenant_memory import MemoryLimits
from loraplex.adapters.ref import AdapterRef
from support.adapters.cache_integrity import check_cache

PAGE_BYTES = 100
TORN = "torn"


class FakeClock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass(eq=False)
class FakeImage:
    digest: str
    num_pages: int
    is_live: bool = True

    @property
    def num_bytes(self) -> int:
        return self.num_pages * PAGE_BYTES

    def release(self) -> None:
        assert self.is_live, "host memory is given back twice"
        self.is_live = False


@dataclass(eq=False)
class FakeMove:
    """A load (no pages) or a copy that has begun and is not done."""

    digest: str
    ticket: Ticket
    image: FakeImage
    slot: int = -1
    pages: tuple[int, ...] = ()
    cancelled: bool = False


class HandTransport:
    """`sizes` gives pages by digest (1 where absent). A copy tears its pages when it begins, and as long as it is
    not done it may tear them again. With `quick`, copies are done at once."""

    def __init__(self, num_pages: int, sizes: dict[str, int] | None = None) -> None:
        self.sizes = sizes or {}
        self.pages: list[str] = [TORN] * num_pages
        self.slots: dict[int, FakeImage | None] = {}
        self.where: dict[int, tuple[int, ...]] = {}
        self.loads: list[FakeMove] = []
        self.copies: list[FakeMove] = []
        self.num_loads = 0
        self.shortage = 0
        self.quick = False

    def load(self, ref: AdapterRef) -> Ticket[FakeImage]:
        def cancel() -> None:
            move.cancelled = True

        ticket: Ticket[FakeImage] = Ticket(on_cancel=cancel)
        move = FakeMove(ref.digest, ticket, FakeImage(ref.digest, self.sizes.get(ref.digest, 1)))
        self.loads.append(move)
        self.num_loads += 1
        return ticket

    def copy(self, image: FakeImage, slot: int, pages: tuple[int, ...], lead_s: float = 0.0) -> Ticket[None]:
        assert len(pages) == image.num_pages
        assert self.slots.get(slot) is None, "a slot is filled that was not cleared"
        ticket: Ticket[None] = Ticket()
        self.copies.append(FakeMove(image.digest, ticket, image, slot, pages))
        self.slots[slot] = image
        self.where[slot] = pages
        self._fill(pages, TORN)
        if self.quick:
            self.finish_copy(image.digest)
        return ticket

    def clear(self, slot: int) -> None:
        self.slots[slot] = None

    def host_shortage(self) -> int:
        return self.shortage

    def finish_load(self, digest: str | None = None, *, error: str | None = None) -> None:
        """The oldest load, or the oldest of that digest."""
        move = next(move for move in self.loads if digest in (None, move.digest))
        self.loads.remove(move)
        if error is None:
            move.ticket.succeed(move.image)
        else:
            move.ticket.fail(error)

    def make_usable(self, digest: str) -> None:
        """A copy that is under way has come so far that steps may read it."""
        next(move for move in self.copies if move.digest == digest).ticket.ready()

    def give_up(self, digest: str) -> None:
        """A step waits no longer for a copy that is under way, and goes on."""
        next(move for move in self.copies if move.digest == digest).ticket.give_up("a layer did not come")

    def finish_copy(self, digest: str | None = None, *, error: str | None = None) -> None:
        move = next(move for move in self.copies if digest in (None, move.digest))
        self.copies.remove(move)
        if error is None:
            assert move.image.is_live, "a copy reads host memory that was given back"
            self._fill(move.pages, move.digest)
            move.ticket.succeed(None)
        else:
            self._fill(move.pages, TORN)
            move.ticket.fail(error)

    def read(self, slot: int, pages: tuple[int, ...]) -> set[str]:
        """Whose bytes a step finds that reads these pages by that slot."""
        image = self.slots.get(slot)
        assert image is not None, "a step reads a slot that was cleared"
        return {self.pages[page] for page in pages} | {image.digest}

    def _fill(self, pages: tuple[int, ...], owner: str) -> None:
        for page in pages:
            self.pages[page] = owner


def make_ref(name: str, tenant: str = "tenant", version: int = 1) -> AdapterRef:
    """Its digest is the name, so that tests can read it."""
    return AdapterRef(tenant, name, version, name, 8)


class CacheRig:
    """A cache over the transport of hands, and a clock that each step moves on by a little."""

    def __init__(
        self,
        *,
        num_pages: int = 4,
        num_slots: int = 4,
        host_pages: int = 100,
        sizes: dict[str, int] | None = None,
        max_loads: int = 2,
    ) -> None:
        self.clock = FakeClock()
        self.transport = HandTransport(num_pages, sizes)
        self.cache: AdapterCache[FakeImage] = AdapterCache(
            transport=self.transport,
            num_pages=num_pages,
            num_slots=num_slots,
            host_bytes=host_pages * PAGE_BYTES,
            load_timeout_s=60.0,
            clock=self.clock,
            max_loads=max_loads,
        )

    def step(self, *refs: AdapterRef) -> list[Residency]:
        """One step of the engine: poll, then a pass that asks for these in order."""
        self.clock.now += 0.01
        self.cache.poll()
        check_cache(self.cache)
        self.cache.begin_pass()
        answers = [self.cache.request(ref) for ref in refs]
        check_cache(self.cache)
        return answers

    def bring(self, *refs: AdapterRef) -> None:
        """All of them to the device, one after the other."""
        for ref in refs:
            assert self.step(ref) == [Residency.LOADING]
            if self.transport.loads:
                self.transport.finish_load()
                assert self.step(ref) == [Residency.LOADING]
            self.transport.finish_copy(ref.digest)
            assert self.step(ref) == [Residency.READY]
        self.step()

    def limit(
        self, tenant: str, *, reserved: int | None = None, most: int | None = None, host: int | None = None
    ) -> None:
        """In pages."""
        pages = [None if count is None else count * PAGE_BYTES for count in (reserved, most, host)]
        self.cache.tenants.set_limits(tenant, MemoryLimits(*pages))

    def on_device(self, *refs: AdapterRef) -> list[str]:
        """Those of them that are there."""
        return [ref.digest for ref in refs if self.cache.state(ref.digest) == "hot"]

    def failed(self, digest: str) -> str:
        return self.cache.failure(digest)
