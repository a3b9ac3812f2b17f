"""Adapter memory that is reserved for a tenant, and its cap.

An adapter on the device counts for the tenant whose request had it copied there, and one in host memory for the tenant
whose request had it loaded, until it leaves: two tenants may have uploaded the same bytes. No torch.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Generic

from loraplex.adapters.cache.entries import CachedAdapter, CachedAdapters, Stage
from loraplex.adapters.cache.pins import Pins
from loraplex.adapters.cache.residency import ImageT
from loraplex.adapters.ref import AdapterRef


@dataclass(frozen=True, slots=True)
class MemoryLimits:
    """Bytes; None is no limit. `device_bytes_reserved`: as much of the tenant's recently used adapters as this is not
    evicted from the device for other tenants."""

    device_bytes_reserved: int | None = None
    device_bytes_max: int | None = None
    host_bytes_max: int | None = None


NO_MEMORY_LIMITS = MemoryLimits()


@dataclass(frozen=True, slots=True)
class TenantBytes:
    """Memory that a tenant's adapters take now."""

    device: int = 0
    host: int = 0


class TenantMemory(Generic[ImageT]):
    """The limits of the tenants that have any, as they were last set.

    Reservations hold at most half of the pages and slots that are not pinned, however large they are: the most recently
    used adapters of all tenants with one. They also yield to an adapter that would not fit beside them. So pins and
    reservations together leave room for every adapter that could be served without them.
    """

    def __init__(self, entries: CachedAdapters[ImageT], pins: Pins) -> None:
        self._entries = entries
        self._pins = pins
        self._limits: dict[str, MemoryLimits] = {}
        self._reserving: dict[str, int] = {}
        self.host_caps: dict[str, int] = {}

    def set_limits(self, tenant_id: str, limits: MemoryLimits) -> None:
        """From now on. Nothing is evicted for it before the next copy or load."""
        if self.limits(tenant_id) == limits:
            return
        for kept in (self._limits, self._reserving, self.host_caps):
            kept.pop(tenant_id, None)
        if limits == NO_MEMORY_LIMITS:
            return
        self._limits[tenant_id] = limits
        if limits.device_bytes_reserved:
            self._reserving[tenant_id] = limits.device_bytes_reserved
        if limits.host_bytes_max is not None:
            self.host_caps[tenant_id] = limits.host_bytes_max

    def limits(self, tenant_id: str) -> MemoryLimits:
        return self._limits.get(tenant_id, NO_MEMORY_LIMITS)

    def refusal(self, ref: AdapterRef) -> str:
        """Why an adapter in host memory cannot be copied for its tenant, even if no adapter were in use: it is above
        the cap, or pins and hung copies hold too much of that. Empty if it can, or its size is not known yet."""
        entry, most = self._entries.get(ref.digest), self.limits(ref.tenant_id).device_bytes_max
        if entry is None or entry.stage is not Stage.HOST or most is None:
            return ""
        kept = [*self._entries.stuck, *(self._entries.by_digest[digest] for digest in self._pins.held)]
        held = sum(other.num_bytes for other in kept if other.device_tenant == ref.tenant_id)
        if entry.num_bytes + held <= most:
            return ""
        message = (
            f"it does not fit: it needs {entry.num_bytes} bytes; the tenant's device_bytes_max is {most}"
        )
        return f"{message}, and {held} of them are pinned" if held else message

    def is_at_cap(self, ref: AdapterRef) -> bool:
        """Whether an adapter in host memory has to wait until another one of its tenant leaves the device."""
        entry = self._entries.get(ref.digest)
        if entry is None or entry.stage is not Stage.HOST:
            return False
        return self.excess(ref.tenant_id, entry.num_bytes) > 0

    def that_make_way(self, ref: AdapterRef) -> set[str]:
        """The adapters on the device, in use or not, that could be evicted for this one if they were not in use."""
        on_device, held = self._entries.on_device, self._pins.held
        if self.is_at_cap(ref):
            return {
                digest
                for digest, entry in on_device.items()
                if entry.device_tenant == ref.tenant_id and digest not in held
            }
        used: Counter[str] = Counter()
        for entry in on_device.values():
            used[entry.device_tenant] += entry.num_bytes
        kept = {tenant for tenant, reserved in self._reserving.items() if used[tenant] <= reserved}
        kept.discard(ref.tenant_id)
        return {
            digest
            for digest, entry in on_device.items()
            if entry.device_tenant not in kept and digest not in held
        }

    def excess(self, tenant_id: str, num_bytes: int) -> int:
        """Bytes of the tenant's adapters that must leave the device before one of this size may be copied; 0 or less if
        none must."""
        most = self.limits(tenant_id).device_bytes_max
        return 0 if most is None else self._device_bytes(tenant_id) + num_bytes - most

    def _device_bytes(self, tenant_id: str) -> int:
        """Hung copies count as well: they may still write."""
        entries = self._entries
        held = (*entries.on_device.values(), *entries.copying.values(), *entries.stuck)
        return sum(entry.num_bytes for entry in held if entry.device_tenant == tenant_id)

    def reserved_from(self, tenant_id: str, num_pages: int = 0) -> set[str]:
        """The unused adapters on the device that reservations keep, if this tenant asks for `num_pages`."""
        left = {other: reserved for other, reserved in self._reserving.items() if other != tenant_id}
        kept: set[str] = set()
        if not left:
            return kept
        entries, held = self._entries, self._pins.held
        for digest, entry in entries.on_device.items():
            if digest not in entries.idle and entry.device_tenant in left:
                left[entry.device_tenant] -= entry.num_bytes
        pages = self.reservable_pages
        slots = (entries.num_slots - len(held)) // 2
        kept_pages = 0
        for digest, entry in reversed(entries.idle.items()):
            fits = kept_pages + entry.num_pages <= pages and len(kept) < slots
            if fits and 0 < entry.num_bytes <= left.get(entry.device_tenant, 0):
                left[entry.device_tenant] -= entry.num_bytes
                kept_pages += entry.num_pages
                kept.add(digest)
        if num_pages + kept_pages > entries.num_pages - sum(held.values()):
            return set()
        return kept

    @property
    def reservable_pages(self) -> int:
        """Pages that all reservations together hold at most."""
        return (self._entries.num_pages - sum(self._pins.held.values())) // 2

    @property
    def reservable_bytes(self) -> int:
        """The same in bytes; 0 before an adapter has been loaded, which tells the size of a page."""
        return self.reservable_pages * self._entries.page_bytes

    @property
    def reserved_bytes(self) -> int:
        """Bytes that all reservations together ask for."""
        return sum(self._reserving.values())

    def capped_host_bytes(self) -> dict[str, int]:
        """Host memory of each tenant that has a cap on it."""
        held = dict.fromkeys(self.host_caps, 0)
        for entry in self._entries.hosted.values() if held else ():
            if entry.host_tenant in held:
                held[entry.host_tenant] += entry.num_bytes
        return held

    def over_host_cap(self) -> list[CachedAdapter[ImageT]]:
        """The images that take tenants over their caps, the least recently used ones of each tenant."""
        excess = {tenant: -cap for tenant, cap in self.host_caps.items()}
        for entry in self._entries.hosted.values():
            if entry.host_tenant in excess:
                excess[entry.host_tenant] += entry.num_bytes
        found = []
        for entry in self._entries.hosted.values():
            if excess.get(entry.host_tenant, 0) > 0:
                excess[entry.host_tenant] -= entry.num_bytes
                found.append(entry)
        return found

    def tenant_bytes(self) -> dict[str, TenantBytes]:
        """Memory by tenant, for tenants that have any."""
        device: Counter[str] = Counter()
        host: Counter[str] = Counter()
        for entry in (*self._entries.by_digest.values(), *self._entries.stuck):
            if entry.pages:
                device[entry.device_tenant] += entry.num_bytes
            if entry.image is not None:
                host[entry.host_tenant] += entry.num_bytes
        return {tenant: TenantBytes(device[tenant], host[tenant]) for tenant in device.keys() | host.keys()}
