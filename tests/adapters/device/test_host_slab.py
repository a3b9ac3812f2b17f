"""Host memory for adapters: pages of one slab, and copies to the device in pieces."""

from __future__ import annotations

import gc
import random
import threading
import time
from collections.abc import Callable, Iterable

import pytest
import torch

from loraplex.adapters.device import device_copies, host_slab
from loraplex.adapters.device.device_copies import MAX_QUEUED, PIECE_BYTES, PacedCopies
from loraplex.adapters.device.host_slab import HostPages, HostSlab, adjacent_runs
from loraplex.adapters.errors import LoadAbandoned

PAGE = 4096
PATIENCE_S = 20.0


def check_pages(slab: HostSlab, held: Iterable[HostPages]) -> None:
    """Raise AssertionError unless every page is either free or in exactly one of `held`, which are all that was handed
    out."""
    start = slab._memory.data_ptr()
    pages = list(slab._free)
    for memory in held:
        for run in memory.runs:
            first, rest = divmod(run.data_ptr() - start, slab.page_bytes)
            if 0 <= first < slab.num_pages:
                assert not rest, "a run begins within a page"
                pages += range(first, first + run.shape[0])
    assert sorted(pages) == list(range(slab.num_pages)), "a page is lost or owned twice"


@pytest.mark.parametrize("seed", range(5))
def test_pages_have_one_owner_whatever_is_taken_and_given_back(seed: int) -> None:
    chance = random.Random(seed)
    slab = HostSlab(64 * PAGE + 17, PAGE)
    assert slab.num_bytes == 64 * PAGE
    held: list[tuple[int, HostPages]] = []
    for number in range(400):
        wanted = chance.randint(1, 24)
        if held and (chance.random() < 0.4 or wanted > slab.num_free):
            mark, pages = held.pop(chance.randrange(len(held)))
            assert all((run == mark).all() for run in pages.runs), "somebody wrote to another's pages"
            pages.release()
        elif wanted <= slab.num_free:
            # However they are scattered: free pages always do.
            pages = slab.take(wanted)
            assert (pages.num_pages, pages.num_bytes) == (wanted, wanted * PAGE)
            for run in pages.runs:
                run.fill_(number % 251)
            held.append((number % 251, pages))
        check_pages(slab, [pages for _, pages in held])
        assert slab.num_free == 64 - sum(pages.num_pages for _, pages in held)
    for _, pages in held:
        pages.release()
    check_pages(slab, [])
    assert slab.take(64).runs[0].shape == (64, PAGE), "the slab is not whole again"


def test_giving_back_twice_is_refused() -> None:
    slab = HostSlab(4 * PAGE, PAGE)
    pages = slab.take(2)
    pages.release()
    with pytest.raises(RuntimeError, match="twice"):
        pages.release()
    check_pages(slab, [])


def test_no_memory_is_touched_before_it_is_used() -> None:
    def resident() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    before = resident()
    slab = HostSlab(2 << 30, 1 << 20)
    slab.take(100)
    assert resident() - before < 64 << 20


class Taker(threading.Thread):
    def __init__(self, take: Callable[[], HostPages]) -> None:
        super().__init__(daemon=True)
        self.take = take
        self.got: HostPages | None = None
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            self.got = self.take()
        except LoadAbandoned as error:
            self.error = error


def test_a_full_slab_serves_who_waits_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_slab, "SPILL_AFTER_S", PATIENCE_S)
    slab = HostSlab(8 * PAGE, PAGE)
    held = [slab.take(4), slab.take(4)]
    told = threading.Semaphore(0)
    large = Taker(lambda: slab.take(6, on_shortage=told.release))
    assert told.acquire(timeout=PATIENCE_S)
    assert slab.shortage == 6 * PAGE
    small = Taker(lambda: slab.take(2, on_shortage=told.release))
    assert told.acquire(timeout=PATIENCE_S)
    assert slab.shortage == 8 * PAGE
    held[0].release()
    time.sleep(0.2)
    assert large.got is None
    assert small.got is None, "a small one overtakes the large one, which may then never get its pages"
    assert slab.shortage == 4 * PAGE
    held[1].release()
    for taker in (large, small):
        taker.join(PATIENCE_S)
    assert large.got is not None
    assert small.got is not None
    check_pages(slab, [large.got, small.got])
    assert (slab.num_free, slab.shortage) == (0, 0)


