"""Prefixes on the disk: found again with the same bytes and by their owner alone, bounded, and erased with it."""

from __future__ import annotations

import errno
import os
import random
import shutil
import stat
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from loraplex.adapters.errors import LoraplexError
from loraplex.engine.kv.disk_files import DiskFiles, DiskStoreError
from loraplex.engine.kv.disk_store import DiskStore
from loraplex.engine.types import BlockKey
from support.faults.disk_blocks import ON_DISK, Open, content, cut, files, flip_a_bit, key, stores, write

SECRETS = pytest.mark.parametrize("secret", [None, b"of the operator"], ids=["plain", "sealed"])


@pytest.fixture
def reopen(tmp_path: Path) -> Iterator[Open]:
    with stores(tmp_path / "kv") as opened:
        yield opened


class Model:
    """The keys of a store with room for `size` blocks, the least recently used first, and their files."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.keys: OrderedDict[BlockKey, Path] = OrderedDict()

    def remove(self, owned: Callable[[BlockKey], bool]) -> None:
        for one in [one for one in self.keys if owned(one)]:
            del self.keys[one]

    def make_room(self, tenant: str) -> None:
        own = [one for one in self.keys if one[0][0] == tenant]
        if len(own) >= max(1, self.size // 2):
            del self.keys[own[0]]
        elif len(self.keys) == self.size:
            self.keys.popitem(last=False)


@SECRETS
@pytest.mark.parametrize(
    "seed", [*range(4), *(pytest.param(n, marks=pytest.mark.soak) for n in range(4, 100))]
)
def test_histories_agree_with_a_model(reopen: Open, tmp_path: Path, secret: bytes | None, seed: int) -> None:
    rng = random.Random(seed)
    every = [
        key(tenant, digest, number) for tenant in "abc" for digest in (None, "d", "e") for number in range(4)
    ]
    for history in range(6):
        directory, size = tmp_path / str(history), rng.choice((1, 2, 5, 12))
        store, model, damaged = reopen(directory, blocks=size, secret=secret), Model(size), 0
        for _ in range(80):
            one, action = rng.choice(every), rng.random()
            if action < 0.04:
                store.erase_version(one[0][0], "d")
                model.remove(lambda other, tenant=one[0][0]: other[0] == (tenant, "d"))
            elif action < 0.06:
                store.erase_version(None, "e")
                model.remove(lambda other: other[0][1] == "e")
            elif action < 0.08:
                store.erase_tenant("b")
                model.remove(lambda other: other[0][0] == "b")
            elif action < 0.14:
                store.sweep()
                store, damaged = reopen(directory, blocks=size, secret=secret), 0
            elif action < 0.2 and model.keys:
                one = rng.choice([*model.keys])
                path = model.keys.pop(one)
                rng.choice((flip_a_bit, cut, Path.unlink))(path)
                damaged += 1
                assert store.read(one) is None
            elif action < 0.5:
                assert store.read(one) == (content(one) if one in model.keys else None)
                if one in model.keys:
                    model.keys.move_to_end(one)
            else:
                store.sweep()
                before = files(directory)
                assert write(store, one)
                if one not in model.keys:
                    model.make_room(one[0][0])
                    (model.keys[one],) = files(directory) - before
            assert [other for other in every if other in store] == [
                other for other in every if other in model.keys
            ]
            assert store.counts.blocks == len(model.keys)
            assert store.counts.damaged == damaged
            assert store.owners() == {other[0] for other in model.keys}
            assert len(files(directory)) * ON_DISK <= store.counts.num_bytes <= size * ON_DISK
        store.sweep()
        assert files(directory) == {*model.keys.values()}
        assert len([*directory.glob("*/*/*")]) == len(store.owners())


def test_the_longest_run_from_the_first_is_found(reopen: Open) -> None:
    store = reopen()
    keys = [key("a", "d", number) for number in range(5)]
    for number in (0, 1, 3):
        assert write(store, keys[number])
    assert store.find(keys) == keys[:2]
    assert store.find(keys[2:]) == []
    assert store.find(keys[3:]) == keys[3:4]
    assert store.find([]) == []


@SECRETS
def test_no_byte_of_a_file_can_change(reopen: Open, tmp_path: Path, secret: bytes | None) -> None:
    one, short = key("a", "d", 1), 40
    store = reopen(block_bytes=short, secret=secret)
    payload = memoryview(content(one, short))
    assert store.write(one, payload)
    (path,) = files(tmp_path / "kv")
    size = path.stat().st_size
    for place in range(size):
        flip_a_bit(path, place)
        assert store.read(one) is None
        assert one not in store
        assert store.counts.damaged == place + 1
        assert store.write(one, payload)
        assert store.read(one) == payload
    for length in (*range(size), size + 1):
        os.truncate(path, length)
        assert store.read(one) is None
        assert store.write(one, payload)
    for length in (0, size - 1, size + 1):
        os.truncate(path, length)
        store = reopen(block_bytes=short, secret=secret)
        assert (one in store, store.counts.damaged, path.exists()) == (False, 1, False)
        assert store.write(one, payload)


@SECRETS
def test_ids_that_cannot_be_read_lose_their_blocks(
    reopen: Open, tmp_path: Path, secret: bytes | None
) -> None:
    """Nobody could erase them."""
    one, other = key("a", "d", 1), key("b", "d", 1)
    store = reopen(secret=secret)
    assert write(store, one)
    (path,) = [path.with_name("owner") for path in files(tmp_path / "kv")]
    assert write(store, other)
    raw = path.read_bytes()
    for place in range(len(raw)):
        path.write_bytes(raw)
        flip_a_bit(path, place)
        store = reopen(secret=secret)
        assert (one in store, other in store, store.owners()) == (False, True, {other[0]})
        assert not path.parent.exists()
        assert store.counts.damaged == 1
        assert write(store, one)
        raw = path.read_bytes()
    path.unlink()  # as an erasure does, first of all
    store = reopen(secret=secret)
    assert (one in store, store.counts.damaged, path.parent.exists()) == (False, 0, False)


def test_a_deletion_that_is_cut_off_is_finished_at_the_next_start(
    reopen: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, other = reopen(), key("b", None, 1)
    assert write(store, other)
    for number in range(3):
        assert write(store, key("a", "d", number))
    store.erase_tenant("a")
    monkeypatch.setattr(os, "unlink", fail_after(2, os.unlink))  # the folder, which is none, and the ids
    store.sweep()
    monkeypatch.undo()
    assert len(files(tmp_path / "kv")) == 4
    store = reopen()
    assert (store.owners(), len(files(tmp_path / "kv")), store.counts.damaged) == ({other[0]}, 1, 0)


def fail_after(count: int, call: Callable[..., None]) -> Callable[..., None]:
    calls = iter(range(count))

    def limited(*given: object, **more: object) -> None:
        if next(calls, None) is None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        call(*given, **more)

    return limited


@SECRETS
def test_a_file_under_the_name_of_another_is_not_read(
    reopen: Open, tmp_path: Path, secret: bytes | None
) -> None:
    mine, next_of_mine, others = key("a", "d", 1), key("a", "d", 2), key("b", "d", 1)
    paths: dict[str, Path] = {}
    store = reopen(secret=secret)
    for name, one in (("mine", mine), ("next", next_of_mine), ("other", others)):
        before = files(tmp_path / "kv")
        assert write(store, one)
        (paths[name],) = files(tmp_path / "kv") - before
    store = reopen(build=b"another build", secret=secret)
    before = files(tmp_path / "kv")
    assert write(store, mine)
    (elsewhere,) = files(tmp_path / "kv") - before
    store = reopen(secret=secret)
    for source in (paths["next"], paths["other"], elsewhere):
        shutil.copy(source, paths["mine"])
        assert store.read(mine) is None
        assert write(store, mine)
        assert store.read(mine) == content(mine)
    shutil.rmtree(elsewhere.parents[2])
    shutil.copytree(paths["other"].parent, paths["mine"].parent, dirs_exist_ok=True)  # with its ids
    store = reopen(secret=secret)
    assert store.owners() == {others[0]}
    assert (store.read(mine), store.read(others)) == (None, content(others))


@SECRETS
def test_an_erasure_is_of_its_owners_alone(reopen: Open, secret: bytes | None) -> None:
    store = reopen(secret=secret)
    versions = [key(tenant, digest, 1) for tenant in "ab" for digest in (None, "d", "e")]
    for erase, erased in (
        (lambda: store.erase_version("a", "d"), {("a", "d")}),
        (lambda: store.erase_version(None, "d"), {("a", "d"), ("b", "d")}),
        (lambda: store.erase_tenant("a"), {("a", None), ("a", "d"), ("a", "e")}),
        (lambda: store.remove([versions[0], versions[5], key("c", None, 1)]), {("a", None), ("b", "e")}),
    ):
        for one in versions:  # those erased before are uploaded once more
            assert write(store, one)
            assert store.read(one) == content(one)
        erase()
        assert {one[0] for one in versions if one not in store} == erased
        assert {one[0] for one in versions if store.read(one) is None} == erased
        assert store.counts.damaged == 0


def test_an_erasure_in_the_middle_of_a_write_refuses_it(
    reopen: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = key("a", "d", 1)
    for name in ("remove", "write"):  # while room is made, and before the file is written
        for is_first in (True, False):
            directory = tmp_path / f"{name} {is_first}"
            store = reopen(directory, blocks=2)
            if not is_first:
                assert write(store, key("a", "d", 2))
            elif name == "remove":
                assert write(store, key("b", None, 1))
                store.erase_tenant("b")
            whole = getattr(DiskFiles, name)

            def erase_first(
                *given: object, store: DiskStore = store, whole: Callable[..., None] = whole
            ) -> None:
                store.erase_version("a", "d")
                whole(*given)

            with monkeypatch.context() as patch:
                patch.setattr(DiskFiles, name, erase_first)
                assert not write(store, one)
            assert one not in store
            assert store.counts.refused == {"erased": 1}
            store.sweep()
            assert not files(directory)
            assert store.counts.num_bytes == 0
            assert write(store, one)


def test_erased_files_are_gone_after_a_sweep_and_not_found_after_a_kill(reopen: Open, tmp_path: Path) -> None:
    store = reopen()
    for number in range(3):
        assert write(store, key("a", "d", number))
        assert write(store, key("b", None, number))
    store.erase_version("a", "d")
    store.erase_tenant("nobody")
    assert len(files(tmp_path / "kv")) == 6
    store.sweep()
    assert len(files(tmp_path / "kv")) == 3
    assert len([*(tmp_path / "kv").glob("*/*")]) == 1
    assert store.counts.num_bytes == 3 * ON_DISK
    assert reopen().owners() == {("b", None)}


@SECRETS
def test_files_of_other_builds_make_room_and_are_erased(
    reopen: Open, tmp_path: Path, secret: bytes | None
) -> None:
    for build in (b"1", b"2", b"3"):
        store = reopen(build=build, secret=secret)
        for number in range(2):
            assert write(store, key("a", "d", number))
            assert write(store, key("b", None, number))
    reopen(build=b"1", secret=secret).read(key("a", "d", 0))  # used last
    store = reopen(build=b"4", blocks=12, secret=secret)
    assert store.owners() == {("a", "d"), ("b", None)}
    assert not any(key("a", "d", number) in store for number in range(2))
    assert (store.counts.blocks, store.counts.num_bytes) == (0, 12 * ON_DISK)
    store.erase_version("a", "d")
    store.sweep()
    assert len(files(tmp_path / "kv")) == 6
    for number in range(6):  # tenants' own are 6 at most
        assert write(store, key("c", None, number))
    assert len(files(tmp_path / "kv")) == 12
    assert write(store, key("d", None, 0))
    assert len(files(tmp_path / "kv")) == 11
    assert store.counts.evicted == 0
    assert [key("b", None, 0) in reopen(build=b, blocks=12, secret=secret) for b in (b"1", b"2", b"3")] == [
        True, False, True,
    ]  # fmt: skip
    assert (reopen(build=b"4", blocks=7, secret=secret).counts.blocks, len(files(tmp_path / "kv"))) == (7, 7)


def test_fewer_bytes_than_before_keep_what_was_used_last(reopen: Open, tmp_path: Path) -> None:
    store = reopen()
    keys = [key(f"t{number}", None, number) for number in range(10)]
    for one in keys:
        assert write(store, one)
    for one in keys[:4]:
        assert store.read(one)
    store = reopen(blocks=6)
    assert [one for one in keys if one in store] == [*keys[:4], *keys[8:]]
    assert len(files(tmp_path / "kv")) == 6


def test_a_key_file_is_that_of_the_directory(reopen: Open, tmp_path: Path) -> None:
    one = key("a", "d", 1)
    for name, first, others in (
        ("sealed", b"first", {b"second": "with another key", None: "its files are encrypted"}),
        ("plain", None, {b"first": "its files are not encrypted"}),
    ):
        store = reopen(tmp_path / name, secret=first)
        assert write(store, one)
        store.close()
        for secret, reason in others.items():
            with pytest.raises(
                DiskStoreError, match=f"{name} cannot be used .* {reason}.*; give the key-file"
            ):
                reopen(tmp_path / name, secret=secret)
        assert reopen(tmp_path / name, secret=first).read(one) == content(one)
        mark = (tmp_path / name / "mark").read_bytes()
        for place in range(len(mark)):
            flip_a_bit(tmp_path / name / "mark", place)
            with pytest.raises(DiskStoreError, match="empty this one"):
                reopen(tmp_path / name, secret=first)
            (tmp_path / name / "mark").write_bytes(mark)
        assert reopen(tmp_path / name, secret=first).read(one) == content(one)
        (tmp_path / name / "mark").unlink()
        assert reopen(tmp_path / name, secret=first).read(one) is None
        assert not files(tmp_path / name)


def test_with_a_secret_nothing_on_the_disk_is_legible(reopen: Open, tmp_path: Path) -> None:
    for secret in (None, b"of the operator"):
        directory = tmp_path / str(secret)
        store = reopen(directory, secret=secret)
        one = key("a tenant of ours", "a digest of theirs", 1)
        assert write(store, one)
        raw = b"".join(path.read_bytes() for path in [*files(directory), *directory.glob("*/*/*/owner")])
        readable = [part in raw for part in (content(one)[:16], b"a tenant of ours", b"a digest of theirs")]
        assert readable == [secret is None] * 3
        assert "ours" not in str(files(directory))
        first = files(directory)
        store.erase_tenant("a tenant of ours")
        assert write(store, one)
        assert files(directory) == first
        (path,) = first
        assert (path.read_bytes() in raw) == (secret is None)  # another nonce


def test_nobody_else_may_read_the_files(reopen: Open, tmp_path: Path) -> None:
    umask = os.umask(0)
    try:
        assert write(reopen(), key("a", "d", 1))
    finally:
        os.umask(umask)
    for path in [tmp_path / "kv", *(tmp_path / "kv").rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_a_directory_that_cannot_be_used_is_told(reopen: Open, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DiskStoreError, match=r"file cannot be used .it is no directory.; give a directory"):
        reopen(tmp_path / "file")
    with pytest.raises(DiskStoreError, match="4095 bytes hold no block, which takes 4096"):
        reopen(blocks=0.9999)
    assert issubclass(DiskStoreError, LoraplexError)
    store = reopen()
    with pytest.raises(ValueError, match="a block has 3000 bytes, not 2999"):
        store.write(key("a", None, 1), memoryview(bytes(2999)))
