"""The disks of `GET /needs`: short ones, those out of reach, and those that hang."""

from __future__ import annotations

import errno
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from loraplex.control.history.history import History
from loraplex.engine.reports import EngineStats
from loraplex.lifecycle.needs import disks
from loraplex.lifecycle.needs.disks import Folder, RoomReader
from support.http.admin_plane import AdminPlane
from support.placement.fake_cluster import fake_report


async def disks_of(admin: httpx.AsyncClient) -> Any:
    answer = await admin.get("/needs")
    assert answer.status_code == 200, answer.text
    return answer.json()["disks"]


def watch(plane: AdminPlane, *kept: Folder, **figures: EngineStats) -> None:
    """The server writes to these folders; its engines, by name, say so much. The machine of `there` is another."""
    object.__setattr__(plane.services, "folders", kept)
    object.__setattr__(plane.services, "history", History("here"))
    nodes = {name: "elsewhere" if name == "there" else "here" for name in figures}
    plane.engine.replicas = {name: fake_report(name, node=node) for name, node in nodes.items()}
    plane.engine.replica_figures = figures


def kept_in(plane: AdminPlane, holds: Any, wanted: int) -> Folder:
    return Folder(holds, plane.root / "not" / holds, wanted)


async def test_disks(plane: AdminPlane, admin: httpx.AsyncClient) -> None:
    folders = [kept_in(plane, "data", 1), kept_in(plane, "adapters", 1 << 60)]
    watch(plane, *folders, kept_in(plane, "prefixes", 1 << 60), a=EngineStats(kv_disk_bytes_used=1 << 60))
    plane.engine.engine_stats = EngineStats(num_kv_disks_off=2)
    found = await disks_of(admin)
    (row,) = found["data"]
    path = str(plane.root / "not" / "adapters")
    assert (row["holds"], row["path"], row["wanted"], row["error"]) == ("adapters", path, 1 << 60, None)
    assert 0 < row["free"] < row["size"]
    assert found["prefixes_off"] == 2


@pytest.mark.parametrize("broken", ["exists", "disk_usage"])
async def test_a_disk_that_cannot_be_reached(
    plane: AdminPlane, admin: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    def out_of_reach(_: Path) -> None:
        raise OSError(errno.ESTALE, "Stale file handle")

    watch(plane, kept_in(plane, "data", 1))
    monkeypatch.setattr(Path if broken == "exists" else disks.shutil, broken, out_of_reach)
    (row,) = (await disks_of(admin))["data"]
    assert (row["holds"], row["free"], row["size"]) == ("data", None, None)
    assert row["error"] == "Stale file handle"


async def test_a_disk_that_hangs_holds_up_nobody_and_takes_one_thread(
    plane: AdminPlane, admin: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    back, read, asked = threading.Event(), disks.shutil.disk_usage, []

    def hang(path: Path) -> Any:
        asked.append(path)
        back.wait(60)
        return read(path)

    watch(plane, kept_in(plane, "adapters", 1))
    object.__setattr__(plane.services, "rooms", RoomReader(wait_s=0.1))
    monkeypatch.setattr(disks.shutil, "disk_usage", hang)
    try:
        for _ in range(3):
            (row,) = (await disks_of(admin))["data"]
            assert (row["holds"], row["error"]) == ("adapters", "the disk did not answer within 0.1 s")
        assert len(asked) == 1
    finally:
        back.set()
    object.__setattr__(plane.services, "rooms", RoomReader())
    assert (await disks_of(admin))["data"] == []


async def test_prefixes_want_no_room_where_this_machine_s_engines_do_not_say_what_they_keep(
    plane: AdminPlane, admin: httpx.AsyncClient
) -> None:
    full, folder = EngineStats(kv_disk_bytes_used=1 << 60), kept_in(plane, "prefixes", 1 << 60)
    watch(plane, folder, there=full)
    assert (await disks_of(admin))["data"] == [], "it has no engine"
    watch(plane, folder, a=full, b=EngineStats())
    plane.engine.replica_figures = {"b": EngineStats()}
    assert (await disks_of(admin))["data"] == [], "an engine is away"
    watch(plane, folder, a=EngineStats(kv_disk_bytes_used=1), b=EngineStats(kv_disk_bytes_used=2), there=full)
    (row,) = (await disks_of(admin))["data"]
    assert (row["holds"], row["wanted"]) == ("prefixes", (1 << 60) - 3), "those elsewhere take nothing here"
