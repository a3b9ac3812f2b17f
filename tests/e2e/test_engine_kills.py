"""A hundred deaths of the engine on the real model, under streams: killed, stopped, killed again while it starts."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import pytest

from support.live_server import EXAMPLE_ADAPTERS, EXAMPLES, SERVED_NAME, SMALL, LiveServer, wait_gone
from support.live_streams import Streams

pytestmark = pytest.mark.soak

DEATHS = 100
STOP_EVERY, TWICE_EVERY = 10, 9
STREAMS = 8
NOTICED_S, TOLD_S, BACK_S = 10.0, 1.0, 10.0
SETTLED = 10
"""Deaths after which nothing of the server may grow any more."""


@dataclass
class Times:
    """Seconds: from the fault until the server noticed it, from there until the last stream had its end, and until the
    first request was served; the new engine's own processor time until then; from then until all adapters were on the
    device."""

    noticed: list[float] = field(default_factory=list)
    told: list[float] = field(default_factory=list)
    back: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)
    warm: list[float] = field(default_factory=list)

    def __str__(self) -> str:
        return ", ".join(
            f"{name} {median(values):.2f} (at most {max(values):.2f})"
            for name in ("noticed", "told", "back", "processor", "warm")
            if (values := getattr(self, name))
        )


@dataclass(frozen=True)
class Held:
    """What the server's own process holds while nothing runs."""

    files: int
    threads: int
    children: int
    zombies: int
    megabytes: float

    @classmethod
    def by(cls, server: LiveServer) -> Held:
        process = psutil.Process(server.pid)
        children = process.children(recursive=True)
        zombies = sum(child.status() == psutil.STATUS_ZOMBIE for child in children)
        rss = process.memory_info().rss / 1e6
        return cls(process.num_fds(), process.num_threads(), len(children), zombies, rss)


def serves(server: LiveServer, key: str, model: str) -> bool:
    with server.client(key) as client:
        body = {"model": model, "prompt": "one", "max_tokens": 1, "temperature": 0}
        return client.post("/v1/completions", json=body).status_code == 200


def has_lost(server: LiveServer, times: int) -> Callable[[], bool]:
    return lambda: len(server.logged("engine_lost")) == times


def processor_seconds(server: LiveServer) -> float:
    """What the engine process has taken so far, whatever else the machine does."""
    spent = psutil.Process(server.engine_pid()).cpu_times()
    return float(spent.user + spent.system)


def logged_at(line: dict[str, Any]) -> float:
    return datetime.fromisoformat(line["timestamp"]).timestamp()


def new_engine(server: LiveServer, old: int) -> int:
    server.wait(lambda: server.engine_pid() not in (None, old))
    pid = server.engine_pid()
    assert pid is not None
    return pid


def test_a_hundred_deaths_under_streams(real_model_dir: Path, tmp_path: Path) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    times = {"killed": Times(), "stopped": Times(), "killed twice": Times()}
    with LiveServer(
        real_model_dir,
        tmp_path / "data",
        served_model_name=SERVED_NAME,
        environment={"TMPDIR": str(temporary)},
        **SMALL,
    ) as server:
        server.create_tenant("acme")
        for name in EXAMPLES:
            server.upload("acme", name, EXAMPLE_ADAPTERS / name)
        key = server.create_key("acme")
        models = [SERVED_NAME, *EXAMPLES]
        expected_residency = {f"{name}@v1": ["device", "host", "disk"] for name in EXAMPLES}
        since_monotonic = time.time() - time.monotonic()
        restarts, told, held = 0, 0, []
        for death in range(1, DEATHS + 1):
            kind = (
                "stopped"
                if death % STOP_EVERY == 0
                else "killed twice"
                if death % TWICE_EVERY == 0
                else "killed"
            )
            streams = Streams(server, key, [models[i % len(models)] for i in range(STREAMS)], max_tokens=2000)
            streams.wait_until_all_run()
            engine = server.engine_pid()
            assert engine is not None
            losses = len(server.logged("engine_lost"))
            failed_at = time.monotonic()
            os.kill(engine, signal.SIGSTOP if kind == "stopped" else signal.SIGKILL)
            streams.join()
            server.wait(has_lost(server, losses + 1))
            noticed_at = logged_at(server.logged("engine_lost")[-1]) - since_monotonic
            for story in streams.stories:
                assert story.error["code"] == "engine_restarting"
                told += 1
            found = times[kind]
            found.noticed.append(noticed_at - failed_at)
            found.told.append(max(story.ended_at for story in streams.stories) - noticed_at)
            back_from = noticed_at
            restarts += 1
            if kind == "killed twice":
                again = new_engine(server, engine)
                os.kill(again, signal.SIGKILL)
                back_from = time.monotonic()
                restarts += 1
            server.wait(lambda: serves(server, key, "pirate"), timeout=60)
            found.back.append(time.monotonic() - back_from)
            found.processor.append(processor_seconds(server))
            back_at = time.monotonic()
            server.wait(lambda: server.residency() == expected_residency)
            found.warm.append(time.monotonic() - back_at)
            wait_gone(engine)
            server.wait(server.idle)
            assert server.engine()["restarts"] == restarts
            held.append(Held.by(server))
            if death % 10 == 0:
                print(f"{death} deaths: {times}; {held[-1]}", flush=True)
        assert list(temporary.iterdir()) == []
        streams = Streams(server, key, models, max_tokens=20)
        assert all(story.finish_reason == "length" for story in streams.join())
    print(f"{DEATHS} deaths, {restarts} restarts, {told} streams told, first {held[0]}, last {held[-1]}")
    for kind, found in times.items():
        print(f"{kind} ({len(found.told)}): {found}")
    assert told == DEATHS * STREAMS
    for found in times.values():
        assert max(found.noticed) < NOTICED_S
        assert max(found.told) < TOLD_S
        assert max(found.back) < BACK_S
    settled, last = held[SETTLED], held[-1]
    assert last.files <= max(h.files for h in held[:SETTLED])
    assert last.threads <= max(h.threads for h in held[:SETTLED])
    assert (last.children, last.zombies) == (1, 0)
    assert last.megabytes < 1.1 * settled.megabytes
