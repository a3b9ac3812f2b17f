"""Engine after engine killed under streams of several adapters: each death is told, each time service comes back, and a
hundred lives later the server holds what it held before the first."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sqlite3
import statistics
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

import httpx
import psutil
import pytest

from loraplex.control.db.database import MAX_THREADS
from support.servers.live_server import (
    EXAMPLE_ADAPTERS,
    EXAMPLES,
    SERVED_NAME,
    SMALL,
    TINY_TORCH,
    LiveServer,
    checked,
    wait_gone,
)
from support.servers.live_streams import Streams

SEED = 20
NOTICED_WITHIN_S = {signal.SIGKILL: 2.0, signal.SIGSTOP: 10.0}
TOLD_WITHIN_S = 1.0
BACK_WITHIN_S = 10.0
SETTLED_AFTER = 10
"""Lives after which the server has met nearly all that it will."""
MAX_GROWTH = 0.02
THREADS_END_AFTER_S = 10.0
"""The pool ends a thread that has had nothing to do for so long, at its next use."""


@dataclass
class Fall:
    """One death. Seconds: `noticed` after the signal, the others after the notice."""

    number: signal.Signals
    noticed: float
    told: float
    back: float
    hot: float
    refusals: Counter[tuple[int, str]]


@dataclass
class Probe(threading.Thread):
    """A client that asks again and again, a tenth of a second after each refusal, until it is answered."""

    server: LiveServer
    key: str
    model: str
    refused: list[httpx.Response] = field(default_factory=list)
    served_at: float = 0.0

    def __post_init__(self) -> None:
        super().__init__(daemon=True)

    __hash__ = threading.Thread.__hash__

    def run(self) -> None:
        body = {"model": self.model, "prompt": "one", "max_tokens": 2, "ignore_eos": True}
        with self.server.client(self.key) as client:
            while (answer := client.post("/v1/completions", json=body)).status_code != 200:
                self.refused.append(answer)
                time.sleep(0.1)
        self.served_at = time.monotonic()


def open_all_connections(server: LiveServer) -> None:
    """To the database, by as many writers as may wait for its lock at a time; the server keeps what it opens."""

    def write() -> None:
        with httpx.Client(base_url=server.admin_url, timeout=60) as client:
            client.headers["authorization"] = f"Bearer {server.admin_token}"
            checked(client.patch("/admin/v1/tenants/acme", json={"weight": 1.0}))

    path = server.data_dir / "loraplex.db"
    with (
        contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other,
        ThreadPoolExecutor(MAX_THREADS) as pool,
    ):
        other.execute("BEGIN IMMEDIATE")
        writers = [pool.submit(write) for _ in range(MAX_THREADS)]
        time.sleep(1)
        other.execute("ROLLBACK")
        for writer in writers:
            writer.result()


@dataclass(frozen=True)
class Holdings:
    """What the server holds while nobody asks for anything: the least of `quiet_s` seconds. `threads` is None where
    that is too short for those of the pool to end that have nothing to do."""

    descriptors: int
    threads: int | None
    children: int
    zombies: int
    sockets: tuple[str, ...]
    arena_pages: int
    kv_blocks: int

    @classmethod
    def of(cls, server: LiveServer, sockets: Path, quiet_s: float) -> Holdings:
        server.wait(server.idle)
        server.wait(server.spare_is_ready)
        process = psutil.Process(server.pid)
        stats = server.stats()
        children = process.children(recursive=True)
        counts = []
        last = time.monotonic() + quiet_s
        while time.monotonic() < last:
            counts.append((process.num_fds(), process.num_threads()))
            time.sleep(0.02)
        return cls(
            descriptors=min(descriptors for descriptors, _ in counts),
            threads=min(threads for _, threads in counts) if quiet_s > THREADS_END_AFTER_S else None,
            children=len(children),
            zombies=sum(child.status() == psutil.STATUS_ZOMBIE for child in children),
            sockets=tuple(path.name for path in sockets.glob("loraplex-*")),
            arena_pages=stats["num_arena_pages_used"],
            kv_blocks=stats["num_kv_blocks_used"],
        )

    @classmethod
    def settled(cls, server: LiveServer, sockets: Path, quiet_s: float) -> Holdings:
        """The same twice in a row: a server that is held up gives nothing back meanwhile."""
        last = cls.of(server, sockets, quiet_s)
        for _ in range(5):
            last, before = cls.of(server, sockets, quiet_s), last
            if last == before:
                break
        return last


def noticed_at(server: LiveServer, life: int) -> float:
    """When the server logged this loss, by the monotonic clock."""
    logged = datetime.fromisoformat(server.logged("engine_lost")[life - 1]["timestamp"]).timestamp()
    return logged - time.time() + time.monotonic()


def fall(server: LiveServer, key: str, models: Sequence[str], number: signal.Signals, life: int) -> Fall:
    """A stream of each of `models`, the signal, and what came of it."""
    streams = Streams(server, key, models, max_tokens=2000)
    streams.wait_until_all_run()
    hot = server.residency()
    server.wait(server.spare_is_ready)
    engine = server.engine_pid()
    assert engine is not None
    os.kill(engine, number)
    signalled = time.monotonic()
    streams.join()
    probe = Probe(server, key, models[life % len(models)])
    probe.start()
    noticed = noticed_at(server, life)
    for story in streams.stories:
        assert story.error["code"] == "engine_restarting"
        assert story.error["type"] == "server_error"
        assert not story.finish_reason
    probe.join(120)
    assert probe.served_at, server.log_tail()
    for refused in probe.refused:
        assert int(refused.headers["retry-after"]) >= 1
    wait_gone(engine)
    server.wait(lambda: server.residency() == hot, timeout=60)
    hot_again = time.monotonic()
    server.wait(server.idle)
    return Fall(
        number,
        noticed=noticed - signalled,
        told=max(story.ended_at for story in streams.stories) - noticed,
        back=probe.served_at - noticed,
        hot=hot_again - noticed,
        refusals=Counter((a.status_code, a.json()["error"]["code"]) for a in probe.refused),
    )


def check(falls: Sequence[Fall], late_s: float) -> None:
    """Print what was measured, and hold it against what is promised. By `late_s` the machine may be late."""
    for number in sorted({one.number for one in falls}):
        of_kind = [one for one in falls if one.number is number]
        print(f"\n{number.name} × {len(of_kind)} (seconds: least, median, most)", end="")
        for name in ("noticed", "told", "back", "hot"):
            seconds = [getattr(one, name) for one in of_kind]
            low, middle, high = min(seconds), statistics.median(seconds), max(seconds)
            print(f"; {name} {low:.2f}, {middle:.2f}, {high:.2f}", end="")
    refusals = sum((one.refusals for one in falls), Counter[tuple[int, str]]())
    print(f"\nrefused meanwhile: {dict(refusals)}")
    assert set(refusals) <= {(503, "engine_restarting")}
    assert refusals or len(falls) == 1, "of several deaths some client asks meanwhile"
    assert all(one.noticed <= NOTICED_WITHIN_S[one.number] + late_s for one in falls)
    assert max(one.told for one in falls) < TOLD_WITHIN_S + late_s
    assert max(one.back for one in falls) < BACK_WITHIN_S + late_s


def drill(
    server: LiveServer,
    models: Sequence[str],
    sockets: Path,
    order: Sequence[signal.Signals],
    *,
    quiet_s: float,
    late_s: float = 0.0,
) -> None:
    """Each life serves before it is ended, so that no number of them is a crash loop. `models` are what streams of the
    tenant acme ask for."""
    key = server.create_key("acme")
    for model in set(models):
        Streams(server, key, [model], max_tokens=3).join()
    open_all_connections(server)
    before = Holdings.settled(server, sockets, quiet_s)
    falls: list[Fall] = []
    memory: list[int] = []
    for life, number in enumerate(order, 1):
        falls.append(fall(server, key, models, number, life))
        server.wait(server.spare_is_ready)
        memory.append(psutil.Process(server.pid).memory_info().rss)
    after = Holdings.settled(server, sockets, quiet_s)
    settled = memory[min(SETTLED_AFTER, len(order)) - 1]
    print(f"\nheld before the first death {before}\nand after the last {after}", end="")
    print(f"\nserver's memory {settled >> 20} MiB, at most {max(memory) / settled - 1:+.2%} later", end="")
    check(falls, late_s)
    assert after == before
    # An engine, its spare, and the process that checks grammars.
    assert (after.children, after.zombies, after.sockets, after.kv_blocks) == (3, 0, (), 0)
    assert max(memory) <= settled * (1 + MAX_GROWTH)
    engine = server.engine()
    assert (engine["healthy"], engine["restarts"]) == (True, len(order))
    assert server.stop() == 0


@pytest.fixture
def sockets(tmp_path: Path) -> Path:
    """The folder in which the server makes its engines' sockets."""
    made = tmp_path / "sockets"
    made.mkdir()
    return made


