"""A disk that is really full, with store and database on it: told as 507, and nothing stays behind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.faults.small_disk import SmallDisk, small_disk
from support.http.admin_plane import AdminPlane, adapter_files, admin_client

VERSIONS = "tenants/acme/adapters/pirate/versions"


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    with small_disk(tmp_path / "disk", 16 << 20) as made:
        yield made


@pytest.fixture
def plane(disk: SmallDisk) -> Iterator[AdminPlane]:
    made = AdminPlane(disk.root)
    made.make_tenant("acme")
    made.make_adapter("early", "acme", seed=9)
    yield made
    made.close()


async def fill_and_upload(
    plane: AdminPlane, disk: SmallDisk, tmp_path: Path, room: range, seed: int = 100
) -> Counter[int]:
    """An upload of new bytes for each number of free bytes."""
    statuses: Counter[int] = Counter()
    async with admin_client(plane.app) as client:
        before = (await client.get(VERSIONS.replace("pirate", "early"))).json()
        for number, left in enumerate(room):
            files = adapter_files(tmp_path / f"a{seed + number}", seed=seed + number)
            disk.leave(left)
            answer = await client.post(VERSIONS, files=files)
            statuses[answer.status_code] += 1
            assert answer.status_code in (201, 503, 507), f"{left} bytes free: {answer.text}"
            if answer.status_code == 503:  # there was room for the version, but not for the verdict on it
                assert answer.json()["code"] == "numbers_unchecked"
            if answer.status_code == 507:
                assert answer.headers["content-type"] == "application/problem+json"
                assert answer.json()["code"] == "storage_full"
            # Read while the disk is full, and everything else with it.
            assert (await client.get(VERSIONS.replace("pirate", "early"))).json() == before
            plane.check_integrity()
            disk.empty()
            if answer.status_code == 507:
                assert (await client.post(VERSIONS, files=files)).status_code == 201
            if answer.status_code == 503:
                again = await client.post(VERSIONS, files=files)
                assert (again.status_code, again.json()["state"]) == (200, "ready")
    plane.check_integrity()
    return statuses


async def test_an_upload_for_every_state_of_a_disk_that_runs_full(
    plane: AdminPlane, disk: SmallDisk, tmp_path: Path
) -> None:
    statuses = await fill_and_upload(plane, disk, tmp_path, range(0, 140 << 10, 8 << 10))
    assert statuses[507] >= 3
    assert statuses[201] >= 3


@pytest.mark.soak
async def test_an_upload_for_every_page_of_a_disk_that_runs_full(
    plane: AdminPlane, disk: SmallDisk, tmp_path: Path
) -> None:
    statuses: Counter[int] = Counter()
    for turn in range(10):
        statuses += await fill_and_upload(plane, disk, tmp_path, range(0, 160 << 10, 4 << 10), 1000 * turn)
        async with admin_client(plane.app) as client:  # room for the next turn
            assert (await client.delete("tenants/acme/adapters/pirate")).status_code == 204
        plane.check_integrity()
    print(f"uploads with 0 to 156 KiB free, by status: {dict(statuses)}")


async def test_writes_to_the_database_on_a_full_disk(plane: AdminPlane, disk: SmallDisk) -> None:
    """Also where a deletion is to make room: SQLite writes before it frees."""
    async with admin_client(plane.app) as client:
        disk.leave(0)
        statuses = set()
        for number in range(40):
            answer = await client.post("tenants", json={"id": f"t{number}"})
            statuses.add(answer.status_code)
            if answer.status_code != 201:
                assert (answer.status_code, answer.json()["code"]) == (507, "storage_full")
                assert answer.json()["detail"] == "the database's disk is full; nothing was changed"
                assert (await client.get(f"tenants/t{number}")).status_code == 404
        assert 507 in statuses
        disk.empty()
        assert (await client.post("tenants", json={"id": "late"})).status_code == 201
        assert (await client.delete("tenants/acme/adapters/early")).status_code == 204
    plane.check_integrity()
