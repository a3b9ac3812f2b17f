"""Prefixes on a disk that is full, read-only or gone, of a process that is killed, or with links in it: a miss or a
refused write, and never another's bytes."""

from __future__ import annotations

import errno
import os
import random
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue

import pytest

from loraplex.engine.kv.disk_files import DiskStoreError, DiskStoreHeld, DiskStoreUnusable
from loraplex.engine.types import BlockKey
from support.faults.disk_blocks import ON_DISK, Open, content, files, key, stores, write
from support.faults.small_disk import SmallDisk, small_disk

TESTS = Path(__file__).parents[2]


@pytest.fixture
def reopen(tmp_path: Path) -> Iterator[Open]:
    with stores(tmp_path / "kv") as opened:
        yield opened


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    with small_disk(tmp_path / "disk", 1 << 20) as mounted:
        yield mounted


KILLED = """
import hashlib, os, random, signal, sys, time
from pathlib import Path
from loraplex.engine.kv.disk_store import DiskStore
from support.faults.disk_blocks import content, files, key, write
directory, first, last, secret = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4].encode() or None
BLOCK_BYTES = 200_000

def opened():
    return DiskStore(directory, max_bytes=6 * 204_800, block_bytes=BLOCK_BYTES, build=b"1", secret=secret)

def run(store, rng):
    while True:
        one = rng.choice(keys)
        action = rng.random()
        if action < 0.1:
            store.erase_version("a", "d")
            store.sweep()
        elif action < 0.3:
            store.read(one)
        else:
            store.write(one, memoryview(whole[one]))

def die_before(number):
    def count(event, _):
        nonlocal number
        if event in ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.utime", "os.scandir"):
            number -= 1
            if number < 0:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(count)

keys = [key(tenant, digest, number) for tenant in "ab" for digest in (None, "d") for number in range(4)]
whole = {one: content(one, BLOCK_BYTES) for one in keys}
found = 0
for seed in range(first, last):
    rng = random.Random(seed)
    child = os.fork()
    if not child:
        if seed % 2:
            die_before(rng.randrange(300))
        run(opened(), rng)
    if seed % 2 == 0:
        time.sleep(rng.random() * 0.02)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL, status
    store = opened()
    left = files(directory)
    assert not (directory / "unfinished").exists()
    assert store.counts.blocks == len(left) <= 6, (store.counts, left)
    here = [one for one in keys if one in store]
    assert len(here) == len(left)
    for one in here:
        assert store.read(one) == whole[one]
    assert store.counts.damaged == 0, store.counts
    found += len(here)
    store.close()
print(found)
"""


def kill(directory: Path, seeds: range, secret: str) -> int:
    """Blocks that were found after kills."""
    command = [sys.executable, "-c", KILLED, str(directory), str(seeds.start), str(seeds.stop), secret]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(TESTS)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.parametrize("secret", ["", "of the operator"])
def test_kills_leave_whole_blocks(tmp_path: Path, secret: str) -> None:
    """Half of them before a call of the system, half after some time."""
    assert kill(tmp_path / "kv", range(60), secret) > 60


@pytest.mark.soak
@pytest.mark.parametrize("secret", ["", "of the operator"])
def test_many_kills_leave_whole_blocks(tmp_path: Path, secret: str) -> None:
    assert kill(tmp_path / "kv", range(1000, 1200), secret) > 200


