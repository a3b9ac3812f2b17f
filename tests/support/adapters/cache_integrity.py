"""Whether an adapter cache's own lists agree with each other. Costs O(pages + adapters)."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from loraplex.adapters.cache.adapter_cache import AdapterCache
from loraplex.adapters.cache.entries import CachedAdapters, Stage


def check_cache(cache: AdapterCache[Any]) -> None:
    """Raise AssertionError unless every page, slot, lease and byte has one owner, each adapter is in the lists of its
    stage alone (see `CachedAdapters`), and pins and loads keep their limits."""
    entries, held = cache._entries, cache._pins.held
    _check_entries(entries, held)
    for digest, num_pages in held.items():
        entry = entries.get(digest)
        assert entry is not None, "a pin holds an adapter that is not in memory"
        assert (len(entry.pages), entry.slot >= 0) == (num_pages, True), (
            "a pin holds an adapter without memory"
        )
    assert sum(held.values()) <= max(1, entries.num_pages // 2), "pins hold too many pages"
    assert len(held) <= max(1, entries.num_slots // 2), "pins hold too many slots"
    assert len(entries.loading) <= cache._max_loads, "too many loads at a time"


def _check_entries(entries: CachedAdapters[Any], pinned: Container[str]) -> None:
    """Raise AssertionError unless every page and slot has exactly one owner, the counts are what they count,
    and each adapter is in the lists of its stage and in no other."""
    holders = [*entries.by_digest.values(), *entries.stuck]
    pages = [*entries.free_pages, *(page for entry in holders for page in entry.pages)]
    assert sorted(pages) == list(range(entries.num_pages)), "a page is lost or owned twice"
    slots = [*entries.free_slots, *(entry.slot for entry in holders if entry.slot >= 0)]
    assert sorted(slots) == list(range(entries.num_slots)), "a slot is lost or owned twice"
    assert entries.num_leases == sum(len(entry.leases) for entry in holders), "leases are miscounted"
    held = sum(entry.num_bytes for entry in holders if entry.image is not None)
    assert entries.host_bytes == held, "host memory is miscounted"
    for digest, entry in entries.by_digest.items():
        stage, where = entry.stage, f"adapter {digest[:12]}, {entry.stage.value}"
        on_device = stage in (Stage.COPYING, Stage.DEVICE)
        arriving = stage is Stage.DEVICE and entry.copy is not None
        idle = stage is Stage.DEVICE and not (arriving or entry.leases or digest in pinned)
        assert entry.ref.digest == digest, where
        assert len(entry.pages) == (entry.num_pages if on_device else 0), f"{where}: number of pages"
        assert (entry.slot >= 0) == on_device, f"{where}: slot {entry.slot}"
        assert all(lease.slot == entry.slot for lease in entry.leases), f"{where}: a lease of another slot"
        assert stage is Stage.DEVICE or not entry.leases, f"{where}: leased"
        assert (digest in entries.loading) == (stage is Stage.LOADING) == (entry.load is not None), where
        assert (digest in entries.copying) == (stage is Stage.COPYING), where
        assert (digest in entries.arriving) == arriving, where
        assert (entry.copy is not None) == (arriving or stage is Stage.COPYING), where
        assert (digest in entries.on_device) == (stage is Stage.DEVICE), where
        assert (digest in entries.hosted) == (entry.image is not None), where
        without = stage is Stage.LOADING or (stage is Stage.DEVICE and not arriving)
        assert entry.image is not None or without, f"{where}: no image"
        assert (digest in entries.idle) == idle, f"{where}: wrongly (not) in the line for eviction"
        assert not (entry.doomed and idle), f"{where}: deleted, unused and still there"
    copies = (entries.copying, entries.arriving)
    for index in (*copies, entries.loading, entries.on_device, entries.idle, entries.hosted):
        assert index.keys() <= entries.by_digest.keys(), "a list names an adapter that is forgotten"
