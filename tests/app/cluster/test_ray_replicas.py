"""The server's side of Ray: managers that end, lose their head or cannot start. No Ray runs here."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from structlog.testing import capture_logs

from loraplex.app.cluster import process as event_process
from loraplex.app.cluster import ray_life, ray_replicas
from loraplex.app.cluster.ray_replicas import RayReplicas, RayUnusable
from loraplex.app.cluster.spec import ClusterSpec
from loraplex.serving.engines.engines import Engines
from loraplex.serving.engines.replica import Replica
from support.cluster.fake_manager import COMMAND, HEAD, LINE, OTHER
from support.cluster.scripted import ScriptedSession
from support.engine.fake_engine import fake_engine_info
from support.engine.fake_processes import until
from support.http.quiet import all_levels

SPEC = ClusterSpec(join="127.0.0.1:1", min_replicas=1)


class Running:
    """A `RayReplicas` that runs, with what it says."""

    def __init__(self, mode: str, client: Engines, logs: list[Any]) -> None:
        self.lines: list[str] = []
        self.unusable: list[RayUnusable] = []
        self.logs = logs
        replicas = RayReplicas(
            SPEC,
            client,
            5.0,
            on_unusable=self.unusable.append,
            write=self.lines.append,
            head=HEAD,
            manager=(*COMMAND, mode),
        )
        self.task = asyncio.create_task(replicas.run())

    def logged(self, event: str) -> list[dict[str, Any]]:
        return [line for line in self.logs if line["event"] == event]

    async def has_logged(self, event: str, times: int = 1) -> list[dict[str, Any]]:
        await until(lambda: len(self.logged(event)) >= times)
        return self.logged(event)


@contextlib.asynccontextmanager
async def running(mode: str, client: Engines | None = None) -> AsyncIterator[Running]:
    with all_levels(), capture_logs() as logs:
        found = Running(mode, client or Engines(engines_dial=True), logs)
        try:
            yield found
        finally:
            found.task.cancel()
            await asyncio.gather(found.task, return_exceptions=True)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_replicas, "FIRST_DELAY_S", 0.01)
    monkeypatch.setattr(ray_replicas, "LOOK_S", 0.01)
    monkeypatch.setattr(ray_life, "DELAY_S", 0.01)


async def test_a_manager_is_ready_and_ends_with_the_server() -> None:
    async with running("ready") as found:
        (ready,) = await found.has_logged("ray_ready")
        assert (ready["prefix"], ready["seconds"]) == ("ray-1-", 1.5)
        await until(lambda: found.lines == [LINE])
        assert psutil.pid_exists(ready["pid"])
    assert not psutil.pid_exists(ready["pid"])
    assert not found.logged("ray_manager_lost")
    assert not found.logged("ray_lost")


async def test_a_manager_that_ends_is_followed_by_another_on_the_same_ray() -> None:
    client = Engines(engines_dial=True)
    async with running("dying", client) as found:
        lost = await found.has_logged("ray_manager_lost", 2)
        assert OTHER in lost[0]["reason"]
        assert "status 3" in lost[0]["reason"]
        ready = await found.has_logged("ray_ready", 3)
        assert {line["prefix"] for line in ready} == {"ray-1-"}
        assert len({line["pid"] for line in ready}) == len(ready)
        assert client.num_managers_lost >= 2
        assert not found.logged("ray_lost")
        assert not found.unusable


async def test_engines_that_no_manager_finds_serve_until_others_of_a_new_ray_do() -> None:
    client = Engines(engines_dial=True)
    old = await join(client, "ray-1-a")
    async with running("lost", client) as found:
        await found.has_logged("ray_head_lost")
        assert len(found.logged("ray_manager_lost")) >= ray_life.MANAGER_TRIES - 1
        assert old.state == "ready"
        await join(client, "ray-2-b")
        await until(lambda: old.state == "draining")
    await client.close()


async def test_a_ray_that_ends_is_followed_by_another() -> None:
    async with running("ready") as found:
        (first,) = await found.has_logged("ray_ready")
        for head in heads():
            head.kill()
        (lost,) = await found.has_logged("ray_lost")
        assert "status -9" in lost["reason"]
        _, second = await found.has_logged("ray_ready", 2)
        assert (first["prefix"], second["prefix"]) == ("ray-1-", "ray-2-")
        assert not psutil.pid_exists(first["pid"])


async def test_a_head_that_does_not_start_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_HEAD", "failing")
    async with running("ready") as found:
        lost = await found.has_logged("ray_lost", 2)
        assert {line["reason"] for line in lost} == {"no room for a head"}


async def test_a_ray_that_never_starts_is_reported_with_its_reason() -> None:
    client = Engines(engines_dial=True)
    async with running("failing", client) as found:
        await until(lambda: bool(found.unusable))
        assert client.num_managers_lost >= 3
        assert str(found.unusable[0]) == "Ray cannot start the engines: the machine is on fire"
        delays = [line["delay_s"] for line in await found.has_logged("ray_lost", 4)]
        assert delays[:4] == [0.02, 0.04, 0.08, 0.16]
    assert len(found.unusable) == 1


def heads() -> list[psutil.Process]:
    """Processes below this one that hold a Ray."""
    return [child for child in psutil.Process().children() if child.cmdline()[1:] == list(HEAD[1:])]


async def join(client: Engines, name: str, device: str = "cpu") -> Replica:
    session = ScriptedSession(fake_engine_info(device=device))
    await session.start()
    replica = Replica(name, session, "vm")
    client.join(replica)
    return replica


async def test_without_a_head_the_old_engines_serve_until_new_ones_do() -> None:
    client = Engines(engines_dial=True)
    old = await join(client, "ray-1-a")
    async with running("headless", client) as found:
        await found.has_logged("ray_head_lost")
        first, second = await found.has_logged("ray_ready", 2)
        assert client.num_managers_lost >= 1
        assert old.state == "ready"
        assert psutil.pid_exists(first["pid"])
        await join(client, "ray-2-b")
        await until(lambda: old.state == "draining")
        (replaced,) = await found.has_logged("ray_replaced")
        assert (replaced["prefix"], replaced["engines"]) == ("ray-1-", 1)
        await until(lambda: not psutil.pid_exists(first["pid"]))
        assert psutil.pid_exists(second["pid"])
        assert [replica.id for replica in client.replicas if replica.state == "ready"] == ["ray-2-b"]
    await client.close()


async def test_engines_on_gpus_end_before_new_ones_start() -> None:
    client = Engines(engines_dial=True)
    await join(client, "ray-1-a", device="cuda:0")
    async with running("headless", client) as found:
        first, _ = await found.has_logged("ray_ready", 2)
        assert not psutil.pid_exists(first["pid"])
    await client.close()


async def test_what_a_manager_leaves_is_ended_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_process, "END_S", 0.2)
    monkeypatch.setenv("FAKE_CHILD", str(tmp_path / "child"))
    async with running("stubborn") as found:
        (ready,) = await found.has_logged("ray_ready")
        await until((tmp_path / "child").exists)
        child = int((tmp_path / "child").read_text())
    for pid in (ready["pid"], child):
        assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
