"""The tiers below host memory in a random history: uploads in a store, and laid-out copies of them on a disk.

The copies are real files of the real `ImageFiles`, in pages of `PAGE_BYTES`, so that flipped bits, torn files and files
of another adapter meet the real checks. The store is a model: it may be damaged, unreachable or silent for a while.
Both outlive the engine. What a page holds names the upload that it was made of, and the fake runner reads it.
"""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from loraplex.adapters.cache.adapter_cache import AdapterCache, Residency
from loraplex.adapters.cache.residency import Ticket
from loraplex.adapters.device.host_image import HostImage
from loraplex.adapters.device.host_slab import HostPages
from loraplex.adapters.device.image_files import ImageFiles
from loraplex.adapters.ref import AdapterRef
from loraplex.adapters.store.laid_out import keep_laid_out, remove_laid_out
from support.adapters.cache_fakes import PAGE_BYTES, FakeImage
from support.adapters.reserved import kept_by_reservations
from support.engine.fake_runner import GARBAGE, adapter_mark
from support.engine.fake_transport import FakeTransport, Fate
from support.simulator.world import World

DIGEST_BYTES = 32
MAX_IMAGES = 6


class Disk:
    """The uploads, by digest whether their bytes are `whole`, and the folder of laid-out copies."""

    def __init__(self, digests: list[str], rng: random.Random) -> None:
        self.whole = dict.fromkeys(digests, True)
        self._rng = rng
        self._max_bytes = rng.choice((2, MAX_IMAGES, 100)) * PAGE_BYTES
        self._folder: Path | None = None  # most histories need none

    def open_images(self) -> ImageFiles:
        """As an engine does when it starts: what is of no upload is removed."""
        if self._folder is None:
            return ImageFiles(self._made_folder(), "key", self._max_bytes)
        keep_laid_out(self._folder, self.whole.keys())
        return ImageFiles(self._folder, "key", self._max_bytes)

    def _made_folder(self) -> Path:
        self._folder = Path(tempfile.mkdtemp(prefix="loraplex-sim-"))
        return self._folder

    def copies(self) -> list[Path]:
        return [] if self._folder is None else sorted(self._folder.glob("key/[0-9a-f]*"))

    def delete(self, digest: str) -> None:
        del self.whole[digest]
        if self._folder is not None:
            remove_laid_out(self._folder, digest)

    def damage_copy(self) -> str:
        """Flip a bit of a laid-out copy, cut it short, or put another adapter's in its place. Returns what was done."""
        copies = self.copies()
        if not copies:
            return ""
        path = self._rng.choice(copies)
        data = bytearray(path.read_bytes() or b"\0")  # it may have been cut to nothing before
        match self._rng.randrange(3):
            case 0:
                place = self._rng.randrange(len(data))
                data[place] ^= 1 << self._rng.randrange(8)
            case 1:
                del data[self._rng.randrange(len(data)) :]
            case _:
                data = bytearray(self._rng.choice(copies).read_bytes())
        path.write_bytes(data)
        return f"the laid-out copy of {path.name[:6]} is damaged"

    def close(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder)


class StoredImage(FakeImage):
    """An image in host memory, in pages of its own. `on_release` is called once."""

    def __init__(self, image: HostImage, on_release: Callable[[], None]) -> None:
        super().__init__(image.digest, image.num_pages)
        self._image = image
        self._on_release = on_release

    @property
    def mark(self) -> int:
        """Whose bytes its pages hold."""
        pages = [bytes(page) for page in self._image.memory.runs[0].numpy()]
        is_whole = all(page == _page_of(pages[0]) for page in pages)
        return adapter_mark(pages[0][:DIGEST_BYTES].hex()) if is_whole else GARBAGE

    def release(self) -> None:
        super().release()
        self._image.release()
        self._on_release()


