"""The outside check of `serve --replicas 2` on its defaults: both planes, a killed engine under streams, exact limits,
and the end.

    make drill ARGS=--outside

The server runs as an operator starts it, once by local processes and once on Ray, with a real model. `hurried` is a
tenant with a request rate, which asks from the first request to the last, through the kill: what it gets is the rate's
burst and what flows back, no less and no more. `bounded` is a tenant with a budget of tokens for just the requests of
the check: those before the kill, the streams under it and those after it.
"""

from __future__ import annotations

import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from support.servers.live_server import SERVE, LiveServer, checked
from support.servers.live_streams import Streams

MANAGERS = ("local", "ray")
STREAMS = 8
TOKENS = 160
"""Length of each answer, in tokens."""
ASKED = 8
"""Requests before the kill, and as many after it."""
RATE = 60
"""Requests a minute of the hurried tenant."""
PAUSE_S = 0.05
WHOLE_S = 60.0
START_S = 300.0
STOP_S = 60.0


@dataclass
class Hurried:
    """Requests of one token, one after the other, until `end`. `passed`: when each that passed was sent and answered.
    `others`: statuses that are neither 200 nor 429."""

    client: httpx.Client
    model: str
    passed: list[tuple[float, float]] = field(default_factory=list)
    refused: int = 0
    others: list[int] = field(default_factory=list)
    _end: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        body = {"model": self.model, "prompt": "one", "max_tokens": 1}
        while not self._end.wait(PAUSE_S):
            sent = time.monotonic()
            status = self.client.post("/v1/completions", json=body).status_code
            if status == 200:
                self.passed.append((sent, time.monotonic()))
            elif status == 429:
                self.refused += 1
            else:
                self.others.append(status)

    def end(self) -> None:
        self._end.set()

    @property
    def surplus(self) -> float:
        """Requests by which the worst stretch exceeds the rate's burst and what flows back in it; at most 0."""
        ordered = sorted(self.passed)
        return max(
            count - RATE * (1 + (answered - sent) / 60)
            for first, (sent, _) in enumerate(ordered)
            for count, (_, answered) in enumerate(ordered[first:], 1)
        )

    def missing(self, until: float) -> float:
        """Requests by which all together fall behind the burst and what has flowed back until then."""
        return RATE * (1 + (until - min(self.passed)[0]) / 60) - len(self.passed)


@dataclass
class Figures:
    """The findings of one run. `faults`: texts of what was not as it must be."""

    manager: str
    start_s: float = 0.0
    whole_s: float = 0.0
    stop_s: float = 0.0
    same_texts: int = 0
    hurried: str = ""
    budget: str = ""
    faults: list[str] = field(default_factory=list)

    def expect(self, holds: bool, what: str) -> None:
        if not holds:
            self.faults.append(what)

    def __str__(self) -> str:
        lines = [
            f"engines by {self.manager}: ready after {self.start_s:.1f} s",
            f"  an engine killed under {STREAMS} streams: {self.same_texts} texts as undisturbed; whole after "
            f"{self.whole_s:.1f} s (at most {WHOLE_S:g})",
            f"  {self.hurried}",
            f"  {self.budget}",
            f"  SIGTERM: ended after {self.stop_s:.1f} s",
            *(f"  MISSED: {fault}" for fault in self.faults),
        ]
        return "\n".join(lines)


def check_outside(model: str, managers: tuple[str, ...] = MANAGERS) -> bool:
    """Run and print the check for each of them; whether all was as it must be."""
    found = []
    for manager in managers:
        with tempfile.TemporaryDirectory() as folder:
            figures = Figures(manager)
            _check(figures, model, Path(folder))
        print(figures, flush=True)
        found.append(figures)
    return not any(figures.faults for figures in found)


def _check(figures: Figures, model: str, folder: Path) -> None:
    server = LiveServer(model, folder / "data")
    server.command = [
        *SERVE, "--model", model, "--data-dir", str(server.data_dir), "--replicas", "2", "--replica-manager",
        figures.manager, "--port", str(server.data_port), "--admin-port", str(server.admin_port),
    ]  # fmt: skip
    begun = time.monotonic()
    try:
        server.start(wait=False)
        server.wait_ready(START_S)
        server.wait(lambda: len(_ready(server)) == 2, START_S)
        figures.start_s = time.monotonic() - begun
        _ask(figures, server)
        family = psutil.Process(server.pid).children(recursive=True)
        begun = time.monotonic()
        code = server.stop(STOP_S)
        figures.stop_s = time.monotonic() - begun
        figures.expect(code == 0, f"the server's status is {code}")
        _, alive = psutil.wait_procs(family, timeout=5)
        figures.expect(not alive, f"{len(alive)} processes are left")
    except AssertionError as error:
        figures.faults.append(str(error))
    finally:
        server.reap()