def test_who_is_not_wanted_any_more_stops_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_slab, "SPILL_AFTER_S", PATIENCE_S)
    slab = HostSlab(2 * PAGE, PAGE)
    held = slab.take(2)
    told, wanted = threading.Semaphore(0), [True]
    taker = Taker(lambda: slab.take(1, wanted=lambda: wanted[0], on_shortage=told.release))
    assert told.acquire(timeout=PATIENCE_S)
    wanted[0] = False
    taker.join(PATIENCE_S)
    assert isinstance(taker.error, LoadAbandoned)
    assert slab.shortage == 0
    held.release()
    check_pages(slab, [])


def test_memory_outside_is_the_last_resort(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_slab, "SPILL_AFTER_S", 0.05)
    slab = HostSlab(4 * PAGE, PAGE)
    held = slab.take(3)
    for num_pages in (2, 5):  # no page comes free in time; larger than the slab
        pages = slab.take(num_pages)
        assert pages.num_pages == num_pages
        check_pages(slab, [held, pages])
        assert slab.shortage == 0
        pages.release()
    assert slab.num_free == 1


def test_runs_of_adjacent_pages() -> None:
    assert adjacent_runs([]) == []
    assert adjacent_runs([3, 4, 7, 5, 6]) == [(3, 5), (7, 8), (5, 7)]


class FakeEngine:
    """A copy engine that does one copy after another, and only when its result is waited for."""

    def __init__(self) -> None:
        self.queued: list[tuple[str, int]] = []
        self.done: list[str] = []
        self.ahead_of_steps: list[int] = []

    def enqueue(self, source: torch.Tensor, target: torch.Tensor) -> Callable[[], None]:
        # Before each piece a step begins: its inputs wait for all that is queued.
        self.ahead_of_steps.append(sum(size for _, size in self.queued))
        name = f"piece {len(self.queued) + len(self.done)}"
        target.copy_(source)
        self.queued.append((name, source.numel()))

        def wait() -> None:
            while name not in self.done:
                self.done.append(self.queued.pop(0)[0])

        return wait


@pytest.mark.parametrize("page_bytes", [256 << 10, 2 << 20, 8 << 20])
def test_a_steps_inputs_never_wait_for_a_whole_adapter(page_bytes: int) -> None:
    engine = FakeEngine()
    copies = PacedCopies(engine)
    source = torch.randint(0, 256, ((64 << 20) // page_bytes, page_bytes), dtype=torch.uint8)
    target = torch.zeros_like(source)
    copies.copy(source[:3], target[:3])  # a short run, as of scattered pages
    copies.copy(source[3:], target[3:])
    piece = max(PIECE_BYTES, page_bytes)
    assert sum(size for _, size in engine.queued) <= MAX_QUEUED * piece
    # When a piece is queued there is one before it at most.
    assert max(engine.ahead_of_steps) <= piece
    copies.finish()
    assert not engine.queued
    assert torch.equal(source, target)


def test_pieces_are_four_to_eight_mib() -> None:
    """With the two that are queued, a fifth of a millisecond on a bus of 50 GB/s."""
    assert 4 << 20 <= device_copies.PIECE_BYTES <= 8 << 20
    assert device_copies.PIECE_BYTES * device_copies.MAX_QUEUED <= 8 << 20


def test_locked_memory_is_unlocked_when_slab_and_pages_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the driver takes what is allocated at that address later for memory that it has locked."""
    locked: set[int] = set()

    class Driver:
        def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
            locked.add(address)
            return 0

        def cudaHostUnregister(self, address: int) -> int:
            locked.remove(address)
            return 0

    monkeypatch.setattr(host_slab, "_driver", Driver)
    pages = HostSlab(4 * PAGE, PAGE, pinned=True).take(2)
    gc.collect()
    assert locked == {pages.runs[0].data_ptr()}, "its pages are still in use"
    pages.release()
    del pages
    gc.collect()
    assert not locked
