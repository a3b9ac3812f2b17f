"""Thousands of registered adapters on a real server with little memory, beside five of them on the same server.

    PYTHONPATH=tests python -m bench.adapters.two_thousand MODEL [--kind qv|mixed] [--adapters 2000] [--hot 32]
        [--warm 256] [--traces zipf,0.1,0.5,1] [--streams 32] [--slots 16] [--rounds 6] [--seconds 15] [--work DIR]

MODEL is the directory of a model of Llama's form. `loraplex serve` gets device memory for `--hot` adapters, host memory
for `--warm`, and `--adapters` uploads of `--tenants` tenants through the admin API (`qv`: rank 8 on q_proj and v_proj;
`mixed`: ranks 8 to 64 on all seven). `--work` keeps them for the next run.

`zipf` is a closed loop: `--streams` clients each ask again when they are answered, for an adapter by Zipf(1.1) of all,
or for one of the `--few` first ones. More streams than `--slots` keep the batch full. A number is a trace as S-LoRA
has it: place = adapters * u ** (1 / number), arrivals with Gamma gaps of `--variation`, at `--load` of the rate of
requests that the few got in a closed loop. The two take turns of `--seconds`, in changing order, after `--ramp`; a
ratio is of the neighbours of one round. The first round does not count. Each of the few is asked once before their
turn, so that it is on the device.

Printed for each trace: output tokens a second, milliseconds of the processor for each token in the engine process and
in the server's, tokens of a step (prompts' as well), the tiers on which requests found their adapters, milliseconds to
the first token; then the ratio, loads and evictions, seconds of a load by stage, the processes' memory before and
after.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil

from bench.adapters.population import (
    KINDS,
    AdapterFactory,
    Population,
    architecture,
    gamma_arrivals,
    mean_bytes,
    power_law,
    register,
    zipf,
)
from bench.adapters.traffic import (
    STATES,
    Answer,
    Question,
    Questions,
    Seen,
    ask,
    ask_at,
    keep_asking,
    open_client,
)
from bench.beside_vllm import place
from support.servers.live_server import LiveServer

FEW, MANY = "few", "many"
STAGES = ("disk", "fetch", "read", "lay_out", "copy")


class Bench:
    """A server with its population, and the turns on it."""

    def __init__(self, server: LiveServer, population: Population, options: argparse.Namespace) -> None:
        self._server, self._population, self._options = server, population, options
        engine = server.engine_pid()
        assert engine is not None
        self._processes = {"engine": psutil.Process(engine), "server": psutil.Process(server.pid)}
        self.processor = {arm: Counter[str]() for arm in (FEW, MANY)}
        """Of an arm's turns: seconds that each process used, output tokens ("tokens"), steps and their tokens."""
        self.few_rate = 0.0
        """Requests a second of the few in a closed loop; 0 until it was measured."""

    def questions(self, numbers: Iterator[int], seed: int) -> Iterator[Question]:
        population, drawn = self._population, Questions(seed)
        for number in numbers:
            yield drawn.draw(population.name(number), population.key(number))

    def numbers(self, arm: str, trace: str, seed: int) -> Iterator[int]:
        if arm == FEW:
            return itertools.cycle(range(self._options.few))
        count = self._population.count
        return zipf(count, 1.1, seed) if trace == "zipf" else power_law(count, float(trace), seed)

    async def turn(self, arm: str, trace: str, seed: int, seen: Seen) -> float:
        """One window of one arm. Returns its output tokens a second."""
        options, used = self._options, self.processor[arm]
        questions = self.questions(self.numbers(arm, trace, seed), seed)
        answers: list[Answer] = []
        async with open_client(self._server.data_url) as client:
            if arm == FEW:
                await self._make_few_resident(client)
            used.subtract(self._used())
            begin = time.perf_counter() + options.ramp
            end = begin + options.seconds
            if trace == "zipf":
                async with asyncio.TaskGroup() as group:
                    for _ in range(options.streams):
                        group.create_task(
                            keep_asking(client, questions, lambda: time.perf_counter() >= end, answers)
                        )
            else:
                start = begin - options.ramp
                rate = options.load * self.few_rate
                arrivals = (start + at for at in gamma_arrivals(rate, options.variation, seed))
                await ask_at(client, questions, itertools.takewhile(lambda at: at < end, arrivals), answers)
        used.update(self._used())
        used["tokens"] += sum(answer.tokens for answer in answers)
        return seen.add(answers, begin, end)

    async def _make_few_resident(self, client: httpx.AsyncClient) -> None:
        """Asks each of the few and waits for the answers: the many may have evicted them, and a ramp may hold no
        request for one of them. Raises RuntimeError where one is not answered."""
        once = Questions(0, tokens=(1, 1))
        drawn = [
            once.draw(self._population.name(n), self._population.key(n)) for n in range(self._options.few)
        ]
        answers = await asyncio.gather(*(ask(client, each, time.perf_counter()) for each in drawn))
        if errors := [answer.error for answer in answers if answer.error is not None]:
            raise RuntimeError(f"an adapter of the few was not loaded before its turn: {errors[0]}")

    def _used(self) -> dict[str, float]:
        used = {name: sum(process.cpu_times()[:2]) for name, process in self._processes.items()}
        stats = self._server.stats()
        return used | {name: float(stats[name]) for name in ("num_steps", "num_step_tokens")}

    def run(self, trace: str) -> dict[str, object]:
        """All rounds of one trace; prints what was seen and returns it."""
        seen, rates = {FEW: Seen(), MANY: Seen()}, {FEW: list[float](), MANY: list[float]()}
        warm: dict[str, float] = {}
        for number in range(-1, self._options.rounds):
            if number == 0:
                seen, rates = {FEW: Seen(), MANY: Seen()}, {FEW: [], MANY: []}
                warm = self._counters()
                self.processor = {arm: Counter() for arm in (FEW, MANY)}
            for arm in (FEW, MANY) if number % 2 else (MANY, FEW):
                rates[arm].append(asyncio.run(self.turn(arm, trace, number, seen[arm])))
                print(f"# {trace}, round {number}, {arm}: {rates[arm][-1]:.1f} tokens/s", flush=True)
        after = self._counters()
        if trace == "zipf":
            self.few_rate = len(seen[FEW].answers) / seen[FEW].seconds
        ratios = [many / few for many, few in zip(rates[MANY], rates[FEW], strict=True)]
        told: dict[str, object] = {"ratios": ratios, "rates": rates, "processor_s": self.processor}
        print(f"\n**{trace}**\n")
        head = "| adapters | tokens/s | engine ms | server ms | a step | requests | hot | warm | cold | first token p50"
        print(f"{head} | p99 | longest | p50 hot | p50 warm | p50 cold | errors |\n|{'---|' * 16}")
        for arm, one in seen.items():
            told[arm] = _figures(one)
            waits = [one.first_token_ms(q) for q in (50, 99, 100)]
            waits += [one.first_token_ms(50, state) for state in STATES]
            shares = " | ".join(f"{share:.2f}" for share in one.shares().values())
            cells = " | ".join(f"{wait:,.0f}" for wait in waits)
            tokens = statistics.median(rates[arm])
            used = self.processor[arm]
            spent = " | ".join(f"{used[name] / used['tokens'] * 1e3:.2f}" for name in self._processes)
            step = used["num_step_tokens"] / used["num_steps"]
            print(
                f"| {arm} | {tokens:.1f} | {spent} | {step:.1f} | {len(one.answers)} | {shares} | {cells} "
                f"| {one.errors.total()} |"
            )
        for message, count in (seen[FEW].errors + seen[MANY].errors).most_common(5):
            print(f"# error, {count} times: {message}")
        each = ", ".join(f"{ratio:.3f}" for ratio in ratios)
        print(f"\nratio {statistics.median(ratios):.3f} ({each}). {_changes(warm, after)}\n", flush=True)
        return told | {"before": warm, "after": after}

    def _counters(self) -> dict[str, float]:
        """Counters of the engine and of loads, and the processes' memory in bytes, once nothing runs."""
        self._server.wait(self._server.idle)
        stats = self._server.stats()
        names = ("adapter_loads", "adapter_copies", "device_evictions", "host_evictions", "num_steps")
        found = {name: float(stats[name]) for name in (*names, "num_step_tokens")}
        for line in httpx.get(f"{self._server.admin_url}/metrics", timeout=60).text.splitlines():
            for stage in STAGES:
                for part in ("sum", "count"):
                    if line.startswith(f'loraplex_adapter_load_seconds_{part}{{stage="{stage}"}}'):
                        found[f"{stage}_{part}"] = float(line.split()[-1])
            for part in ("sum", "count"):
                if line.startswith(f"loraplex_adapter_wait_seconds_{part} "):
                    found[f"wait_{part}"] = float(line.split()[-1])
        for name, process in self._processes.items():
            found[f"{name}_rss"] = float(process.memory_info().rss)
        return found


