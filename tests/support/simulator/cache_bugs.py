"""Bugs to plant into the tiers of adapters: leases, pins, reservations, loads, copies, laid-out files, deletions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, BinaryIO

import pytest

from loraplex.adapters.cache.adapter_cache import AdapterCache, Lease
from loraplex.adapters.cache.entries import CachedAdapter, CachedAdapters
from loraplex.adapters.cache.eviction import DeviceEviction, HostEviction
from loraplex.adapters.cache.residency import Ticket
from loraplex.adapters.cache.tenant_memory import MemoryLimits, TenantMemory
from loraplex.adapters.device import image_files
from loraplex.adapters.device.image_files import ImageFiles


def lease_ignored_by_eviction(patch: pytest.MonkeyPatch) -> None:
    lease = CachedAdapters.lease

    def stay(self: CachedAdapters[Any], entry: CachedAdapter[Any], **options: bool) -> Lease:
        is_idle = entry.ref.digest in self.idle
        taken = lease(self, entry, **options)
        if is_idle:
            self.idle[entry.ref.digest] = entry
        return taken

    patch.setattr(CachedAdapters, "lease", stay)


def lease_on_the_pages_of_another_version(patch: pytest.MonkeyPatch) -> None:
    acquire = AdapterCache.acquire

    def wrong(self: AdapterCache[Any], digest: str, **options: bool) -> Lease:
        lease = acquire(self, digest, **options)
        lease.slot = max(entry.slot for entry in self._entries.on_device.values())
        return lease

    patch.setattr(AdapterCache, "acquire", wrong)


def adapter_leased_before_its_copy_is_done(patch: pytest.MonkeyPatch) -> None:
    copy = CachedAdapters.copy

    def early(
        self: CachedAdapters[Any], entry: CachedAdapter[Any], tenant_id: str, now: float, lead_s: float = 0.0
    ) -> None:
        copy(self, entry, tenant_id, now, lead_s)
        self.copied(entry, now, is_whole=True)
        self.make_idle(entry)

    patch.setattr(CachedAdapters, "copy", early)


def reservation_ignored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TenantMemory, "reserved_from", lambda self, tenant_id, num_pages=0: set())


def reservation_counted_twice(patch: pytest.MonkeyPatch) -> None:
    set_limits = TenantMemory.set_limits

    def twice(self: TenantMemory[Any], tenant_id: str, limits: MemoryLimits) -> None:
        """Each adapter is taken off its tenant's reservation twice."""
        set_limits(self, tenant_id, limits)
        if tenant_id in self._reserving:
            self._reserving[tenant_id] = (limits.device_bytes_reserved or 0) // 2

    patch.setattr(TenantMemory, "set_limits", twice)


def pinned_version_evicted(patch: pytest.MonkeyPatch) -> None:
    victims = DeviceEviction.victims

    def pinned_first(self: DeviceEviction[Any], *args: Any) -> list[CachedAdapter[Any]] | None:
        found = victims(self, *args)
        pinned = [self._entries.on_device.get(digest) for digest in self._pins.held]
        idle = [entry for entry in pinned if entry is not None and not entry.leases]
        return [*idle, *found] if found else found

    patch.setattr(DeviceEviction, "victims", pinned_first)


def hung_load_holds_its_place_without_end(patch: pytest.MonkeyPatch) -> None:
    poll = AdapterCache._poll_load

    def wait(self: AdapterCache[Any], entry: CachedAdapter[Any], now: float) -> None:
        if entry.load is not None and entry.load.done:
            poll(self, entry, now)

    patch.setattr(AdapterCache, "_poll_load", wait)


def pages_of_a_hung_copy_given_away(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CachedAdapters, "strand", CachedAdapters.remove_entry)


def image_given_back_while_it_is_copied(patch: pytest.MonkeyPatch) -> None:
    def trim(self: HostEviction[Any]) -> None:
        for entry in list(self._entries.copying.values()):
            if entry.image is not None and entry.image.is_live and self._entries.host_bytes > self.limit:
                entry.image.release()

    patch.setattr(HostEviction, "trim", trim)


def image_dropped_and_not_given_back(patch: pytest.MonkeyPatch) -> None:
    def forget(self: CachedAdapters[Any], entry: CachedAdapter[Any]) -> None:
        entry.image = None
        self.host_bytes -= entry.num_bytes

    patch.setattr(CachedAdapters, "_release_image", forget)


def image_of_an_abandoned_load_kept(patch: pytest.MonkeyPatch) -> None:
    succeed = Ticket.succeed

    def keep(self: Ticket[Any], value: Any) -> None:
        self._discard = None
        succeed(self, value)

    patch.setattr(Ticket, "succeed", keep)


def torn_laid_out_copy_accepted(patch: pytest.MonkeyPatch) -> None:
    no_sum = SimpleNamespace(update=lambda data: None, digest=lambda: bytes(32))
    patch.setattr(image_files, "hashlib", SimpleNamespace(sha256=lambda data: no_sum))


def laid_out_copy_of_another_adapter_accepted(patch: pytest.MonkeyPatch) -> None:
    read = image_files._read

    def whatever(file: BinaryIO, digest: str, *rest: Any) -> Any:
        file.seek(image_files._SUM_BYTES)
        name = file.read(64).decode()
        file.seek(0)
        return replace(read(file, name, *rest), digest=digest)

    patch.setattr(image_files, "_read", whatever)


def deleted_version_stays(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(AdapterCache, "drop", lambda self, digest: self.unpin(digest))


def damage_not_told(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(AdapterCache, "take_damaged", lambda self: ())


def damaged_copy_ends_its_load(patch: pytest.MonkeyPatch) -> None:
    read_image = ImageFiles.read_image

    def lose(self: ImageFiles, digest: str, *rest: Any) -> Any:
        was_there = (self._folder / digest).exists()
        image = read_image(self, digest, *rest)
        if image is None and was_there:
            raise OSError("the laid-out copy is damaged")
        return image

    patch.setattr(ImageFiles, "read_image", lose)


CACHE_BUGS: tuple[Callable[[pytest.MonkeyPatch], None], ...] = (
    lease_ignored_by_eviction,
    lease_on_the_pages_of_another_version,
    adapter_leased_before_its_copy_is_done,
    reservation_ignored,
    reservation_counted_twice,
    pinned_version_evicted,
    hung_load_holds_its_place_without_end,
    pages_of_a_hung_copy_given_away,
    image_given_back_while_it_is_copied,
    image_dropped_and_not_given_back,
    image_of_an_abandoned_load_kept,
    torn_laid_out_copy_accepted,
    laid_out_copy_of_another_adapter_accepted,
    deleted_version_stays,
    damage_not_told,
    damaged_copy_ends_its_load,
)
