"""Requests on resident adapters while adapters that are on disk alone stream in.

    PYTHONPATH=tests python -m bench.adapters.beside_cold_loads MODEL [--kind qv|mixed] [--streams 8] [--rate 2]
        [--adapters 200] [--pairs 5] [--seconds 20]

MODEL is the directory of a model of Llama's form. `loraplex serve` gets device memory for 32 adapters and host memory
for 16. `--streams` clients each ask again when they are answered, for adapters that stay resident: these are measured.
Beside them `--rate` short requests a second arrive, of 8 words and with answers of 4 tokens. Three windows take turns
in changing order: `alone`, without those; `hot`, where those are for a resident adapter as well; and `cold`, where each
is for the next of `--adapters` adapters, so that each begins on disk. What `hot` costs is the requests' own work; what
`cold` costs beyond it is the loads.

Printed: milliseconds to the first token of the measured requests over all windows of a name, median and p99, and their
ratios to `alone` and to `hot`; the aims are 1.10 and 1.25 of `alone`. Then the same of the short requests.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from bench.adapters.population import KINDS, AdapterFactory, Population, architecture, mean_bytes, register
from bench.adapters.traffic import Answer, Question, Questions, Seen, ask_at, keep_asking, open_client
from bench.beside_vllm import place
from support.servers.live_server import LiveServer

RESIDENT = 8
HOT, WARM = 32, 16
WINDOWS = ("alone", "hot", "cold")


class Bench:
    """A server with its population, and the windows on it. The first RESIDENT adapters stay resident."""

    def __init__(self, server: LiveServer, population: Population, options: argparse.Namespace) -> None:
        self._server, self._options = server, options
        self._resident = _questions(population, itertools.cycle(range(RESIDENT)), Questions(0))
        short = Questions(1, words=(8, 8), tokens=(4, 4))
        cold = itertools.cycle(range(RESIDENT, population.count))
        self._beside = {
            "hot": _questions(population, itertools.cycle(range(RESIDENT)), short),
            "cold": _questions(population, cold, short),
        }

    async def window(self, name: str, measured: Seen, beside: Seen) -> None:
        """One window: adds the streams' answers to `measured`, those of the short requests to `beside`."""
        options = self._options
        answers: list[Answer] = []
        short: list[Answer] = []
        async with open_client(self._server.data_url) as client:
            begin = time.perf_counter() + options.ramp
            end = begin + options.seconds
            async with asyncio.TaskGroup() as group:
                for _ in range(options.streams):
                    group.create_task(
                        keep_asking(client, self._resident, lambda: time.perf_counter() >= end, answers)
                    )
                if name in self._beside:
                    first = time.perf_counter()
                    count = int((end - first) * options.rate)
                    times = (first + number / options.rate for number in range(count))
                    group.create_task(ask_at(client, self._beside[name], times, short))
        measured.add(answers, begin, end)
        beside.add(short, begin, end)


def _questions(population: Population, numbers: Iterator[int], drawn: Questions) -> Iterator[Question]:
    for number in numbers:
        yield drawn.draw(population.name(number), population.key(number))


def main(arguments: list[str] | None = None) -> dict[str, Seen]:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--kind", choices=sorted(KINDS), default="qv")
    for name, whole in (("adapters", 200), ("streams", 8), ("pairs", 5)):
        parser.add_argument(f"--{name}", type=int, default=whole)
    for name, real in (("rate", 2.0), ("seconds", 20.0), ("ramp", 2.0)):
        parser.add_argument(f"--{name}", type=float, default=real)
    parser.add_argument("--kv", default="512MiB", help="memory of the KV cache")
    options = parser.parse_args(arguments)
    print(f"# {place()}", flush=True)
    kind = KINDS[options.kind]
    one = mean_bytes(options.model, kind)
    settings = {
        "adapter_memory": HOT * one, "adapter_cpu_memory": WARM * one, "kv_cache_memory": options.kv, "threads": 0,
    }  # fmt: skip
    measured = {name: Seen() for name in WINDOWS}
    beside = {name: Seen() for name in WINDOWS}
    with (
        tempfile.TemporaryDirectory() as work,
        LiveServer(options.model, Path(work) / "data", **settings) as server,
    ):
        factory = AdapterFactory(architecture(options.model), kind, options.adapters)
        bench = Bench(server, register(server, factory, options.adapters, 4), options)
        for number in range(-1, options.pairs):
            turns = WINDOWS if number % 2 else WINDOWS[::-1]
            for name in turns:
                # The first round brings the resident adapters, and does not count.
                into = (measured[name], beside[name]) if number >= 0 else (Seen(), Seen())
                asyncio.run(bench.window(name, *into))
                print(f"# round {number}, {name}: {into[0].first_token_ms(50):.0f} ms", flush=True)
    _print(measured, beside)
    return measured


def _print(measured: dict[str, Seen], beside: dict[str, Seen]) -> None:
    print(
        "| window | tokens/s | requests | first token p50 | of alone | of hot | p99 | of alone | of hot | errors "
        "| short requests | cold | first token p50 | p99 |\n" + "|---" * 14 + "|"
    )
    for name, seen in measured.items():
        cells = [f"{seen.tokens / seen.seconds:.1f}", f"{len(seen.answers)}"]
        for q in (50, 99):
            own = seen.first_token_ms(q)
            cells.append(f"{own:,.0f}")
            cells += [f"{own / measured[other].first_token_ms(q):.2f}" for other in ("alone", "hot")]
        other = beside[name]
        cells += [f"{seen.errors.total() + other.errors.total()}", f"{len(other.answers)}"]
        cells.append(f"{other.shares()['cold']:.2f}")
        cells += [f"{other.first_token_ms(q):,.0f}" for q in (50, 99)]
        print(f"| {name} | {' | '.join(cells)} |")
    for name, seen in (measured | {f"{name} ": seen for name, seen in beside.items()}).items():
        for message, count in seen.errors.most_common(3):
            print(f"# error in {name}, {count} times: {message}")


if __name__ == "__main__":
    main()
