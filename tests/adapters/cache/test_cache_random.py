"""Random histories of the cache: loads that fail, hang and come late, copies that are read before they are done, pins,
deletions, tiny memory.

After every move: the cache's own integrity; and every leased adapter is read through its slot and pages, which must
hold its own bytes and nobody else's, or those that its own copy has not brought yet.
"""

from __future__ import annotations

import random
from contextlib import suppress

import pytest

from loraplex.adapters.cache.adapter_cache import AdapterCache, Lease, LeaseError, PinRefused, Residency
from loraplex.adapters.cache.tenant_memory import NO_MEMORY_LIMITS, MemoryLimits
from support.adapters.cache_fakes import PAGE_BYTES, TORN, FakeClock, FakeImage, HandTransport, make_ref
from support.adapters.cache_integrity import check_cache
from support.adapters.reserved import kept_by_reservations


class History:
    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.limiting = random.Random(seed)  # tenants, reservations and caps
        self.copying = random.Random(f"{seed}/copies")
        self.some_quick = self.copying.random() < 0.5
        tenants = ["a", "b", "c"][: self.limiting.randint(1, 3)]
        self.refs = [make_ref(f"d{i}", self.limiting.choice(tenants)) for i in range(rng.randint(2, 9))]
        num_pages = rng.randint(1, 8)
        sizes = {ref.digest: rng.choice([1, 1, 2, 3, num_pages, num_pages + 1]) for ref in self.refs}
        self.clock = FakeClock()
        self.transport = HandTransport(num_pages, sizes)
        self.host_bytes = rng.choice([0, 2, 5, 100]) * PAGE_BYTES
        num_slots = rng.randint(1, 5)
        self.cache: AdapterCache[FakeImage] = AdapterCache(
            transport=self.transport,
            num_pages=num_pages,
            num_slots=num_slots,
            host_bytes=self.host_bytes,
            load_timeout_s=10.0,
            clock=self.clock,
            max_loads=rng.randint(1, 3),
        )
        self.caps: dict[str, int] = {}
        if self.limiting.random() < 0.6:
            for tenant in tenants:
                self._limit(tenant, num_pages)
        self.leases: list[tuple[Lease, tuple[int, ...]]] = []
        self.ready: set[str] = set()
        self.early: set[tuple[int, tuple[int, ...]]] = (
            set()
        )  # slots and pages that steps may read before they are whole
        self.moves = [
            (self.step, 6),
            (self.acquire, 5),
            (self.release, 4),
            (self.finish_load, 4),
            (self.finish_copy, 4),
            (self.make_usable, 3),
            (self.give_up, 0.5),
            (self.pass_time, 1),
            (self.pin, 0.3),
            (self.unpin, 0.6),
            (self.drop, 0.3),
            (self.prefetch, 0.3),
            (self.warm, 0.3),
            (self.release_twice, 0.3),
        ]

    def _limit(self, tenant: str, num_pages: int) -> None:
        draw = self.limiting
        reserved, most, host = (
            draw.randint(1, num_pages) * PAGE_BYTES if draw.random() < 0.5 else None for _ in range(3)
        )
        if most is not None:
            self.caps[tenant] = most
        self.cache.tenants.set_limits(tenant, MemoryLimits(reserved, most, host))

    def run(self, length: int) -> None:
        moves, weights = zip(*self.moves, strict=True)
        for _ in range(length):
            self.rng.choices(moves, weights)[0]()
            self.check()
        self.wind_down()

    def check(self) -> None:
        check_cache(self.cache)
        held = self.cache.tenants.tenant_bytes()
        for tenant, most in self.caps.items():
            assert tenant not in held or held[tenant].device <= most, "a tenant has more than its cap"
        for lease, pages in self.leases:
            missing = {TORN} if (lease.slot, pages) in self.early else set()
            assert self.transport.read(lease.slot, pages) - missing == {lease.digest}
        leased = {
            page for lease, pages in self.leases for page in pages if (lease.slot, pages) not in self.early
        }
        writing = [page for copy in self.transport.copies for page in copy.pages]
        assert not leased & set(writing)
        assert len(writing) == len(set(writing)), "two copies write to a page"

    # Moves.

    def step(self) -> None:
        self.clock.now += 0.01
        self.transport.quick = self.some_quick and self.copying.random() < 0.5
        self.ready.clear()
        self.cache.poll()
        check_cache(self.cache)
        for digest in self.cache.take_lost():
            assert self.cache.state(digest) != "hot", "its copy failed, and it is still there"
            assert self.cache.failure(digest)
        images = sum(entry.host_bytes for entry in self.cache.entries() if not entry.loading)
        largest = PAGE_BYTES * max(self.transport.sizes.values())
        assert images <= max(self.host_bytes, largest), (
            "more in host memory than its share, or one that passes"
        )
        self.cache.begin_pass()
        for ref in self.rng.sample(self.refs, self.rng.randint(0, len(self.refs))):
            kept = kept_by_reservations(self.cache, ref, self.transport.sizes[ref.digest])
            residency = self.cache.request(ref)
            gone = {digest for digest in kept if self.cache.state(digest) != "hot"}
            assert not gone, f"{gone} were evicted for {ref.tenant_id}, and are reserved"
            is_hot = self.cache.state(ref.digest) == "hot"
            if is_hot:
                self.ready.add(ref.digest)
            elif residency is Residency.FAILED:
                assert self.cache.failure(ref.digest)
            copied_at_once = self.transport.quick and residency is Residency.LOADING
            assert is_hot == (residency is Residency.READY) or copied_at_once
        for digest in self.ready:
            assert self.cache.state(digest) == "hot", "evicted in the pass that was told it is ready"

    def acquire(self) -> None:
        for digest in sorted(self.ready):
            if self.cache.state(digest) == "hot" and self.rng.random() < 0.5:
                lease = self.cache.acquire(digest)
                self.leases.append((lease, self.transport.where[lease.slot]))

    def release(self) -> None:
        if self.leases:
            lease, _ = self.leases.pop(self.rng.randrange(len(self.leases)))
            self.cache.release(lease)

    def release_twice(self) -> None:
        if self.leases:
            lease, _ = self.leases.pop()
            self.cache.release(lease)
            with pytest.raises(LeaseError):
                self.cache.release(lease)

    def finish_load(self) -> None:
        if self.transport.loads:
            move = self.rng.choice(self.transport.loads)
            self.transport.finish_load(move.digest, error="broken" if self.rng.random() < 0.15 else None)

    def finish_copy(self) -> None:
        if self.transport.copies:
            move = self.rng.choice(self.transport.copies)
            move = next(first for first in self.transport.copies if first.digest == move.digest)
            failed = self.rng.random() < 0.1
            self.transport.finish_copy(move.digest, error="broken" if failed else None)
            if not failed:
                self.early.discard((move.slot, move.pages))

    def make_usable(self) -> None:
        if self.transport.copies:
            move = self.rng.choice(self.transport.copies)
            self.early.add((move.slot, move.pages))
            move.ticket.ready()

    def give_up(self) -> None:
        early = [move for move in self.transport.copies if (move.slot, move.pages) in self.early]
        if early:
            self.rng.choice(early).ticket.give_up("a layer did not come")

    def pass_time(self) -> None:
        self.clock.now += self.rng.choice([0.5, 2.0, 11.0])

    def pin(self) -> None:
        with suppress(PinRefused):
            self.cache.pin(self.rng.choice(self.refs))

    def unpin(self) -> None:
        self.cache.unpin(self.rng.choice(self.refs).digest)

    def drop(self) -> None:
        self.cache.drop(self.rng.choice(self.refs).digest)

    def prefetch(self) -> None:
        self.cache.prefetch(self.rng.choice(self.refs))

    def warm(self) -> None:
        self.cache.warm(self.rng.sample(self.refs, self.rng.randint(0, len(self.refs))))

    # The end.

    def wind_down(self) -> None:
        """With all leases back, nothing pinned and a transport that works, each adapter that can fit gets to the
        device in a bounded number of steps; with all dropped, nothing is left."""
        for lease, _ in self.leases:
            self.cache.release(lease)
        self.leases.clear()
        self.caps.clear()
        for ref in self.refs:
            self.cache.tenants.set_limits(ref.tenant_id, NO_MEMORY_LIMITS)
            self.cache.unpin(ref.digest)
        self._settle()
        self.cache.poll()
        for ref in self.refs:
            self._bring(ref)
            self.cache.drop(ref.digest)
        for ref in self.refs:
            self.cache.drop(ref.digest)
        self._settle()
        self.cache.poll()
        check_cache(self.cache)
        usage = self.cache.usage()
        assert (usage.num_arena_pages_used, usage.num_adapter_slots_used, usage.host_bytes_used) == (0, 0, 0)
        assert self.cache.entries() == ()

    def _bring(self, ref: object) -> None:
        self.clock.now += 31
        answers = []
        for _ in range(20):
            self._settle()
            self.clock.now += 0.01
            self.cache.poll()
            self.cache.begin_pass()
            answers.append(self.cache.request(ref))  # type: ignore[arg-type]
            self.check()
            if answers[-1] in (Residency.READY, Residency.FAILED):
                break
        fits = self.transport.sizes[ref.digest] <= len(self.transport.pages)  # type: ignore[attr-defined]
        assert answers[-1] is (Residency.READY if fits else Residency.FAILED), answers

    def _settle(self) -> None:
        while self.transport.loads:
            self.transport.finish_load()
        while self.transport.copies:
            self.transport.finish_copy()


@pytest.mark.parametrize("block", range(6))
def test_random_histories(block: int) -> None:
    for seed in range(block * 50, block * 50 + 50):
        try:
            History(seed).run(150)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise


@pytest.mark.soak
@pytest.mark.parametrize("block", range(20))
def test_many_random_histories(block: int) -> None:
    for seed in range(1000 + block * 500, 1000 + block * 500 + 500):
        try:
            History(seed).run(300)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
