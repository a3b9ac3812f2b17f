"""A training that pushes a checkpoint every ten seconds to a server that is answering others.

    PYTHONPATH=tests python -m bench.adapters.training_pushes MODEL [--minutes 10] [--every 10] [--window 30]
        [--streams 16] [--nice 10]

MODEL is the directory of a model of Llama's form. `bench.adapters.pushing_trainer` trains it in a process of its own,
with one thread and `--nice`, for the whole run. In every second window of `--window` seconds it pushes its checkpoints;
in the others it trains and saves as well, but pushes nothing. Meanwhile `--streams` clients ask for 8 other adapters
without a pause, and a prober asks for the trained one by its bare name. All prompts are fixed and all answers greedy,
with log probabilities for the trained adapter. So on a CPU each answer has one right form, whatever runs beside it.

Counted over all requests:

- `stale`: a request that was sent after a push had been acknowledged was answered by an older version;
- `torn`: an answer differs from the one that its version gives when the training is over and the server was restarted;
- `leaked`: an answer of another adapter differs from the first one to the same question;
- `told apart`: neighbouring versions whose answers differ, of all pairs: what a swap could have been seen in.

Push to first token runs from the end of a checkpoint's save until a request that is sent when the push is acknowledged
has its first token from the new version. Throughput is that of the streams alone; a ratio is of neighbouring windows.
The aims are 0 wrong answers, 1.5 s at the median, and a ratio of 0.95.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil

from bench.adapters.population import KINDS, AdapterFactory, Population, architecture, register
from bench.adapters.pushing_trainer import NAME, TENANT
from bench.adapters.traffic import Answer, Question, Seen, ask, keep_asking, open_client
from bench.beside_vllm import place
from support.servers.live_server import LiveServer

ROOT = Path(__file__).resolve().parents[2]
NUM_ADAPTERS, NUM_PROMPTS = 8, 4
PROBE_TOKENS = 8


@dataclass
class Push:
    """One acknowledged push; times of time.monotonic. `first_token` is that of a request sent at `acknowledged`."""

    version: int
    saved: float
    acknowledged: float
    first_token: float = 0.0


@dataclass
class Run:
    """All that was seen."""

    pushes: list[Push] = field(default_factory=list)
    probes: list[Answer] = field(default_factory=list)
    streams: list[Answer] = field(default_factory=list)
    windows: list[tuple[bool, float, float, float]] = field(default_factory=list)
    """Of each: whether it had pushes, begin, end, and the trainer's seconds of the processor."""
    saves: int = 0


def probe_question(key: str, model: str = NAME) -> Question:
    return Question(model, key, "The training has reached step", PROBE_TOKENS, logprobs=0)


async def follow(trainer: asyncio.subprocess.Process, client: httpx.AsyncClient, key: str, run: Run) -> None:
    """Read the trainer's lines, and ask for each new version as soon as its push is acknowledged."""

    async def first(push: Push) -> None:
        answer = await ask(client, probe_question(key), time.perf_counter())
        run.probes.append(answer)
        if answer.arrivals and version_of(answer) >= push.version:
            push.first_token = answer.arrivals[0]

    assert trainer.stdout is not None
    async with asyncio.TaskGroup() as group:
        async for line in trainer.stdout:
            told = json.loads(line)
            if told["event"] == "saved":
                run.saves += 1
            else:
                push = Push(int(told["version"].removeprefix("v")), told["saved"], told["at"])
                run.pushes.append(push)
                group.create_task(first(push))


def version_of(answer: Answer) -> int:
    return int(answer.version.rpartition("@v")[2] or 0)


@asynccontextmanager
async def training(
    options: argparse.Namespace, work: Path, url: str, key: str
) -> AsyncIterator[asyncio.subprocess.Process]:
    """The trainer's process; it ends with the block."""
    command = [sys.executable, "-m", "bench.adapters.pushing_trainer", str(options.model), str(work)]
    command += ["--url", url, "--key", key, "--every", str(options.every), "--nice", str(options.nice)]
    with open(work / "trainer.log", "wb") as log:
        trainer = await asyncio.create_subprocess_exec(
            *command,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"},
            start_new_session=True,
        )
    try:
        yield trainer
    finally:
        if trainer.returncode is None:
            trainer.kill()
        await trainer.wait()


async def observe(
    options: argparse.Namespace, server: LiveServer, population: Population, key: str, work: Path
) -> Run:
    """The training from its first push on, for `--minutes`."""
    run, over = Run(), asyncio.Event()
    async with (
        open_client(server.data_url) as client,
        training(options, work, server.data_url, key) as trainer,
        asyncio.TaskGroup() as group,
    ):
        following = group.create_task(follow(trainer, client, key, run))
        while not run.pushes:
            if following.done():
                raise SystemExit(f"the trainer has ended:\n{(work / 'trainer.log').read_text()[-2000:]}")
            await asyncio.sleep(0.1)
        for number in range(options.streams):
            asked = stream_questions(population, number, options.tokens)
            group.create_task(keep_asking(client, asked, over.is_set, run.streams))
        group.create_task(keep_asking(client, _repeat(probe_question(key)), over.is_set, run.probes))
        await asyncio.sleep(options.ramp)
        process = psutil.Process(trainer.pid)
        count = max(2, int(options.minutes * 60 / options.window))
        for number in range(count):
            pushing = number % 4 in (1, 2)  # no kind is always first of its pair
            (work / "hold").unlink(missing_ok=True) if pushing else (work / "hold").touch()
            used, begin = sum(process.cpu_times()[:2]), time.perf_counter()
            await asyncio.sleep(options.window)
            used = sum(process.cpu_times()[:2]) - used
            run.windows.append((pushing, begin, time.perf_counter(), used))
            print(f"# window {number}, {'pushes' if pushing else 'none'}, trainer {used:.1f} s", flush=True)
        over.set()
        (work / "stop").touch()
    return run


