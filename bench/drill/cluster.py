"""Scripted engines on a Ray of their own, and the processes that a drill kills."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from bench.drill.machines import ADDRESS, BUCKET, RAY
from bench.drill.processes import marked
from loraplex.app.cluster.choice import cluster_spec
from loraplex.app.cluster.ray_replicas import RayReplicas
from loraplex.app.engines.port import listen_for_engines
from loraplex.app.settings import Settings
from loraplex.app.storage.artifacts import artifact_store
from loraplex.serving.cluster.client import ClusterEngineClient
from loraplex.serving.cluster.remote import RemoteEngine
from loraplex.serving.cluster.replica import Replica
from support.engine.fake_processes import FAKE_ENGINE
from support.servers.live_server import write_tiny_model

PLACES = 32
"""Sequences of a scripted engine at once."""
LOOK_S = 0.02
DRAIN_S = 30.0


@dataclass
class Drill:
    """The client that a server would have, and the processes below it. `logged`: number of log lines by their event."""

    client: ClusterEngineClient
    running: asyncio.Task[None]
    mark: str
    logged: Counter[str]
    lines: list[str] = field(default_factory=list)
    unusable: list[Exception] = field(default_factory=list)

    @property
    def ready(self) -> list[Replica]:
        return [replica for replica in self.client.replicas if replica.state == "ready"]

    async def whole(self, count: int, gone: frozenset[str] = frozenset(), timeout_s: float = 300.0) -> float:
        """Seconds until exactly `count` engines serve, none of them in `gone`."""
        begun = time.monotonic()

        def is_whole() -> bool:
            names = {replica.id for replica in self.ready}
            return len(names) == count and not names & gone

        await self.until(is_whole, timeout_s)
        return time.monotonic() - begun

    async def until(self, condition: Callable[[], bool], timeout_s: float = 300.0) -> None:
        async with asyncio.timeout(timeout_s):
            while not condition():
                if self.unusable:
                    raise self.unusable[0]
                await asyncio.sleep(LOOK_S)

    @property
    def names(self) -> frozenset[str]:
        return frozenset(replica.id for replica in self.client.replicas)

    def processes(self, word: str = "") -> list[psutil.Process]:
        """Processes below this one, and of its Ray, the oldest first, with this word in their command line."""
        return marked(self.mark, word)

    def one(self, word: str) -> psutil.Process:
        """The newest."""
        return self.processes(word)[-1]


@contextlib.asynccontextmanager
async def drilled(folder: Path, mark: str, logged: Counter[str], *, is_running: bool) -> AsyncIterator[Drill]:
    """Two engines, and a third under load; starting when the context is entered. `is_running`: on a Ray that runs
    already, on the two machines."""
    host = ADDRESS if is_running else "127.0.0.1"
    shared: dict[str, Any] = (
        {"ray_address": RAY, "artifact_url": f"s3://{BUCKET}/adapters"} if is_running else {}
    )
    settings = Settings(
        model=str(write_tiny_model(folder / "model")),
        data_dir=folder / "data",
        replicas=2,
        max_replicas=3,
        scale_up_delay=1.0,
        scale_down_delay=3.0,
        max_num_seqs=PLACES,
        engine_spare=False,
        drain_timeout=DRAIN_S,
        **shared,
    )
    settings.data_dir.mkdir(mode=0o700)
    bound = socket.socket()
    bound.bind((host, 0))
    client = ClusterEngineClient(num_wanted=2)

    def on_join(replica: str, node: str, session: RemoteEngine) -> None:
        client.join(Replica(replica, session, node))

    port = listen_for_engines(
        settings, [bound], artifact_store(settings), "", on_join=on_join, on_leave=client.leave
    )
    async with port:
        address = f"{host}:{bound.getsockname()[1]}"
        spec = cluster_spec(settings, address, FAKE_ENGINE)
        lines: list[str] = []
        unusable: list[Exception] = []
        replicas = RayReplicas(spec, client, DRAIN_S, on_unusable=unusable.append, write=lines.append)
        running = asyncio.create_task(replicas.run())
        try:
            yield Drill(client, running, mark, logged, lines, unusable)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await client.close()


def usage(processes: list[psutil.Process]) -> tuple[float, float]:
    """MB of memory, shared pages by their share, and processor seconds so far, of these processes."""
    memory = seconds = 0.0
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess, OSError):
            rollup = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
            memory += int(rollup.split("Pss:")[1].split()[0]) / 1e3
            times = process.cpu_times()
            seconds += times.user + times.system
    return memory, seconds


def folders() -> set[str]:
    """Folders of any Ray of ours on this machine."""
    return {entry.name for entry in os.scandir("/tmp") if entry.name.startswith("lp-ray-")}