def test_a_full_disk_refuses_and_still_reads(reopen: Open, disk: SmallDisk) -> None:
    store = reopen(disk.root / "kv")
    keys = [key("a", "d", number) for number in range(40)]
    assert all(write(store, one) for one in keys[:10])
    for free in (0, 4096):
        disk.leave(free)
        for one in keys[10:15]:
            write(store, one)
        assert write(store, key("b", None, 0)) is False  # its folder and ids have no room either
        assert store.counts.refused["full"] >= 5
        assert all(store.read(one) == content(one) for one in keys[:10])
    disk.empty()
    assert all(write(store, one) for one in keys)
    assert write(store, key("b", None, 0))
    assert all(store.read(one) == content(one) for one in keys)
    store = reopen(disk.root / "kv")
    assert store.find([*keys, key("b", None, 0)]) == [*keys, key("b", None, 0)]
    assert not (disk.root / "kv" / "unfinished").exists()
    disk.leave(0)
    full = reopen(disk.root / "kv", blocks=20)
    assert full.counts.blocks == 20
    assert write(full, keys[0])  # in the room of another


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EMFILE])
def test_whatever_call_fails_nothing_is_raised(
    reopen: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    rng = random.Random(number)
    keys = [key(tenant, "d", each) for tenant in "ab" for each in range(6)]
    for name in ("open", "mkdir", "rename", "unlink", "rmdir", "utime", "read", "dup"):
        directory = tmp_path / name
        store, call, countdown = reopen(directory, blocks=8), getattr(os, name), 0

        def fail(*given: object, call: Callable[..., object] = call, **more: object) -> object:
            nonlocal countdown
            countdown -= 1
            if countdown % 3 == 0:
                raise OSError(number, os.strerror(number))
            return call(*given, **more)

        with monkeypatch.context() as patch:
            patch.setattr(os, name, fail)
            for _ in range(100):
                one, action = rng.choice(keys), rng.random()
                countdown = rng.randrange(20)
                if action < 0.1:
                    store.erase_tenant(one[0][0])
                    store.sweep()
                elif action < 0.5:
                    assert store.read(one) in (content(one), None)
                else:
                    assert write(store, one) or one not in store
        if name in ("open", "rename"):
            assert store.counts.refused["full" if number in (errno.ENOSPC, errno.EDQUOT) else "error"]
        if number == errno.EMFILE:
            assert store.counts.damaged == 0
        store.sweep()
        assert store.counts.num_bytes == ON_DISK * store.counts.blocks == ON_DISK * len(files(directory))
        here = {one for one in keys if one in store}
        for one in here:
            assert store.read(one) == content(one)
        store = reopen(directory, blocks=8)
        assert {one for one in keys if one in store} == here


def test_a_disk_that_became_read_only(
    reopen: Open, disk: SmallDisk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = reopen(disk.root / "kv", blocks=4)
    keys = [key(f"t{number}", "d", number) for number in range(8)]
    for one in keys[:4]:
        assert write(store, one)
    opened = os.open

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    def open_to_read(path: str, flags: int, *more: int, dir_fd: int | None = None) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            refuse()
        return opened(path, flags, *more, dir_fd=dir_fd)

    with monkeypatch.context() as patch:  # the kernel does it after an error, whatever files are open
        patch.setattr(os, "open", open_to_read)
        for name in ("mkdir", "rename", "unlink", "rmdir", "utime"):
            patch.setattr(os, name, refuse)
        assert not any(write(store, one) for one in keys[4:])
        assert store.counts.refused == {"error": 4}
        assert caplog.text.count("Read-only file system") == 1
        assert [store.read(one) for one in keys[1:4]] == [content(one) for one in keys[1:4]]
        assert store.counts.evicted == 1  # no second one while the first cannot be deleted
        store.erase_tenant("t1")
        store.sweep()
        assert store.read(keys[1]) is None
    store.close()
    for mode in ("ro", "rw"):
        subprocess.run(["mount", "-o", f"remount,{mode}", str(disk.root)], check=True)
        if mode == "ro":
            with pytest.raises(DiskStoreUnusable, match=r"kv cannot be used .Read-only file system.; give a"):
                reopen(disk.root / "kv")
    assert write(reopen(disk.root / "kv", blocks=4), keys[7])


def test_a_directory_that_vanished(reopen: Open, tmp_path: Path) -> None:
    store = reopen()
    keys = [key("a", "d", number) for number in range(4)]
    for one in keys[:2]:
        assert write(store, one)
    shutil.rmtree(tmp_path / "kv")
    assert [store.read(one) for one in keys[:2]] == [None, None]
    assert not any(write(store, one) for one in keys)
    assert (store.counts.damaged, store.counts.refused["error"]) == (2, 4)
    store.erase_tenant("a")
    store.sweep()
    assert store.counts.num_bytes == 0
    assert not (tmp_path / "kv").exists()
    assert write(reopen(), keys[0])
    shutil.rmtree(next((tmp_path / "kv").glob("*/*")))  # a tenant's folder alone
    store = reopen()
    assert write(store, keys[0])
    assert keys[0] in reopen()


def test_two_engines_do_not_share_a_directory(reopen: Open, tmp_path: Path) -> None:
    one = key("a", "d", 1)
    store = reopen()
    assert write(store, one)
    with (
        stores(tmp_path / "kv") as other,
        pytest.raises(DiskStoreHeld, match=r"another engine uses .*kv; stop"),
    ):
        other()
    assert store.read(one) == content(one)
    store.close()
    store.close()
    assert store.read(one) is None
    assert not write(store, key("a", "d", 2))
    store.sweep()
    with stores(tmp_path / "kv") as other:
        assert other().read(one) == content(one)


def test_what_a_power_loss_leaves_of_a_mark_is_no_wrong_secret(
    reopen: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced, sync = [], os.fsync

    def note(descriptor: int) -> None:
        synced.append(descriptor)
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    reopen()
    assert len(synced) == 2  # the file, and the folder that names it
    reopen().close()
    assert len(synced) == 2
    mark = tmp_path / "kv" / "mark"
    whole = mark.read_bytes()
    for left in (b"", whole[:20], whole[:-1], whole[:-32], bytes(len(whole))):
        mark.write_bytes(left)
        for secret in (None, b"of the operator"):
            with pytest.raises(DiskStoreUnusable, match=r"damaged, as by a power loss.*empty this one"):
                reopen(secret=secret)
    mark.write_bytes(whole)
    with pytest.raises(DiskStoreError, match="not encrypted") as refused:
        reopen(secret=b"of the operator")
    assert not isinstance(refused.value, DiskStoreUnusable)


def test_no_link_is_followed(reopen: Open, tmp_path: Path) -> None:
    one, outside = key("a", "d", 1), tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("kept")
    for depth in range(4):  # the block, its version, its tenant, its build
        directory = tmp_path / str(depth)
        store = reopen(directory)
        assert write(store, one)
        (path,) = files(directory)
        place = path if depth == 0 else path.parents[depth - 1]
        moved = place.rename(outside / f"{depth}")
        place.symlink_to(moved)
        left = {each: each.read_bytes() for each in outside.rglob("*") if each.is_file()}
        assert store.read(one) is None
        write(store, one)
        store.erase_tenant("a")
        store.sweep()
        store = reopen(directory)
        assert one not in store
        write(store, one)
        assert {each: each.read_bytes() for each in outside.rglob("*") if each.is_file()} == left
    for name in ("unfinished", "mark", "lock"):
        directory = tmp_path / name
        directory.mkdir()
        (directory / name).symlink_to(outside / "file")
        if name == "unfinished":
            assert write(reopen(directory), one)
        else:
            with pytest.raises(DiskStoreError, match="cannot be used"):
                reopen(directory)
        assert (outside / "file").read_text() == "kept"


def test_threads_find_nothing_foreign_and_nothing_erased(reopen: Open, tmp_path: Path) -> None:
    store, rng = reopen(blocks=10), random.Random(1)
    keys = [key(tenant, digest, number) for tenant in "abc" for digest in (None, "d") for number in range(4)]
    written: SimpleQueue[BlockKey | None] = SimpleQueue()
    asked: SimpleQueue[BlockKey | None] = SimpleQueue()
    wrong, read = list[BlockKey](), 0

    def write_all() -> None:
        while (one := written.get()) is not None:
            write(store, one)

    def read_all() -> None:
        nonlocal read
        while (one := asked.get()) is not None:
            found = store.read(one)
            read += found is not None
            wrong.extend([one] * (found not in (None, content(one))))

    threads = [threading.Thread(target=target) for target in (write_all, read_all)]
    for thread in threads:
        thread.start()
    for _ in range(3000):
        one = rng.choice(keys)
        written.put(one)
        asked.put(rng.choice(keys))
        if rng.random() < 0.01:
            store.erase_tenant(rng.choice("ab"))
    written.put(None)
    asked.put(None)
    for thread in threads:
        thread.join()
    for tenant in "abc":
        store.erase_tenant(tenant)
    store.sweep()
    assert (wrong, store.counts.damaged) == ([], 0)
    assert {*store.counts.refused} <= {"erased"}
    assert read > 10
    assert store.owners() == set()
    assert not [*(tmp_path / "kv").glob("*/*")]