def stream_questions(population: Population, number: int, tokens: int) -> Iterator[Question]:
    turn = number
    while True:
        adapter, prompt = turn % NUM_ADAPTERS, turn // NUM_ADAPTERS % NUM_PROMPTS
        yield Question(
            population.name(adapter),
            population.key(adapter),
            f"{prompt}. A story about the sea. " * 6,
            tokens,
        )
        turn += 1


def _repeat(question: Question) -> Iterator[Question]:
    while True:
        yield question


async def ask_versions(server: LiveServer, key: str, versions: list[int]) -> dict[int, Answer]:
    """Each version's answer, one at a time."""
    async with open_client(server.data_url) as client:
        return {
            version: await ask(client, probe_question(key, f"{NAME}@v{version}"), time.perf_counter())
            for version in versions
        }


def judge(run: Run, right: dict[int, Answer]) -> dict[str, int]:
    """Counts of wrong answers."""
    wrong: Counter[str] = Counter(
        dict.fromkeys(("errors", "stale", "torn", "leaked", "told apart", "pairs"), 0)
    )
    wrong["errors"] = sum(a.error is not None for a in [*run.probes, *run.streams, *right.values()])
    for answer in run.probes:
        if answer.error is not None:
            continue
        version = version_of(answer)
        newest = max((p.version for p in run.pushes if p.acknowledged <= answer.due), default=0)
        wrong["stale"] += version < newest
        wrong["torn"] += answer.said != right[version].said
    first: dict[tuple[str, str], object] = {}
    for answer in run.streams:
        if answer.error is None:
            question = answer.question.model, answer.question.prompt
            wrong["leaked"] += first.setdefault(question, answer.said) != answer.said
    said = [right[version].said for version in sorted(right)]
    wrong["pairs"] = max(0, len(said) - 1)
    wrong["told apart"] = sum(a != b for a, b in itertools.pairwise(said))
    return dict(wrong)


def ratios_of(run: Run) -> tuple[dict[str, list[float]], list[float]]:
    """Output tokens a second of the streams in each window, and the ratios of neighbours: with pushes to without."""
    rates: dict[str, list[float]] = {"pushes": [], "none": []}
    for pushing, begin, end, _ in run.windows:
        rates["pushes" if pushing else "none"].append(Seen().add(run.streams, begin, end))
    return rates, [a / b for a, b in zip(rates["pushes"], rates["none"], strict=False)]


def main(arguments: list[str] | None = None) -> dict[str, int]:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    for name, whole in (("streams", 16), ("tokens", 64), ("nice", 10)):
        parser.add_argument(f"--{name}", type=int, default=whole)
    for name, real in (("minutes", 10.0), ("every", 10.0), ("window", 30.0), ("ramp", 5.0)):
        parser.add_argument(f"--{name}", type=float, default=real)
    parser.add_argument("--kv", default="512MiB", help="memory of the KV cache")
    parser.add_argument(
        "--adapter-memory", default="64MiB", help="device memory, and host memory, for adapters"
    )
    options = parser.parse_args(arguments)
    print(f"# {place()}", flush=True)
    settings = {
        "adapter_memory": options.adapter_memory, "adapter_cpu_memory": options.adapter_memory,
        "kv_cache_memory": options.kv, "threads": 0,
    }  # fmt: skip
    with (
        tempfile.TemporaryDirectory() as folder,
        LiveServer(options.model, Path(folder) / "data", **settings) as server,
    ):
        work = Path(folder)
        factory = AdapterFactory(architecture(options.model), KINDS["qv"], NUM_ADAPTERS)
        population = register(server, factory, NUM_ADAPTERS, 4)
        server.create_tenant(TENANT)
        key = server.create_key(TENANT, scopes=["inference", "adapters:read", "adapters:write"])
        run = asyncio.run(observe(options, server, population, key, work))
        server.stop()
        server.start()
        right = asyncio.run(ask_versions(server, key, sorted({push.version for push in run.pushes})))
    counts = judge(run, right)
    _print(run, counts)
    return counts


def _print(run: Run, counts: dict[str, int]) -> None:
    waits = sorted(p.first_token - p.saved for p in run.pushes if p.first_token)
    acknowledged = [p.acknowledged - p.saved for p in run.pushes]
    rates, ratios = ratios_of(run)
    print(
        f"\n{len(run.pushes)} pushes of {run.saves} checkpoints; {len(run.probes)} probes, {len(run.streams)} answers"
    )
    print(", ".join(f"{name} {count}" for name, count in counts.items()))
    print(
        f"push to first token: median {statistics.median(waits):.2f} s, longest {waits[-1]:.2f} s; of it until "
        f"acknowledged: median {statistics.median(acknowledged):.2f} s"
    )
    for name, of in rates.items():
        used = [
            spent / (end - begin) for kind, begin, end, spent in run.windows if kind == (name == "pushes")
        ]
        print(
            f"{name:8} {statistics.median(of):.1f} tokens/s ({', '.join(f'{rate:.0f}' for rate in of)}), trainer "
            f"{statistics.mean(used):.2f} of a core"
        )
    print(f"ratio {statistics.median(ratios):.3f} ({', '.join(f'{ratio:.3f}' for ratio in ratios)})")


if __name__ == "__main__":
    main()