class TieredTransport(FakeTransport):
    """Loads read laid-out copies, else uploads, and write a copy of the latter. `live_bytes` of images were handed out
    and not given back. `damaged` are the digests of failed loads that the cache has to report."""

    def __init__(
        self,
        clock: Callable[[], float],
        num_pages: int,
        num_pages_of: Callable[[str], int],
        load_fate: Callable[[str], Fate],
        copy_fate: Callable[[str], Fate],
        disk: Disk,
        usable_at: Callable[[], float],
    ) -> None:
        super().__init__(clock, num_pages, num_pages_of, load_fate, copy_fate, usable_at)
        self._disk = disk
        self._images = disk.open_images()
        self.live_bytes = 0
        self.num_from_copies = 0
        self.damaged: set[str] = set()

    def load(self, ref: AdapterRef) -> Ticket[FakeImage]:
        self.num_loads += 1
        cancelled: list[bool] = []
        ticket: Ticket[FakeImage] = Ticket(
            lambda: cancelled.append(True), discard=lambda image: image.release()
        )

        def done() -> None:
            image = self._read(ref.digest)
            if image is not None:
                ticket.succeed(image)
                return
            ticket.fail("its bytes are damaged or lost", damaged=True)
            if not cancelled:
                self.damaged.add(ref.digest)

        self._schedule(self.load_fate(ref.digest), done, ticket)
        return ticket

    def mark_of(self, image: FakeImage) -> int:
        assert isinstance(image, StoredImage)
        return image.mark

    def _read(self, digest: str) -> FakeImage | None:
        """As `ThreadedTransport` does it; None where the upload is damaged or gone."""
        if digest not in self._disk.whole:
            return None
        image = self._images.read_image(digest, _pages, lambda: True)
        if image is not None:
            self.num_from_copies += 1
        elif self._disk.whole[digest]:
            image = _laid_out(digest, self.num_pages_of(digest))
            self._images.write(image, lambda: True)
        else:
            return None
        num_bytes = image.num_bytes
        self.live_bytes += num_bytes
        return StoredImage(image, lambda: self._given_back(num_bytes))

    def _given_back(self, num_bytes: int) -> None:
        self.live_bytes -= num_bytes


class WatchedCache(AdapterCache[FakeImage]):
    """Notes in `complaints` where a request makes an adapter leave that a reservation or a pin keeps."""

    def __init__(
        self,
        transport: TieredTransport,
        *,
        num_slots: int,
        host_pages: int,
        load_timeout_s: float,
        world: World,
    ) -> None:
        super().__init__(
            transport=transport,
            num_pages=transport.num_pages,
            num_slots=num_slots,
            host_bytes=host_pages * PAGE_BYTES,
            load_timeout_s=load_timeout_s,
            clock=transport.clock,
        )
        self._world = world
        self.complaints: list[str] = []

    def request(
        self,
        ref: AdapterRef,
        may_evict: Callable[[str], bool] = lambda digest: True,
        lead_s: Callable[[], float] = lambda: 0.0,
    ) -> Residency:
        if ref.digest in self.on_device:
            return super().request(ref, may_evict, lead_s)
        pinned = {digest for digest in self.on_device if self.is_held(digest)}
        reserved: set[str] = set()
        # Whose reservation an adapter of several tenants counts towards depends on who asked last.
        if self.tenants.reserved_bytes and self._world.shared.isdisjoint(self.on_device):
            reserved = kept_by_reservations(self, ref, self._world.sizes[ref.digest])
        residency = super().request(ref, may_evict, lead_s)
        for kept, why in ((pinned, "pinned"), (reserved, "reserved")):
            if gone := kept - self.on_device:
                names = sorted(digest[:6] for digest in gone)
                self.complaints.append(f"{names} left the device for {ref.tenant_id}, and are {why}")
        return residency


def _pages(num_pages: int) -> HostPages:
    return HostPages([torch.empty(num_pages, PAGE_BYTES, dtype=torch.uint8)])


def _page_of(content: bytes) -> bytes:
    """A page of an adapter: its digest, over and over."""
    return (content[:DIGEST_BYTES] * (PAGE_BYTES // DIGEST_BYTES + 1))[:PAGE_BYTES]


def _laid_out(digest: str, num_pages: int) -> HostImage:
    memory = _pages(num_pages)
    memory.runs[0].numpy()[:] = np.frombuffer(_page_of(bytes.fromhex(digest)), np.uint8)
    return HostImage(digest, 8, memory, np.zeros((1, 5), np.int32))
