"""`serve --replicas 2` on Ray, from its start to its end: engines that are killed, ports, and what is left behind."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from support.servers.live_server import TINY_SIZES, LiveServer, checked
from support.servers.live_streams import Streams

pytestmark = pytest.mark.slow
pytest.importorskip("ray", reason="loraplex[cluster] is not installed")

MAX_TOKENS = 2000
"""A stream of fewer may come in one or two pieces, and be over before the kill."""
LOOPBACK = {"127.0.0.1", "::1", "::ffff:127.0.0.1"}


def replicas(server: LiveServer) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = checked(server.admin.get("cluster"))["replicas"]
    return [replica for replica in found if replica["state"] == "ready"]


def check(streams: Streams, undisturbed: Streams) -> None:
    assert [story.finished for story in streams.stories] == [True] * 8
    assert {story.text for story in streams.stories} == {undisturbed.stories[0].text}


def begun(server: LiveServer, key: str) -> Streams:
    """Eight streams that all run at once. An engine that has just started may begin after others have ended."""
    for _ in range(5):
        streams = Streams(server, key, ["a"] * 8, max_tokens=MAX_TOKENS)
        server.wait(lambda streams=streams: all(story.num_chunks for story in streams.stories), 120)  # type: ignore[misc]
        if streams.all_run_on:
            return streams
        streams.join()
    raise AssertionError("eight streams never ran at once")


def listening(family: list[psutil.Process]) -> set[str]:
    """Addresses on which these processes take connections."""
    pids = {process.pid for process in family}
    sockets = psutil.net_connections("tcp")
    return {s.laddr.ip for s in sockets if s.pid in pids and s.status == psutil.CONN_LISTEN}


def pids(server: LiveServer) -> set[int]:
    """Process ids of the engines that serve."""
    return {replica["pid"] for replica in replicas(server)}


def test_streams_outlive_an_engine_and_the_manager_and_all_ends_with_the_server(
    tmp_path: Path, tiny_model: Path, tiny_adapter: Path
) -> None:
    before = set(os.listdir("/tmp"))
    with LiveServer(
        tiny_model, tmp_path / "data", replicas=2, ray_address="local", dtype="float32", **TINY_SIZES
    ) as server:
        (managed,) = server.logged("engines_managed")
        assert managed["manager"] == "ray"
        server.create_tenant("acme")
        server.upload("acme", "a", tiny_adapter)
        key = server.create_key("acme")
        server.wait(lambda: len(replicas(server)) == 2, 240)
        undisturbed = Streams(server, key, ["a"], max_tokens=MAX_TOKENS)
        undisturbed.join()

        streams = begun(server, key)
        victim = replicas(server)[0]["pid"]
        assert streams.all_run_on
        os.kill(victim, signal.SIGKILL)
        killed = time.monotonic()
        streams.join()
        check(streams, undisturbed)
        server.wait(lambda: victim not in pids(server) and len(pids(server)) == 2)
        assert time.monotonic() - killed < 60

        server.wait(lambda: bool(server.logged("ray_ready")))
        engines = pids(server)
        streams = begun(server, key)
        assert streams.all_run_on
        os.kill(server.logged("ray_ready")[0]["pid"], signal.SIGKILL)
        streams.join()
        check(streams, undisturbed)
        server.wait(lambda: len(server.logged("ray_ready")) == 2, 240)
        assert pids(server) == engines
        family = psutil.Process(server.pid).children(recursive=True)
        assert any(process.name() == "raylet" for process in family)
        assert listening(family) <= LOOPBACK
        with open(f"/proc/{server.pid}/maps") as maps:
            assert "_raylet" not in maps.read()  # the server's own process has not loaded it
        assert server.stop(20) == 0
        _, alive = psutil.wait_procs(family, timeout=5)
        assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []
    assert not [name for name in set(os.listdir("/tmp")) - before if name.startswith("lp-ray-")]