@pytest.mark.slow
def test_a_death_is_told_and_leaves_nothing(
    tiny_model: Path, tiny_adapter: Path, tmp_path: Path, sockets: Path
) -> None:
    with LiveServer(
        tiny_model,
        tmp_path / "data",
        environment={"TMPDIR": str(sockets)},
        engine_spare=True,
        **TINY_TORCH,
    ) as server:
        server.create_tenant("acme")
        server.upload("acme", "a", tiny_adapter)
        drill(server, ("tiny", "a"), sockets, [signal.SIGKILL], quiet_s=1.0, late_s=10.0)


@pytest.mark.soak
def test_a_hundred_deaths_are_told_and_leave_nothing(
    real_model_dir: Path, tmp_path: Path, sockets: Path
) -> None:
    order = [signal.SIGKILL] * 80 + [signal.SIGSTOP] * 20
    random.Random(SEED).shuffle(order)
    with LiveServer(
        real_model_dir,
        tmp_path / "data",
        environment={"TMPDIR": str(sockets)},
        served_model_name=SERVED_NAME,
        engine_spare=True,
        **SMALL,
    ) as server:
        server.create_tenant("acme")
        for name in EXAMPLES:
            server.upload("acme", name, EXAMPLE_ADAPTERS / name)
        drill(server, (SERVED_NAME, *EXAMPLES) * 3, sockets, order, quiet_s=15.0)
