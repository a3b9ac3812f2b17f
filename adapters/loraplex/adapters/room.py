"""Who has to go so that another may come: room on the device and in host memory.

Both are made at the cost of what was used longest ago, and both spare what the scheduling pass under way has asked
for. Nothing moves an adapter from here but out of host memory; what comes is begun by `cache`. No torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic

from loraplex.adapters.pins import Pins
from loraplex.adapters.residency import ImageT
from loraplex.adapters.residents import Resident, Residents, Stage


class Pass:
    """The scheduling pass under way: its `number`, and the `digests` that it has asked for."""

    def __init__(self) -> None:
        self.number = 0
        self.digests: dict[str, None] = {}

    def begin(self) -> None:
        self.number += 1
        self.digests.clear()

    def wants(self, entry: Resident[ImageT]) -> bool:
        return entry.wanted_in == self.number


class DeviceRoom(Generic[ImageT]):
    """Pages and slots. Held for good are those of pins and of copies that hang."""

    def __init__(self, residents: Residents[ImageT], pins: Pins, current: Pass) -> None:
        self._residents = residents
        self._pins = pins
        self._pass = current

    def is_free(self, num_pages: int) -> bool:
        """Whether an adapter of so many pages fits in without anybody's going."""
        return bool(self._residents.free_slots) and num_pages <= len(self._residents.free_pages)

    def victims(
        self, entry: Resident[ImageT], may_evict: Callable[[str], bool]
    ) -> list[Resident[ImageT]] | None:
        """Whom to evict so that `entry` fits, the least recently used first; None if that is not enough."""
        pages = len(self._residents.free_pages)
        slots = len(self._residents.free_slots)
        victims: list[Resident[ImageT]] = []
        idle = iter(self._residents.idle.values())
        while pages < entry.num_pages or slots < 1:
            victim = next(idle, None)
            if victim is None:
                return None
            spared = self._pass.wants(victim) or victim.safe_until >= self._pass.number
            if not spared and may_evict(victim.ref.digest):
                victims.append(victim)
                pages += victim.num_pages
                slots += 1
        return victims

    def why_never(self, digest: str, num_pages: int) -> str:
        """Why an adapter of so many pages could not be copied even if no adapter were in use: for what is pinned, and
        for copies that hang. Empty if it could."""
        kept = list(self._residents.stuck)
        kept += [self._residents.by_digest[other] for other in self._pins.held.keys() - {digest}]
        total = self._residents.num_pages
        room = total - sum(other.num_pages for other in kept)
        if num_pages > room:
            has = f"the device memory for adapters has {total}"
            if kept:
                has += f", and {total - room} of them are pinned"
            return f"it does not fit: it needs {num_pages} pages of device memory; {has}"
        if len(kept) >= self._residents.num_slots:
            return f"it does not fit: all {len(kept)} places on the device are pinned"
        return ""


class HostRoom(Generic[ImageT]):
    """Host memory: `limit` bytes for images, but for those that are on their way to the device."""

    def __init__(self, residents: Residents[ImageT], current: Pass, limit: int) -> None:
        self._residents = residents
        self._pass = current
        self.limit = limit
        self._full_in = -1  # the last pass that found it full

    def may_load(self) -> bool:
        """Whether another load may begin: not while images that can't be dropped now, or that are about to come,
        fill the host's share. Else adapters that wait for room on the device would push each other out of host
        memory and be read from disk over and over."""
        if self._full_in == self._pass.number:
            return False
        if (
            not self._residents.loading
            and not self._residents.copying
            and not any(map(self._waits, self._pass.digests))
        ):
            return True  # what only passes through may be larger than the share
        mean = self._residents.host_bytes // len(self._residents.hosted) if self._residents.hosted else 0
        used = mean * (len(self._residents.loading) + 1)
        used += sum(entry.num_bytes for entry in self._residents.copying.values())
        used += sum(
            self._residents.by_digest[digest].num_bytes
            for digest in self._pass.digests
            if self._waits(digest)
        )
        if used <= self.limit:
            return True
        self._full_in = self._pass.number
        return False

    def is_free(self) -> bool:
        """Whether one more image, of the usual size, would push none out."""
        hosted = len(self._residents.hosted)
        return not hosted or self._residents.host_bytes * (hosted + 1) <= self.limit * hosted

    def trim(self) -> None:
        """Drop images until the rest is within bounds: the least recently used first, and those that somebody
        waits for after all others. One of those stays, or an image larger than the bound could never pass."""
        if self._residents.host_bytes <= self.limit:
            return
        waiting = []
        for entry in list(self._residents.hosted.values()):
            if entry.stage is Stage.HOST and self._pass.wants(entry):
                waiting.append(entry)
            elif entry.stage is not Stage.COPYING:
                self._residents.drop_image(entry)
                if self._residents.host_bytes <= self.limit:
                    return
        for entry in waiting[:-1]:
            self._residents.drop_image(entry)
            if self._residents.host_bytes <= self.limit:
                return

    def _waits(self, digest: str) -> bool:
        entry = self._residents.get(digest)
        return entry is not None and entry.stage is Stage.HOST
