"""A real PostgreSQL goes away under the whole server, by refusing and by hanging, while clients stream."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from loraplex.control.db.database import Database
from loraplex.control.tenancy.keys import Keys
from support.control.usage import rows_of
from support.faults.tcp_proxy import TcpProxy
from support.servers.live_server import (
    TINY_TORCH,
    LiveServer,
    checked,
    sse_events,
    write_tiny_adapter,
    write_tiny_model,
)
from support.servers.postgres import PostgresServer, need_programs
from support.waiting import eventually

pytestmark = pytest.mark.slow
BACK_WITHIN_S = 10


@pytest.fixture
def postgres() -> Iterator[PostgresServer]:
    need_programs()
    server = PostgresServer()
    yield server
    server.close()


class Traffic:
    """Streams one after the other from the moment it is started, and what became of them."""

    def __init__(self, server: LiveServer, key: str, model: str, max_tokens: int) -> None:
        self._client = server.client(key)
        self._body = {
            "model": model,
            "prompt": "the sea",
            "stream": True,
            "ignore_eos": True,
            "max_tokens": max_tokens,
        }
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.ended: list[tuple[float, float]] = []
        self.failures: list[str] = []
        self.num_events = 0
        self.longest_wait_s = 0.0
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(120)
        assert not self._thread.is_alive()
        self._client.close()

    def _run(self) -> None:
        while not self._stop.is_set():
            began = time.monotonic()
            try:
                self._stream()
            except Exception as error:  # whatever it is, it is a stream that failed
                self.failures.append(repr(error))
            self.ended.append((began, time.monotonic()))

    def _stream(self) -> None:
        last = time.monotonic()
        with self._client.stream("POST", "/v1/completions", json=self._body) as answer:
            assert answer.status_code == 200, (answer.status_code, answer.read())
            event: Any = None
            for event in sse_events(lines_of(answer)):
                now = time.monotonic()
                self.longest_wait_s, last = max(self.longest_wait_s, now - last), now
                self.num_events += 1
                assert event == "[DONE]" or "error" not in event, event
            assert event == "[DONE]"


def lines_of(answer: httpx.Response) -> Iterator[str]:
    """By line feeds alone: what a random model writes has every other separator."""
    rest = b""
    for chunk in answer.iter_bytes():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line.decode()


def metric(server: LiveServer, name: str) -> float:
    text = httpx.get(f"{server.admin_url}/metrics", timeout=60).text
    return next(float(line.split()[1]) for line in text.splitlines() if line.startswith(f"{name} "))


def ask(server: LiveServer, key: str, model: str = "pirate") -> httpx.Response:
    with server.client(key) as client:
        return client.post("/v1/completions", json={"model": model, "prompt": "x", "max_tokens": 1})


def outage_of(
    tmp_path: Path, postgres: PostgresServer, url: str, lose: Callable[[], None], restore: Callable[[], None],
    seconds: float,
) -> str:  # fmt: skip
    """Everything that is promised of an outage that long; a sentence with what was measured."""
    model = write_tiny_model(tmp_path / "model")
    with LiveServer(model, tmp_path / "data", database_url=url, **TINY_TORCH) as server:
        server.create_tenant("acme")
        used, unused, revoked = (server.create_key("acme") for _ in range(3))
        server.upload("acme", "pirate", write_tiny_adapter(tmp_path / "pirate"))
        assert ask(server, used).status_code == 200
        assert ask(server, revoked).status_code == 200
        checked(server.admin.delete(f"tenants/acme/keys/{revoked.split('_')[1]}"), 204)
        long, short = Traffic(server, used, "pirate", 4_000), Traffic(server, used, "pirate", 200)
        eventually(lambda: long.num_events > 0 and len(short.ended) > 1, timeout=60)
        lose()
        lost_at = time.monotonic()
        eventually(lambda: metric(server, "loraplex_database_up") == 0, timeout=60)
        noticed_s = time.monotonic() - lost_at
        slowest_s, num_asked = 0.0, 0
        while time.monotonic() - lost_at < seconds or not any(begin > lost_at for begin, _ in short.ended):
            began = time.monotonic()
            assert ask(server, used).status_code == 200
            for secret in (unused, revoked, "lpx_00_guess"):
                answer = ask(server, secret)
                assert (answer.status_code, answer.json()["error"]["code"]) == (503, "database_unavailable")
                assert int(answer.headers["retry-after"]) >= 1
            for call in (
                lambda: server.admin.get("tenants"),
                lambda: server.admin.post("tenants", json={"id": "late"}),
            ):
                answer = call()
                assert (answer.status_code, answer.json()["code"]) == (503, "database_unavailable")
                assert answer.headers["content-type"] == "application/problem+json"
                assert int(answer.headers["retry-after"]) >= 1
            ready = httpx.get(f"{server.data_url}/readyz", timeout=60)
            assert ready.status_code == 200
            assert "database" in ready.json()["warning"]
            num_asked += 6
            slowest_s = max(slowest_s, time.monotonic() - began)
            time.sleep(0.2)
        assert metric(server, "loraplex_database_outage_seconds") > 0
        restore()
        back_at = time.monotonic()
        eventually(lambda: server.admin.get("tenants").status_code == 200, timeout=BACK_WITHIN_S)
        back_s = time.monotonic() - back_at
        assert ask(server, unused).status_code == 200
        assert ask(server, revoked).status_code == 401
        assert ask(server, "lpx_00_guess").status_code == 401
        assert metric(server, "loraplex_database_up") == 1
        assert "warning" not in httpx.get(f"{server.data_url}/readyz", timeout=60).json()
        names = [row["id"] for row in checked(server.admin.get("tenants"))["data"]]
        assert names == ["acme"]
        short.stop()
        long.stop()
        assert (short.failures, long.failures) == ([], [])
        through = [(begin, end) for begin, end in long.ended + short.ended if begin < lost_at < end]
        assert through, "no stream ran when the database went"
        during = sum(lost_at < begin and end < back_at for begin, end in short.ended)
        assert during > 0
        assert server.stop() == 0
        database = Database(url)
        keys = {info.id: info for info in Keys(database, b"").list("acme").items}
        assert keys[unused.split("_")[1]].last_used_at is not None  # written by the end, at the latest
        # Three were asked before the outage and after it, and one in each round of six.
        num_answered = len(long.ended) + len(short.ended) + 3 + num_asked // 6
        rows = rows_of(database)
        assert len(rows) == num_answered, "a usage row was lost, or there is one of nobody"
        assert {row.status for row in rows.values()} <= {"stop", "length"}
        database.close()
        return (
            f"noticed after {noticed_s:.1f} s; {during} streams within it, {len(through)} ran through its "
            f"beginning, 0 failed; longest gap between events {max(short.longest_wait_s, long.longest_wait_s):.1f} s; "
            f"{num_asked} other requests, slowest round of six {slowest_s:.1f} s; back after {back_s:.1f} s; "
            f"{len(rows)} usage rows for {num_answered} answers"
        )


@pytest.mark.parametrize("seconds", [4.0, pytest.param(60.0, marks=pytest.mark.soak)])
def test_killed_and_started_again(tmp_path: Path, postgres: PostgresServer, seconds: float) -> None:
    url = postgres.create_database()
    print(outage_of(tmp_path, postgres, url, postgres.kill, postgres.start, seconds))


@pytest.mark.soak
def test_hanging(tmp_path: Path, postgres: PostgresServer) -> None:
    direct = postgres.create_database()
    with TcpProxy(postgres.port) as proxy:
        url = postgres.url(direct.rpartition("/")[2], port=proxy.port)
        print(outage_of(tmp_path, postgres, url, proxy.hang, proxy.carry, 60.0))
