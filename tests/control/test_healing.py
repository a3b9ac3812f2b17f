"""Bytes that were lost or damaged, and disks that fail: what heals, and what is told."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import pytest

from loraplex.adapters.errors import ArtifactCorrupt
from loraplex.control.errors import AdapterUnavailable
from support.control import ControlPlane, caller, digests


def damage(plane: ControlPlane, digest: str) -> None:
    path = plane.store.path(digest) / "adapter_model.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    with pytest.raises(ArtifactCorrupt):
        plane.store.verify(digest)


@pytest.mark.parametrize(("tenant", "name"), [("acme", "pirate"), ("acme", "other"), ("rival", "pirate")])
def test_the_same_bytes_from_anyone_repair_damaged_ones(plane: ControlPlane, tenant: str, name: str) -> None:
    info = plane.add("acme", "pirate", seed=1)
    damage(plane, info.digest)
    plane.upload(tenant, name, seed=1)
    plane.store.verify(info.digest)
    assert plane.catalog.get_version("acme", "pirate", "v1") == info
    plane.check_integrity()


def test_who_brings_lost_bytes_back_brings_them_to_all_that_share_them(plane: ControlPlane) -> None:
    info = plane.add("acme", "pirate", seed=1)
    plane.add("rival", "parrot", seed=1)
    lost = plane.add("rival", "lost", seed=2)
    for digest in (info.digest, lost.digest):
        shutil.rmtree(plane.store.path(digest))
    plane.start()
    plane.tenants.create("third")
    assert plane.upload("third", "new", seed=1)[1]
    assert plane.catalog.get_version("acme", "pirate", "v1").state == "ready"
    assert plane.catalog.get_version("rival", "parrot", "v1").state == "ready"
    assert plane.catalog.get_version("rival", "lost", "v1").state == "corrupt"


def test_bytes_healed_under_another_base_stay_incompatible(plane: ControlPlane) -> None:
    info = plane.add("acme", "pirate", seed=1)
    shutil.rmtree(plane.store.path(info.digest))
    other = ControlPlane(plane.root, base_seed=1)
    other.start()
    assert other.catalog.get_version("acme", "pirate", "v1").state == "corrupt"
    assert other.add("rival", "parrot", seed=1).state == "ready"
    assert other.catalog.get_version("acme", "pirate", "v1").state == "incompatible"
    other.close()


async def test_bytes_put_back_from_a_backup_serve_after_a_start(plane: ControlPlane, tmp_path: Path) -> None:
    info = plane.add("acme", "pirate", seed=1)
    folder = plane.store.path(info.digest)
    shutil.copytree(folder, tmp_path / "backup")
    shutil.rmtree(folder)
    plane.start()
    with pytest.raises(
        AdapterUnavailable, match="corrupt and cannot be served: its stored bytes are damaged or lost; upload"
    ):
        await plane.resolver.resolve(caller("acme"), "pirate")
    shutil.copytree(tmp_path / "backup", folder)
    plane.start()
    assert (await plane.resolver.resolve(caller("acme"), "pirate")).adapter == info.ref()


async def test_what_was_made_for_another_base_is_told_so(plane: ControlPlane) -> None:
    plane.add("acme", "pirate", seed=1)
    other = ControlPlane(plane.root, base_seed=1)
    other.start()
    with pytest.raises(
        AdapterUnavailable, match="another base model; upload one made for this one, and release"
    ):
        await other.resolver.resolve(caller("acme"), "pirate")
    assert [card.id for card in await other.resolver.list_models(caller("acme"))] == ["org/tiny"]
    other.close()


def test_hashing_what_is_stored_already_keeps_no_writer_waiting(
    plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    plane.add("acme", "pirate", seed=1)
    real, wrote = plane.store.verify, []

    def verify(digest: str) -> None:
        writer = threading.Thread(target=lambda: wrote.append(plane.tenants.update("rival", {"weight": 2})))
        writer.start()
        writer.join(5)  # far less than a writer waits for the lock; it takes milliseconds
        assert wrote
        real(digest)

    monkeypatch.setattr(plane.store, "verify", verify)
    assert plane.upload("rival", "parrot", seed=1)[1]
    assert len(wrote) == 1


def test_bytes_that_cannot_be_removed_hide_no_deletion(
    plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The version is gone for everybody, the engine is told to forget it, and the next start removes the bytes."""
    first, second = plane.add("acme", "pirate", seed=1), plane.add("acme", "pirate", seed=2)
    real = plane.store.delete

    def delete(digest: str) -> bool:
        if digest == min(first.digest, second.digest):
            raise OSError("read-only file system")
        return real(digest)

    monkeypatch.setattr(plane.store, "delete", delete)
    assert digests(plane.catalog.delete_adapter("acme", "pirate")) == {first.digest, second.digest}
    assert plane.catalog.list_adapters("acme").items == ()
    assert len(plane.stored()) == 1
    monkeypatch.undo()
    plane.start()
    plane.check_integrity()
