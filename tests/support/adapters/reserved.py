"""What reservations keep on the device, worked out from what the cache reports alone."""

from __future__ import annotations

from loraplex.adapters.cache.adapter_cache import AdapterCache
from loraplex.adapters.ref import AdapterRef
from support.adapters.cache_fakes import FakeImage


def kept_by_reservations(cache: AdapterCache[FakeImage], ref: AdapterRef, num_pages: int) -> set[str]:
    """The adapters of other tenants that may not leave for this one, of `num_pages`: all of a tenant that has no more
    on the device than it has reserved, if all reservations can be kept."""
    entries, usage = cache.entries(), cache.usage()
    pinned = [entry for entry in entries if entry.pinned and entry.pages]
    unpinned = usage.num_arena_pages - sum(entry.pages for entry in pinned)
    kept: set[str] = set()
    for tenant, held in cache.tenants.tenant_bytes().items():
        reserved = cache.tenants.limits(tenant).device_bytes_reserved or 0
        if tenant != ref.tenant_id and held.device <= reserved:
            kept |= {e.ref.digest for e in entries if e.state == "hot" and e.ref.tenant_id == tenant}
    pages = sum(entry.pages for entry in entries if entry.ref.digest in kept)
    too_many = pages > unpinned // 2 or len(kept) > (usage.num_adapter_slots - len(pinned)) // 2
    return set() if too_many or num_pages + pages > unpinned else kept