def _figures(seen: Seen) -> dict[str, object]:
    return {
        "tokens_per_s": seen.tokens / seen.seconds,
        "requests": len(seen.answers),
        "shares": seen.shares(),
        "first_token_ms": {str(q): seen.first_token_ms(q) for q in (50, 90, 99, 100)},
        "first_token_p50_ms": {state: seen.first_token_ms(50, state) for state in STATES},
        "errors": dict(seen.errors),
    }


def _changes(before: dict[str, float], after: dict[str, float]) -> str:
    """What happened between two readings of the counters, in words."""

    def grown(name: str) -> float:
        return after.get(name, 0.0) - before.get(name, 0.0)

    stages = []
    for stage in STAGES:
        if count := grown(f"{stage}_count"):
            stages.append(f"{stage} {grown(f'{stage}_sum') / count * 1e3:.1f} ms")
    waits = grown("wait_count")
    mib = 1 << 20
    return (
        f"Loads {grown('adapter_loads'):.0f}, copies {grown('adapter_copies'):.0f}, evictions "
        f"{grown('device_evictions'):.0f} from the device and {grown('host_evictions'):.0f} from host memory. "
        f"A load, by stage: {', '.join(stages) or 'none'}. {waits:.0f} sequences waited for one, "
        f"{grown('wait_sum') / max(1.0, waits) * 1e3:.0f} ms each. {grown('num_steps'):.0f} steps of "
        f"{grown('num_step_tokens') / max(1.0, grown('num_steps')):.1f} tokens. Memory of the engine "
        f"{before['engine_rss'] / mib:.0f} MiB before and {after['engine_rss'] / mib:.0f} after, of the server "
        f"{before['server_rss'] / mib:.0f} and {after['server_rss'] / mib:.0f}."
    )


