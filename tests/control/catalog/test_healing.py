"""Bytes that were lost or damaged, and disks that fail: what heals, and what is told."""

from __future__ import annotations

import errno
import shutil
import threading
from pathlib import Path

import pytest

from loraplex.adapters.errors import ArtifactCorrupt, ArtifactUnreadable
from loraplex.control.errors import AdapterUnavailable
from loraplex.control.release_types import ReleaseTarget
from support.control.plane import ControlPlane, caller, digests
from support.faults.damage import flip_a_bit


def damage(plane: ControlPlane, digest: str) -> None:
    flip_a_bit(plane.store.path(digest))
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


def test_uploading_lost_bytes_heals_all_that_share_them(plane: ControlPlane) -> None:
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


async def test_adapter_for_another_base_is_reported_incompatible(plane: ControlPlane) -> None:
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
    """The version is gone for all, the engine drops it, and the next start removes the bytes."""
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


async def test_damage_marks_every_version_that_has_the_bytes_and_no_other(plane: ControlPlane) -> None:
    info = plane.add("acme", "pirate", seed=1)
    plane.add("rival", "parrot", seed=1)
    other = plane.add("acme", "other", seed=2)
    assert not plane.catalog.mark_damaged(info.digest)  # nothing is wrong yet
    damage(plane, info.digest)
    assert plane.catalog.mark_damaged(info.digest)
    assert plane.catalog.mark_damaged(info.digest)  # told twice
    plane.check_integrity()
    for tenant, name in (("acme", "pirate"), ("rival", "parrot")):
        assert plane.catalog.get_version(tenant, name, "v1").state == "corrupt"
        with pytest.raises(AdapterUnavailable, match="its stored bytes are damaged or lost"):
            await plane.resolver.resolve(caller(tenant), name)
    assert plane.catalog.get_version("acme", "other", "v1") == other
    assert (await plane.resolver.resolve(caller("acme"), "other")).adapter == other.ref()


def test_a_start_leaves_damage_marked_until_the_bytes_are_good_again(plane: ControlPlane) -> None:
    info = plane.add("acme", "pirate", seed=1)
    path = plane.store.path(info.digest) / "adapter_model.safetensors"
    good = path.read_bytes()
    damage(plane, info.digest)
    plane.catalog.mark_damaged(info.digest)
    plane.start()
    assert plane.catalog.get_version("acme", "pirate", "v1").state == "corrupt"
    path.write_bytes(good)
    plane.start()
    assert plane.catalog.get_version("acme", "pirate", "v1").state == "ready"


def test_artifact_that_cannot_be_read_now_is_not_marked_corrupt(
    plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = plane.add("acme", "pirate", seed=1)

    def too_many(*_: object) -> str:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr("loraplex.adapters.store.artifact_store.digest_upload", too_many)
        with pytest.raises(ArtifactUnreadable, match="Too many open files"):
            plane.catalog.mark_damaged(info.digest)
    assert plane.catalog.get_version("acme", "pirate", "v1") == info


async def test_a_release_does_not_move_to_its_other_versions(plane: ControlPlane) -> None:
    """Requests that fall to the damaged part get an error; the rest is served as before."""
    first, second = plane.add("acme", "pirate", seed=1), plane.add("acme", "pirate", seed=2)
    targets = (ReleaseTarget("v1", 50), ReleaseTarget("v2", 50))
    plane.releases.put("acme", "pirate", targets, sticky="user")
    users = [f"u{number}" for number in range(40)]

    async def answers() -> dict[str, str | None]:
        found: dict[str, str | None] = {}
        for user in users:
            try:
                resolved = await plane.resolver.resolve(caller("acme"), "pirate", user=user)
                found[user] = resolved.adapter.digest if resolved.adapter is not None else None
            except AdapterUnavailable:
                found[user] = None
        return found

    before = await answers()
    assert set(before.values()) == {first.digest, second.digest}
    damage(plane, second.digest)
    plane.catalog.mark_damaged(second.digest)
    assert await answers() == {u: None if d == second.digest else d for u, d in before.items()}
    plane.upload("rival", "parrot", seed=2)
    assert await answers() == before