def _ask(figures: Figures, server: LiveServer) -> None:
    """All that is asked of a server with two engines."""
    (model,) = (row["id"] for row in checked(_data(server).get("/v1/models"))["data"])
    cost = _cost(server, model)
    budget = (2 * ASKED + 2 * STREAMS) * cost
    server.create_tenant("bounded", limits={"token_budget": budget, "budget_period": "forever"})
    bounded = server.create_key("bounded")
    with _hurried(server, model) as hurried:
        first = [_complete(server, bounded, model) for _ in range(ASKED)]
        undisturbed = Streams(server, bounded, [model] * STREAMS, max_tokens=TOKENS)
        undisturbed.join(START_S)
        streams = Streams(server, bounded, [model] * STREAMS, max_tokens=TOKENS)
        streams.wait_until_all_run()
        victim = _ready(server)[0]["pid"]
        figures.expect(streams.all_run_on, "a stream had ended before the kill")
        os.kill(victim, signal.SIGKILL)
        killed = time.monotonic()
        before = len(hurried.passed)
        server.wait(lambda: victim not in _pids(server), START_S)
        server.wait(lambda: len(_ready(server)) == 2, START_S)
        figures.whole_s = time.monotonic() - killed
        streams.join(START_S)
        with ThreadPoolExecutor(ASKED) as pool:  # at once, and one too many for each of them
            last = list(pool.map(lambda _: _complete(server, bounded, model), range(2 * ASKED)))
    until = time.monotonic()
    texts = [story.text for story in (*undisturbed.stories, *streams.stories)]
    figures.same_texts = sum(story.text == texts[0] for story in streams.stories)
    figures.expect(figures.whole_s <= WHOLE_S, "whole too late")
    figures.expect(all(story.finished for story in streams.stories), "a stream broke")
    figures.expect(figures.same_texts == STREAMS, "a text is another one")
    _judge_rate(figures, hurried, before, until)
    _judge_budget(figures, server, budget, cost, first, last)


def _judge_rate(figures: Figures, hurried: Hurried, before: int, until: float) -> None:
    surplus, missing = hurried.surplus, hurried.missing(until)
    figures.hurried = (
        f"{RATE} requests a minute: {len(hurried.passed)} passed, {before} of them before the kill, {hurried.refused} "
        f"refused; worst stretch {surplus:+.1f} of what it may, all together {-missing:+.1f}"
    )
    figures.expect(surplus <= 0, "the rate let too many through")
    figures.expect(missing <= 2, "the rate let too few through")
    figures.expect(not hurried.others, f"other statuses: {hurried.others}")
    figures.expect(hurried.refused > 0, "the rate refused nothing")


def _judge_budget(
    figures: Figures, server: LiveServer, budget: int, cost: int, first: list[int], last: list[int]
) -> None:
    def used() -> int:
        rows = checked(server.admin.get("usage", params={"tenant": "bounded", "group_by": "tenant"}))["data"]
        return sum(int(row["prompt_tokens"]) + int(row["completion_tokens"]) for row in rows)

    _until(lambda: used() >= budget, 30)
    passed, ledger = first.count(200) + last.count(200), used()
    figures.budget = (
        f"a budget of {budget} tokens, {cost} a request: {passed} requests and {2 * STREAMS} streams passed, "
        f"{last.count(429)} of {len(last)} refused after the kill; ledger {ledger}"
    )
    figures.expect(first == [200] * ASKED, f"before the kill: {first}")
    figures.expect(sorted(last) == [200] * ASKED + [429] * ASKED, f"after the kill: {sorted(last)}")
    figures.expect(ledger == budget, "the ledger has another sum than the budget")


@contextmanager
def _hurried(server: LiveServer, model: str) -> Iterator[Hurried]:
    server.create_tenant("hurried", limits={"requests_per_minute": RATE})
    with server.client(server.create_key("hurried")) as client:
        hurried = Hurried(client, model)
        thread = threading.Thread(target=hurried.run)
        thread.start()
        try:
            yield hurried
        finally:
            hurried.end()
            thread.join()


def _body(model: str) -> dict[str, Any]:
    return {"model": model, "prompt": "one", "max_tokens": TOKENS, "ignore_eos": True, "temperature": 0}


def _complete(server: LiveServer, key: str, model: str) -> int:
    with server.client(key) as client:
        return client.post("/v1/completions", json=_body(model)).status_code


def _cost(server: LiveServer, model: str) -> int:
    """Tokens of a request."""
    server.create_tenant("first")
    with server.client(server.create_key("first")) as client:
        return int(checked(client.post("/v1/completions", json=_body(model)))["usage"]["total_tokens"])


def _data(server: LiveServer) -> httpx.Client:
    server.create_tenant("looking")
    return server.client(server.create_key("looking"))


def _ready(server: LiveServer) -> list[dict[str, Any]]:
    replicas: list[dict[str, Any]] = checked(server.admin.get("cluster"))["replicas"]
    return [replica for replica in replicas if replica["state"] == "ready"]


def _pids(server: LiveServer) -> list[int]:
    return [replica["pid"] for replica in _ready(server)]


def _until(condition: Callable[[], bool], timeout_s: float) -> None:
    end = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < end:
        time.sleep(0.2)