@contextlib.contextmanager
def serving(options: argparse.Namespace, work: Path) -> Iterator[tuple[LiveServer, Population]]:
    """A server with all adapters, which it may have from an earlier run."""
    kind = KINDS[options.kind]
    one = mean_bytes(options.model, kind)
    settings = {
        "adapter_memory": options.hot * one, "adapter_cpu_memory": options.warm * one,
        "kv_cache_memory": options.kv, "max_num_seqs": options.slots, "threads": 0,
    }  # fmt: skip
    known = work / "keys.json"
    # Each run begins alike: nothing is warmed by an earlier one's demand.
    (work / "data" / "adapter-demand.json").unlink(missing_ok=True)
    with LiveServer(options.model, work / "data", **settings) as server:
        if known.is_file():
            yield server, Population(tuple(json.loads(known.read_text())), options.adapters)
            return
        factory = AdapterFactory(architecture(options.model), kind, options.adapters)
        began = time.perf_counter()
        population = register(server, factory, options.adapters, options.tenants)
        took = time.perf_counter() - began
        print(
            f"# {options.adapters} adapters of {one / (1 << 20):.1f} MiB registered in {took:.0f} s",
            flush=True,
        )
        known.write_text(json.dumps(population.keys))
        yield server, population


def main(arguments: list[str] | None = None) -> dict[str, dict[str, object]]:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--kind", choices=sorted(KINDS), default="qv")
    parser.add_argument("--traces", default="zipf,0.1,0.5,1")
    for name, whole in (
        ("adapters", 2000), ("few", 5), ("hot", 32), ("warm", 256), ("tenants", 20), ("streams", 32),
        ("slots", 16), ("rounds", 6),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=whole)
    for name, real in (("seconds", 15.0), ("ramp", 3.0), ("load", 0.8), ("variation", 1.0)):
        parser.add_argument(f"--{name}", type=float, default=real)
    parser.add_argument("--kv", default="512MiB", help="memory of the KV cache")
    parser.add_argument("--work", type=Path, help="keep the server's data here")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    options = parser.parse_args(arguments)
    traces = options.traces.split(",")
    if traces[0] != "zipf":
        raise SystemExit("--traces must begin with zipf: the rate of the others follows from it")
    print(f"# {place()}", flush=True)
    told: dict[str, dict[str, object]] = {}
    with contextlib.ExitStack() as stack:
        work = options.work or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        work.mkdir(parents=True, exist_ok=True)
        server, population = stack.enter_context(serving(options, work))
        bench = Bench(server, population, options)
        for trace in traces:
            told[trace] = bench.run(trace)
    if options.out:
        options.out.write_text(json.dumps(told, indent=1) + "\n")
    return told


if __name__ == "__main__":
    main()
