"""Reports of the adapter cache: its versions and its counters. No torch."""

from __future__ import annotations

from collections.abc import Iterable

from loraplex.adapters.cache.background_loads import WARM_OUTCOMES, BackgroundLoads
from loraplex.adapters.cache.entries import CachedAdapters
from loraplex.adapters.cache.failures import Failures
from loraplex.adapters.cache.pins import Pins
from loraplex.adapters.cache.residency import CacheEntry, CacheUsage, ImageT


def list_entries(
    entries: CachedAdapters[ImageT], pins: Pins, failures: Failures, digests: Iterable[str] | None, now: float
) -> tuple[CacheEntry, ...]:
    """See `AdapterCache.entries`. Costs as much as `digests` are; all of them take milliseconds where there are
    thousands."""
    if digests is None:
        digests = dict.fromkeys((*entries.by_digest, *pins.refs, *failures.refs))
    listed = []
    for digest in digests:
        error, pinned = failures.message(digest) or None, digest in pins.refs
        entry = entries.get(digest)
        if entry is not None:
            listed.append(entry.shown(now, pinned=pinned, error=error))
        elif (ref := pins.refs.get(digest) or failures.ref(digest)) is not None:
            listed.append(CacheEntry(ref, "cold", pinned=pinned, error=error))
    return tuple(listed)


def count_usage(
    entries: CachedAdapters[ImageT],
    pins: Pins,
    failures: Failures,
    background: BackgroundLoads[ImageT],
    host_limit: int,
    now: float,
) -> CacheUsage:
    """The cache's gauges now and its counters so far. `host_limit` is in bytes, `now` the cache's clock."""
    return CacheUsage(
        num_arena_pages=entries.num_pages,
        num_arena_pages_used=entries.num_pages - len(entries.free_pages),
        num_adapter_slots=entries.num_slots,
        num_adapter_slots_used=entries.num_slots - len(entries.free_slots),
        host_bytes=host_limit,
        host_bytes_used=entries.host_bytes,
        num_leases=entries.num_leases,
        num_pins=len(pins.refs),
        num_pins_held=sum(digest in entries.on_device for digest in pins.held),
        num_pins_coming=sum(
            digest not in entries.on_device and not failures.message(digest) and pins.may_come(ref)
            for digest, ref in pins.refs.items()
        ),
        adapter_loads=entries.loads,
        adapter_load_failures=failures.count,
        adapter_copies=entries.copies,
        device_evictions=entries.device_evictions,
        host_evictions=entries.host_evictions,
        adapter_load_seconds=dict(entries.seconds),
        cap_evictions=dict(entries.cap_evictions),
        evictions={tier: dict(by_reason) for tier, by_reason in entries.evictions.items()},
        reloads=entries.recent.most(now),
        num_warming=background.num_warming,
        warmed={outcome: background.outcomes[outcome] for outcome in WARM_OUTCOMES},
    )
