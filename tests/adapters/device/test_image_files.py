"""Laid-out adapters on the disk: an image comes back as it was, or it counts as absent."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from loraplex.adapters.admission.base_model import load_base_spec
from loraplex.adapters.device import image_files, transport
from loraplex.adapters.device.host_image import HostImage
from loraplex.adapters.device.host_slab import HostSlab, loose_pages
from loraplex.adapters.device.image_files import ImageFiles, image_key
from loraplex.adapters.device.layout import ArenaLayout
from loraplex.adapters.device.transport import ThreadedTransport
from loraplex.adapters.errors import LoadAbandoned
from loraplex.adapters.ref import AdapterRef
from loraplex.adapters.store.artifact_store import ArtifactStore
from loraplex.adapters.store.files import digest_upload
from loraplex.adapters.store.laid_out import remove_laid_out
from loraplex.kernels.lora.site_groups import SiteGroup
from support.adapters.drafts import ALL_SITES, TinyBase, draft_adapter, write_base
from support.adapters.lora_zoo import dirty_arena

ARCH = TinyBase()
GROUPS = (
    SiteGroup("qkv", ("q_proj", "k_proj", "v_proj"), 32, (32, 16, 16)),
    SiteGroup("o", ("o_proj",), 32, (32,)),
    SiteGroup("gate_up", ("gate_proj", "up_proj"), 32, (48, 48)),
    SiteGroup("down", ("down_proj",), 48, (32,)),
)
LAYOUT = ArenaLayout(GROUPS, ARCH.layers, torch.float32, max_rank=16, page_bytes=16 << 10)


class Shop:
    """A store and transports over it, with images in `folder`."""

    def __init__(self, root: Path, *, max_bytes: int = 1 << 20, key: str = "key") -> None:
        self.root = root
        self.folder = root / "images" / key
        self.store = ArtifactStore(root / "store")
        self.images = ImageFiles(root / "images", key, max_bytes)
        self.base = load_base_spec(write_base(root / "base", ARCH))
        self.slab = HostSlab(1 << 20, LAYOUT.page_bytes)
        self.woken = threading.Semaphore(0)
        self.transport = ThreadedTransport(
            self.store, self.base, dirty_arena(LAYOUT, 4, 2), self.slab, wake=self.woken.release,
            images=self.images,
        )  # fmt: skip

    def put(self, seed: int, **options: object) -> AdapterRef:
        files = draft_adapter(ARCH, seed=seed, **options).write(self.root / "made")  # type: ignore[arg-type]
        digest = digest_upload(files.config, files.tensors)
        with self.store.begin_staging() as staging:
            staging.config_path.write_bytes(files.config.read_bytes())
            staging.tensors_path.write_bytes(files.tensors.read_bytes())
            self.store.commit(staging, digest)
        return AdapterRef("tenant", f"adapter-{seed}", 1, digest, 8)

    def load(self, ref: AdapterRef) -> HostImage:
        ticket = self.transport.load(ref)
        assert self.woken.acquire(timeout=30)
        assert ticket.error is None, ticket.error
        return ticket.value

    def loaded(self, image: HostImage) -> None:
        """Tell its images that it was laid out."""
        assert self.transport.image_writer is not None
        self.transport.image_writer.loaded(image)

    def written(self) -> None:
        """Wait for the images that are being written."""
        assert self.transport.image_writer is not None
        assert self.transport.image_writer.wait_idle(30)

    def kept(self, ref: AdapterRef) -> bool:
        self.written()
        return (self.folder / ref.digest).is_file()


@pytest.fixture
def shop(tmp_path: Path) -> Shop:
    return Shop(tmp_path)


def same(one: HostImage, other: HostImage) -> bool:
    return (
        (one.digest, one.rank, one.num_pages) == (other.digest, other.rank, other.num_pages)
        and one.sites.tolist() == other.sites.tolist()
        and one.vectors.tolist() == other.vectors.tolist()
        and torch.equal(torch.cat(one.memory.runs), torch.cat(other.memory.runs))
    )


@pytest.mark.parametrize("dora", [False, True])
def test_the_third_load_reads_the_image_and_nothing_of_the_upload(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, dora: bool
) -> None:
    ref = shop.put(1, dora=dora)
    first = shop.load(ref)
    assert not shop.kept(ref), "adapters that are loaded once cost no write"
    shop.load(ref)
    assert shop.kept(ref)
    monkeypatch.setattr(transport, "build_image", None)  # laying out would fail
    assert same(shop.load(ref), first)


def test_a_load_tells_the_time_of_its_parts(shop: Shop) -> None:
    ref = shop.put(1)
    for parts in ({"fetch", "lay_out"}, {"fetch", "lay_out"}, {"fetch", "read"}):
        ticket = shop.transport.load(ref)
        assert shop.woken.acquire(timeout=30)
        assert set(ticket.seconds) == parts
        assert all(seconds >= 0 for seconds in ticket.seconds.values())
        shop.written()


def test_an_image_in_scattered_pages_comes_back(shop: Shop) -> None:
    """Pages of the slab are not adjacent once adapters have come and gone."""
    ref = shop.put(1, rank=16, targets=ALL_SITES)
    first = shop.load(ref)
    taken = [shop.slab.take(1) for _ in range(8)]
    for pages in taken[::2]:
        pages.release()
    again = shop.load(ref)
    assert len(again.memory.runs) > 1
    assert same(again, first)
    shop.written()
    assert same(shop.load(ref), first)


@pytest.mark.parametrize("where", [0, 40, 96, 100, 104, 108, 111, 112, 115, 120, -1])
def test_a_flipped_bit_makes_it_absent(shop: Shop, where: int) -> None:
    ref = shop.put(1)
    first = shop.load(ref)
    shop.load(ref)
    shop.written()
    path = shop.folder / ref.digest
    raw = bytearray(path.read_bytes())
    raw[where] ^= 0x80
    path.write_bytes(raw)
    free = shop.slab.num_free
    assert shop.images.read_image(ref.digest, shop.slab.take, lambda: True) is None
    assert shop.slab.num_free == free, "the memory of an image that was not read is lost"
    assert not path.exists()
    assert same(shop.load(ref), first)


@pytest.mark.parametrize("harm", ["cut", "longer", "another", "link", "folder"])
def test_what_is_no_image_of_this_adapter_counts_as_absent(shop: Shop, harm: str) -> None:
    ref, other = shop.put(1), shop.put(2)
    first = shop.load(ref)
    for one in (ref, other, other):
        shop.load(one)
    shop.written()
    path, whole = shop.folder / ref.digest, (shop.folder / ref.digest).read_bytes()
    match harm:
        case "cut":
            path.write_bytes(whole[:-5])
        case "longer":
            path.write_bytes(whole + b"\0")
        case "another":
            path.write_bytes((shop.folder / other.digest).read_bytes())
        case "link":
            path.unlink()
            path.symlink_to(shop.folder / other.digest)
        case "folder":
            path.unlink()
            path.mkdir()
    assert same(shop.load(ref), first)


def test_an_image_that_another_process_removes_meanwhile_is_still_read(shop: Shop) -> None:
    ref = shop.put(1)
    first = shop.load(ref)
    shop.load(ref)
    shop.written()
    free = shop.slab.num_free

    def wanted() -> bool:
        (shop.folder / ref.digest).unlink(missing_ok=True)
        return True

    image = shop.images.read_image(ref.digest, shop.slab.take, wanted)
    assert image is not None
    assert same(image, first)
    image.release()
    assert shop.slab.num_free == free


def test_an_image_of_a_lost_upload_is_not_served(shop: Shop) -> None:
    ref = shop.put(1)
    shop.load(ref)
    shop.load(ref)
    shop.written()
    shop.store.delete(ref.digest)
    ticket = shop.transport.load(ref)
    assert shop.woken.acquire(timeout=30)
    assert ticket.damaged


def test_the_limit_holds_and_the_least_recently_used_go(tmp_path: Path) -> None:
    size = 6 * LAYOUT.page_bytes
    shop = Shop(tmp_path, max_bytes=size)
    refs = [shop.put(seed) for seed in range(8)]
    images = [shop.load(ref) for ref in refs]
    for age, (ref, image) in enumerate(zip(refs, images, strict=True)):
        shop.loaded(image)
        if shop.kept(ref):
            os.utime(shop.folder / ref.digest, (age, age))
        if shop.kept(refs[0]):
            os.utime(shop.folder / refs[0].digest, (100, 100))
        assert sum(path.stat().st_size for path in shop.folder.iterdir()) <= size
    assert shop.kept(refs[0]), "it was used last"
    assert shop.kept(refs[-1])
    assert not shop.kept(refs[1])


def test_images_of_other_layouts_and_bases_are_not_found_and_age_out(tmp_path: Path) -> None:
    old = Shop(tmp_path / "a", key="old")
    ref = old.put(1)
    image = old.load(ref)
    old.load(ref)
    assert old.kept(ref)
    new = ImageFiles(old.root / "images", "new", image.num_bytes)
    assert new.read_image(ref.digest, old.slab.take, lambda: True) is None
    os.utime(old.folder / ref.digest, (1, 1))
    assert new.write(image, lambda: True)
    assert not old.kept(ref)
    base = old.base.fingerprint
    other = ArenaLayout(GROUPS, ARCH.layers, torch.bfloat16, max_rank=16, page_bytes=16 << 10)
    larger = ArenaLayout(GROUPS, ARCH.layers, torch.float32, max_rank=16, page_bytes=32 << 10)
    keys = {
        image_key(LAYOUT, base),
        image_key(LAYOUT, "f" * 64),
        image_key(other, base),
        image_key(larger, base),
    }
    assert len(keys) == 4
    assert image_key(LAYOUT, base) in keys


def test_a_disk_without_room_keeps_nothing_and_fails_nothing(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    ref = shop.put(1)
    monkeypatch.setattr(image_files, "MIN_FREE_BYTES", 1 << 62)
    for _ in range(3):
        shop.load(ref)
    assert not shop.kept(ref)
    shop.folder.rmdir()
    shop.folder.write_bytes(b"not a folder")
    shop.load(ref)
    shop.written()


def test_a_load_that_nobody_wants_gives_its_memory_back(shop: Shop) -> None:
    ref = shop.put(1)
    shop.load(ref)
    shop.load(ref)
    shop.written()
    free = shop.slab.num_free
    with pytest.raises(LoadAbandoned):
        shop.images.read_image(ref.digest, shop.slab.take, lambda: False)
    assert shop.slab.num_free == free
    assert shop.images.read_image(ref.digest, lambda n: loose_pages(n, 512), lambda: True) is None


class SlowFiles(ImageFiles):
    """A disk on which each half MiB, and each image, waits for the test."""

    def __init__(self, root: Path) -> None:
        super().__init__(root / "images", "key", 1 << 20)
        self.begun, self.goes_on = threading.Event(), threading.Event()

    def write(self, image: HostImage, goes_on: Callable[[], bool]) -> bool:
        self.begun.set()
        assert self.goes_on.wait(30)
        return super().write(image, goes_on)


@pytest.fixture
def slow(shop: Shop) -> Shop:
    assert shop.transport.image_writer is not None
    shop.images = shop.transport.image_writer._files = SlowFiles(shop.root)
    return shop


def test_no_load_waits_for_a_write(slow: Shop) -> None:
    """The second load ends, and the third and others are not held up, while the disk takes nothing."""
    assert isinstance(slow.images, SlowFiles)
    ref, other = slow.put(1), slow.put(2)
    first = slow.load(ref)
    slow.load(ref)
    assert slow.images.begun.wait(30)
    for one in (ref, other, other):
        slow.load(one)
    slow.images.goes_on.set()
    assert slow.kept(ref)
    assert slow.kept(other)
    assert same(slow.load(ref), first)


def test_memory_that_is_given_back_is_not_written_and_waits_for_no_disk(slow: Shop) -> None:
    assert isinstance(slow.images, SlowFiles)
    ref = slow.put(1)
    free = slow.slab.num_free
    images = [slow.load(ref), slow.load(ref)]
    assert slow.images.begun.wait(30)
    for image in images:
        image.release()
    assert slow.slab.num_free == free
    slow.images.goes_on.set()
    assert not slow.kept(ref)
    assert not list(slow.folder.parent.glob("*/*"))


@pytest.mark.parametrize("when", ["before it is written", "between write and check"])
def test_no_image_of_a_deleted_version_stays(slow: Shop, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    """A deletion removes the upload, and then its images."""
    ref = slow.put(1)
    images = slow.images
    assert isinstance(images, SlowFiles)

    def delete() -> None:
        slow.store.delete(ref.digest)
        remove_laid_out(slow.root / "images", ref.digest)

    if when == "between write and check":
        holds = slow.store.holds
        monkeypatch.setattr(slow.store, "holds", lambda digest: (delete(), holds(digest))[1])
    slow.load(ref)
    slow.load(ref)
    assert images.begun.wait(30)
    if when == "before it is written":
        delete()
    images.goes_on.set()
    assert not slow.kept(ref)


def test_a_copy_of_memory_that_is_released_meanwhile_keeps_it_until_it_is_made(shop: Shop) -> None:
    """The memory must not be another's while it is read."""
    pages = shop.slab.take(2)
    free = shop.slab.num_free
    pages.runs[0].fill_(7)
    part = pages.runs[0].numpy().reshape(-1).view(ReleasingArray)
    part.on_copy = lambda: (pages.release(), seen.append(shop.slab.num_free))
    seen: list[int] = []
    copied = pages.copy_out(part)
    assert copied is not None
    assert set(bytes(copied)) == {7}
    assert seen == [free], "it was given away while it was read"
    assert shop.slab.num_free == free + 2
    assert pages.copy_out(part) is None


class ReleasingArray(np.ndarray):  # type: ignore[type-arg]
    """Something happens while it is copied."""

    on_copy: Callable[[], object]

    def copy(self, order: Any = "C") -> Any:
        self.on_copy()
        return np.array(self)
