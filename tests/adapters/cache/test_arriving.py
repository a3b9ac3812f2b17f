"""Adapters on the device whose copy goes on: they are leased, and neither evicted nor whole."""

from __future__ import annotations

import threading
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.adapters.cache.adapter_cache import LeaseError, Residency
from loraplex.adapters.cache.residency import Ticket
from loraplex.adapters.device.arrival import Arrival, may_begin
from support.adapters.cache_fakes import CacheRig, make_ref
from support.adapters.cache_integrity import check_cache

A, B = make_ref("a"), make_ref("b")


def arriving(rig: CacheRig) -> None:
    """Bring `A` so far that steps may read it."""
    rig.step(A)
    rig.transport.finish_load()
    rig.step(A)
    rig.clock.now += 1.0
    rig.transport.make_usable("a")
    assert rig.step(A) == [Residency.READY]
    assert rig.cache.is_arriving("a")


@pytest.mark.parametrize("error", [None, "the device is gone"])
@pytest.mark.parametrize("usable", [False, True])
def test_a_copy_that_ends_while_it_is_looked_at_is_seen_by_the_next_poll(
    monkeypatch: pytest.MonkeyPatch, error: str | None, usable: bool
) -> None:
    """The thread that copies may end it between any two looks of one poll."""
    for looks in range(5):
        rig = CacheRig(num_pages=1, num_slots=2, host_pages=0)
        rig.step(A)
        rig.transport.finish_load()
        rig.step(A)
        if usable:
            rig.transport.make_usable("a")
        rig.transport.finish_copy(error=error)
        left = iter([False] * looks)
        with monkeypatch.context() as patch:
            patch.setattr(Ticket, "done", property(lambda _, left=left: next(left, True)))
            patch.setattr(Ticket, "error", property(lambda ticket: error if ticket.done else None))
            rig.cache.poll()
        rig.cache.poll()
        assert rig.on_device(A) == ([] if error else ["a"])
        assert not rig.cache.is_arriving("a")
        check_cache(rig.cache)


def test_its_image_and_its_pages_stay_until_the_copy_is_done() -> None:
    rig = CacheRig(num_pages=1, num_slots=2, host_pages=0)
    arriving(rig)
    for _ in range(3):
        assert rig.step(B) != [Residency.READY]
        if rig.transport.loads:
            rig.transport.finish_load()
    assert rig.on_device(A, B) == ["a"]
    (image,) = (move.image for move in rig.transport.copies)
    assert image.is_live
    rig.cache.drop("a")
    check_cache(rig.cache)
    assert image.is_live
    rig.transport.finish_copy("a")
    rig.step(B)
    assert not image.is_live
    assert rig.on_device(A) == []
    while rig.step(B) != [Residency.READY]:
        if rig.transport.loads:
            rig.transport.finish_load()
        if rig.transport.copies:
            rig.transport.finish_copy()


def test_the_time_of_its_copy_is_told_in_two_parts() -> None:
    rig = CacheRig()
    arriving(rig)
    rig.clock.now += 3.0
    rig.transport.finish_copy("a")
    rig.step()
    (entry,) = rig.cache.entries()
    assert entry.load_seconds["copy"] == pytest.approx(1.0, abs=0.1)
    assert entry.load_seconds["overlapped"] == pytest.approx(3.0, abs=0.1)
    assert not entry.loading
    usage = rig.cache.usage()
    assert usage.adapter_copies == 1
    assert usage.adapter_load_seconds["overlapped"] == entry.load_seconds["overlapped"]
    # Patience goes by the time until requests could run.
    assert rig.cache.seconds_left("b") == pytest.approx(0.01 + 1.0, abs=0.1)


@pytest.mark.parametrize("how", ["fails", "given up", "time-out"])
def test_it_is_lost_where_its_copy_fails_and_its_pages_stay_while_they_are_leased(how: str) -> None:
    rig = CacheRig(num_pages=1)
    arriving(rig)
    lease = rig.cache.acquire("a")
    if how == "fails":
        rig.transport.finish_copy("a", error="broken")
    elif how == "given up":
        rig.transport.give_up("a")
    else:
        rig.clock.now += 61.0
    rig.step()
    assert rig.cache.take_lost().keys() == {"a"}
    assert not rig.cache.take_lost()
    assert rig.cache.state("a") == "cold"
    assert rig.failed("a")
    with pytest.raises(LeaseError):
        rig.cache.acquire("a")
    if how != "fails":
        rig.transport.finish_copy("a")
        rig.step()
    assert rig.cache.usage().num_arena_pages_used == 1
    rig.cache.release(lease)
    with pytest.raises(LeaseError):
        rig.cache.release(lease)
    rig.step()
    assert rig.cache.usage().num_arena_pages_used == 0
    rig.clock.now += 100.0
    rig.bring(A)


LAYERS = st.lists(st.integers(0, 9), min_size=1, max_size=40)


@given(pages=LAYERS, each_s=st.floats(1e-5, 1.0), lead_s=st.floats(1e-4, 10.0), data=st.data())
def test_a_step_that_begins_by_the_rule_waits_for_no_layer(
    pages: list[int], each_s: float, lead_s: float, data: st.DataObject
) -> None:
    """This holds where copies keep their rate and the step takes the time that was predicted."""
    needed = np.cumsum(pages)
    arrived = data.draw(st.integers(0, int(needed[-1])))
    begins = may_begin(needed, arrived, arrived * each_s, lead_s)
    starts = [lead_s * layer / len(pages) for layer in range(len(pages))]
    late = [(count - arrived) * each_s > start for count, start in zip(needed, starts, strict=True)]
    if begins:
        assert arrived >= needed[0]
        assert arrived == 0 or not any(late)
    if arrived == needed[-1]:
        assert begins
    later = [may_begin(needed, n, n * each_s, lead_s) for n in range(1, int(needed[-1]) + 1)]
    assert all(before <= after for before, after in pairwise(later))


def test_steps_wait_so_long_for_all_layers_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy whose pages come one by one, each soon enough, holds a step no longer than one that stops."""
    monkeypatch.setattr("loraplex.adapters.device.arrival.MOST_WAIT_S", 0.2)
    late = []
    arrival = Arrival(np.arange(1, 101), on_late=lambda: late.append(True))
    for layer in range(100):
        page = threading.Timer(0.05, arrival.arrived, (1,))
        page.start()
        came = arrival.wait_for(layer)
        page.join()
        if not came:
            break
    assert layer <= 4
    assert late == [True]
    assert not arrival.wait_for(99)
