"""Pushes at a fixed rate for minutes: whether each answer is that of its version, and what streams keep of their speed.

Some adapters are pushed to one series in turn. It keeps fewer of them, so that each is new again when it comes back.
Before that each was uploaded by another tenant, whose answer is what is expected: the text and the log probability of
each token, to the last bit. An answer that is another version's is stale, one that is no version's is torn.
"""

from __future__ import annotations

import itertools
import json
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from bench.push.client import SCOPES, write_adapter
from bench.push.streams import Streams, tokens_per_s
from loraplex.adapters.store.files import CONFIG_NAME, TENSORS_NAME
from support.servers.live_server import LiveServer, checked

NUM_ADAPTERS, KEPT = 24, 6
PUSHERS = 4
"""Pushes under way at a time, at most."""
QUIET_S = 60.0
"""The most seconds without pushes, before and again after them."""
PROMPT = "The quick brown fox jumps over the lazy dog. " * 4
"""Longer than a block of the KV cache."""
NUM_TOKENS = 4
Answer = tuple[str, tuple[float, ...]]


@dataclass
class Result:
    """Outcomes are counts of `right`, `stale`, `torn` and `failed`. Seconds are from a push to the end of an answer,
    and from its turn to its beginning."""

    outcomes: Counter[str] = field(default_factory=Counter)
    push_s: list[float] = field(default_factory=list)
    answer_s: list[float] = field(default_factory=list)
    late_s: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


