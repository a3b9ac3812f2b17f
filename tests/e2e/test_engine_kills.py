"""Engine after engine killed under streams of several adapters on the real model: each death is told, each time service
comes back, and a hundred lives later the server is what it was."""

from __future__ import annotations

import os
import random
import signal
import statistics
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

import httpx
import psutil
import pytest

from support.live_server import EXAMPLE_ADAPTERS, EXAMPLES, SERVED_NAME, SMALL, LiveServer, wait_gone
from support.live_streams import Streams

SEED = 20
MODELS = (SERVED_NAME, *EXAMPLES)
NOTICED_WITHIN_S = 10.0
TOLD_WITHIN_S = 1.0
BACK_WITHIN_S = 10.0
SETTLED_AFTER = 10
"""Lives after which the server has met nearly all that it will."""
MAX_GROWTH = 0.02


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


@dataclass(frozen=True)
class Holdings:
    """What the server holds while nobody asks for anything."""

    descriptors: int
    threads: int
    children: int
    zombies: int
    sockets: tuple[str, ...]
    arena_pages: int

    @classmethod
    def of(cls, server: LiveServer, sockets: Path) -> Holdings:
        process = psutil.Process(server.pid)
        children = process.children(recursive=True)
        return cls(
            descriptors=process.num_fds(),
            threads=process.num_threads(),
            children=len(children),
            zombies=sum(child.status() == psutil.STATUS_ZOMBIE for child in children),
            sockets=tuple(path.name for path in sockets.glob("loraplex-*")),
            arena_pages=server.stats()["num_arena_pages_used"],
        )


def noticed_at(server: LiveServer, life: int) -> float:
    """When the server logged this loss, by the monotonic clock."""
    logged = datetime.fromisoformat(server.logged("engine_lost")[life - 1]["timestamp"]).timestamp()
    return logged - time.time() + time.monotonic()


def fall(server: LiveServer, key: str, number: signal.Signals, life: int) -> Fall:
    """Streams of all models, the signal, and what came of it."""
    streams = Streams(server, key, MODELS * 3, max_tokens=2000)
    streams.wait_until_all_run()
    hot = server.residency()
    server.wait(server.spare_is_ready)
    engine = server.engine_pid()
    assert engine is not None
    os.kill(engine, number)
    signalled = time.monotonic()
    streams.join()
    probe = Probe(server, key, MODELS[life % len(MODELS)])
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


def check(falls: Sequence[Fall]) -> None:
    """Print what was measured, and hold it against what is promised."""
    for number in sorted({one.number for one in falls}):
        of_kind = [one for one in falls if one.number is number]
        print(f"\n{number.name} × {len(of_kind)} (seconds: least, median, most)", end="")
        for name in ("noticed", "told", "back", "hot"):
            seconds = [getattr(one, name) for one in of_kind]
            low, middle, high = min(seconds), statistics.median(seconds), max(seconds)
            print(f"; {name} {low:.2f}, {middle:.2f}, {high:.2f}", end="")
    refusals = sum((one.refusals for one in falls), Counter[tuple[int, str]]())
    print(f"\nrefused meanwhile: {dict(refusals)}")
    assert set(refusals) == {(503, "engine_restarting")}
    # On a busy machine the kernel takes its time to end a process of this size, and nobody can know before it has.
    assert statistics.median(one.noticed for one in falls if one.number is signal.SIGKILL) < TOLD_WITHIN_S
    assert max(one.noticed for one in falls) < NOTICED_WITHIN_S
    assert max(one.told for one in falls) < TOLD_WITHIN_S
    assert max(one.back for one in falls) < BACK_WITHIN_S


@pytest.mark.parametrize(
    ("kills", "stops"),
    [
        pytest.param(1, 1, marks=pytest.mark.slow, id="short"),
        pytest.param(80, 20, marks=pytest.mark.soak, id="long"),
    ],
)
def test_every_death_is_told_and_service_comes_back(
    real_model_dir: Path, tmp_path: Path, kills: int, stops: int
) -> None:
    """Each life serves before it is ended, so that no number of them is a crash loop."""
    order = [signal.SIGKILL] * kills + [signal.SIGSTOP] * stops
    random.Random(SEED).shuffle(order)
    sockets = tmp_path / "sockets"
    sockets.mkdir()
    server = LiveServer(
        real_model_dir,
        tmp_path / "data",
        environment={"TMPDIR": str(sockets)},
        served_model_name=SERVED_NAME,
        engine_spare=True,
        **SMALL,
    )
    with server:
        server.create_tenant("acme")
        for name in EXAMPLES:
            server.upload("acme", name, EXAMPLE_ADAPTERS / name)
        key = server.create_key("acme")
        falls: list[Fall] = []
        held: list[Holdings] = []
        memory: list[int] = []
        for life, number in enumerate(order, 1):
            falls.append(fall(server, key, number, life))
            server.wait(server.spare_is_ready)
            memory.append(psutil.Process(server.pid).memory_info().rss)
            held.append(Holdings.of(server, sockets))
        settled_after = min(SETTLED_AFTER, len(order))
        settled, before, after = memory[settled_after - 1], held[settled_after - 1], held[-1]
        print(f"\nheld after {settled_after} deaths {before}\nand after the last {after}", end="")
        print(
            f"\nserver's memory {settled >> 20} MiB, at most {max(memory) / settled - 1:+.2%} later", end=""
        )
        check(falls)
        # Pools of threads grow by one now and then until they are full; a leak grows with every death.
        for before_it, after_it in (
            (before.threads, after.threads),
            (before.descriptors, after.descriptors),
        ):
            assert 10 * (after_it - before_it) <= len(order) - settled_after
        assert after.arena_pages == before.arena_pages
        assert (after.children, after.zombies, after.sockets) == (2, 0, ())
        assert max(memory) <= settled * (1 + MAX_GROWTH)
        engine = server.engine()
        assert (engine["healthy"], engine["restarts"]) == (True, len(order))
        assert server.stop() == 0