def ask(client: httpx.Client, model: str) -> Answer:
    asked = {"model": model, "prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0, "logprobs": 1}
    choice = checked(client.post("/v1/completions", json=asked | {"ignore_eos": True}))["choices"][0]
    return choice["text"], tuple(choice["logprobs"]["token_logprobs"])


class Soak:
    """A server with adapters whose answers are known. `work` is an empty folder."""

    def __init__(self, server: LiveServer, work: Path) -> None:
        self._server = server
        for tenant in ("judge", "streams", "trainer"):
            server.create_tenant(tenant)
        self._keys = {tenant: server.create_key(tenant, scopes=SCOPES) for tenant in ("judge", "streams")}
        self._keys["trainer"] = server.create_key("trainer", scopes=SCOPES)
        folders = [work / f"soak{number}" for number in range(NUM_ADAPTERS)]
        files = [write_adapter(folder, 5000 + number) for number, folder in enumerate(folders)]
        self._tensors = [each[TENSORS_NAME] for each in files]
        for seed in (4000, 4001):
            write_adapter(work / str(seed), seed)
            server.upload("streams", "steady", work / str(seed))
        with self._client("streams") as client:
            self._steady = ask(client, "steady@v1")
        with self._client("judge") as client:
            self._expected = []
            for folder in folders:
                version = server.upload("judge", "truth", folder)["version"]
                self._expected.append(ask(client, f"truth@{version}"))
            if len(set(self._expected)) < NUM_ADAPTERS:
                raise RuntimeError("two adapters give the same answer: nothing would be told by it")
        checked(server.admin.delete("tenants/judge/adapters/truth"), 204)
        with self._client("trainer") as client:
            rules = {"keep_last": KEPT, "check_every": 10_000, "config": json.loads(files[0][CONFIG_NAME])}
            checked(client.put("/admin/v1/tenants/trainer/adapters/lane/series", json=rules))

    def run(self, rate: float, seconds: float, num_streams: int) -> None:
        """Push `rate` times a second beside the streams, and print what came of it."""
        models = ["steady@v1", "steady@v2"]
        quiet_s = min(QUIET_S, seconds / 2)
        with Streams(lambda: self._client("streams"), models, num_streams) as streams:
            # The same requests for a version that is there, so that the pushes are all that differs.
            quiet = [self._measure(streams, rate, quiet_s, self._ask_resident)]
            warm = self._measure(streams, rate, min(quiet_s, 30.0), self._push)
            memory = self._memory_mib()
            pushed = self._measure(streams, rate, seconds, self._push)
            after = self._memory_mib()
            quiet.append(self._measure(streams, rate, quiet_s, self._ask_resident))
        for name, one in (("first pushes", warm), ("pushes", pushed)):
            _print(name, one[0])
        print(f"\n{len(pushed[0].push_s) / seconds:.1f} pushes a second, of {rate:g} that were to be.")
        speeds = [speed for _, speed in quiet]
        mean = statistics.mean(speeds)
        print(
            f"\nStreams, tokens a second: {speeds[0]:.1f} before, {pushed[1]:.1f} while pushing, {speeds[1]:.1f} after:"
        )
        print(f"{pushed[1] / mean:.3f} of those without pushes and with as many requests are kept.")
        for name, first, last in zip(("server", "engine"), memory, after, strict=True):
            print(f"Memory of the {name}: {first:.0f} MiB after the first pushes, {last:.0f} MiB at the end.")

    def _measure(
        self, streams: Streams, rate: float, seconds: float, act: Callable[[httpx.Client, int, Result], None]
    ) -> tuple[Result, float]:
        """Do `act` at a rate, or as often as the server lets; return its result, and the streams' tokens a second."""
        result, turns, began = Result(), itertools.count(), time.monotonic()

        def work() -> None:
            with self._client("streams" if act == self._ask_resident else "trainer") as client:
                while (turn := next(turns)) / rate < seconds:
                    late = time.monotonic() - began - turn / rate
                    if late < 0:
                        time.sleep(-late)
                    elif turn / rate + late > seconds:  # a server that is behind does not get longer for it
                        break
                    result.late_s.append(max(0.0, late))
                    try:
                        act(client, turn, result)
                    except (httpx.HTTPError, AssertionError, KeyError) as error:
                        result.outcomes["failed"] += 1
                        result.failures.append(repr(error)[:300])

        workers = [threading.Thread(target=work) for _ in range(PUSHERS)]
        for worker in workers:
            worker.start()
        speed = tokens_per_s(streams, seconds)
        for worker in workers:
            worker.join()
        return result, speed

    def _push(self, client: httpx.Client, turn: int, result: Result) -> None:
        number, began = turn % NUM_ADAPTERS, time.monotonic()
        kind = {"content-type": "application/octet-stream"}
        path = "/admin/v1/tenants/trainer/adapters/lane/series/versions"
        answer = client.post(path, content=self._tensors[number], headers=kind)
        version = checked(answer, answer.status_code if answer.status_code == 200 else 201)
        assert version["state"] == "ready", version
        result.push_s.append(time.monotonic() - began)
        found = ask(client, f"lane@{version['version']}")
        result.answer_s.append(time.monotonic() - began)
        right = found == self._expected[number]
        result.outcomes["right" if right else "stale" if found in self._expected else "torn"] += 1

    def _ask_resident(self, client: httpx.Client, turn: int, result: Result) -> None:
        began = time.monotonic()
        found = ask(client, "steady@v1")
        result.answer_s.append(time.monotonic() - began)
        result.outcomes["right" if found == self._steady else "torn"] += 1

    def _client(self, tenant: str) -> httpx.Client:
        return self._server.client(self._keys[tenant])

    def _memory_mib(self) -> list[float]:
        pids = (self._server.pid, self._server.engine_pid() or 0)
        return [psutil.Process(pid).memory_info().rss / (1 << 20) for pid in pids]


def percentile(values: Sequence[float], share: float) -> float:
    """The value that this share of them lie below, NaN of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


def _print(name: str, result: Result) -> None:
    counts = {outcome: result.outcomes[outcome] for outcome in ("right", "stale", "torn", "failed")}
    print(f"\n{name}: {', '.join(f'{count} {outcome}' for outcome, count in counts.items())}")
    for failure, count in Counter(result.failures).most_common(3):
        print(f"  {count} times {failure}")
    rows: dict[str, Any] = {"push": result.push_s, f"push and {NUM_TOKENS} tokens": result.answer_s}
    rows["behind its turn"] = result.late_s
    print("\n| wall s | p50 | p99 | most |\n|---|---|---|---|")
    for what, values in rows.items():
        shown = (percentile(values, 0.5), percentile(values, 0.99), max(values, default=float("nan")))
        print(f"| {what} | {' | '.join(f'{value:.3f}' for value in shown)} |")
