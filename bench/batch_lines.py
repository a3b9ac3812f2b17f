"""Measures what lines of batches cost other requests, and how fast they are alone, at one engine without a server.

    PYTHONPATH=tests python -m bench.batch_lines MODEL beside|alone [--pairs 5]

Beside: streams, each a new short prompt as soon as its answer ends, without lines and with them in turns. Alone: the
same requests, 64 at a time, as other requests and as lines in turns. Times are of two clocks: the wall's, and the
processor time of the threads that plan and compute, which other programs on the machine hardly lengthen.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from itertools import count, pairwise
from pathlib import Path

from loraplex.engine.execution.cost_measurement import time_on
from loraplex.engine.types import EngineRequest, SamplingParams, TokenEvent
from support.engine.local_engine import LocalEngine

LINES = 64
REQUESTS = 192
CLOCKS = ("wall", "processor")
FIGURES = ("first token p50", "first token p99", "gap p50", "gap p99")
Times = tuple[float, float]


class Load:
    """Requests of a kind, `most` of them at a time and `left` in all, and when their tokens came, by both clocks."""

    def __init__(
        self, engine: LocalEngine, numbers: count[int], most: int, left: int, *, batch: bool
    ) -> None:
        self._engine = engine
        self._numbers = numbers
        self._most = most
        self._left = left
        self._batch = batch
        self._live: set[str] = set()
        self._times: dict[str, list[Times]] = {}
        self.num_tokens = 0

    def refill(self, now: Times) -> None:
        while self._left and len(self._live) < self._most:
            number = next(self._numbers)
            name = f"r{number}"
            prompt = tuple(100 + (number * 7919 + place * 104729) % 40000 for place in range(48))
            sampling = SamplingParams(max_tokens=24 + number % 17, ignore_eos=True, seed=number)
            tenant = f"t{number % 3}" if self._batch else "chat"
            self._live.add(name)
            self._times[name] = [now]
            self._left -= 1
            request = EngineRequest(name, tenant, prompt, sampling, background=self._batch, batch=self._batch)
            self._engine.core.add_request(request)

    def take(self, event: TokenEvent, now: Times) -> None:
        if event.request_id not in self._live:
            return
        assert event.error is None, event.error
        self._times[event.request_id] += [now] * bool(event.token_ids)
        self.num_tokens += len(event.token_ids)
        if event.finish_reason is not None:
            self._live.remove(event.request_id)

    @property
    def is_done(self) -> bool:
        return not self._left and not self._live

    def figures(self, clock: int) -> list[float]:
        """Milliseconds of first tokens and gaps of the ended requests, median and 99th percentile of each."""
        ended = [[at[clock] for at in times] for name, times in self._times.items() if name not in self._live]
        del ended[: self._most]  # they began together
        firsts = [times[1] - times[0] for times in ended]
        gaps = [b - a for times in ended for a, b in pairwise(times[1:])]
        quantiles = [statistics.quantiles(values, n=100, method="inclusive") for values in (firsts, gaps)]
        return [1000 * found[place] for found in quantiles for place in (49, 98)]

    def abort(self) -> None:
        for name in [*self._live]:
            self._engine.core.abort(name)


def run(engine: LocalEngine, clock: Callable[[], Times], loads: list[Load]) -> Times:
    """Until the first load is done. Returns what passed."""
    start = now = clock()
    while not loads[0].is_done:
        for load in loads:
            load.refill(now)
        events = engine.core.step()
        now = clock()
        for event in events:
            for load in loads:
                load.take(event, now)
    for load in loads:
        load.abort()
    while engine.core.has_work:
        engine.core.step()
    return now[0] - start[0], now[1] - start[1]


def beside(engine: LocalEngine, clock: Callable[[], Times], options: argparse.Namespace) -> None:
    numbers = count()
    ratios: list[list[list[float]]] = [[], []]
    for _ in range(options.pairs):
        found: list[list[list[float]]] = []
        for batch in (False, True):
            streams = Load(engine, numbers, options.streams, options.answers, batch=False)
            lines = Load(engine, numbers, LINES, 1 << 30 if batch else 0, batch=True)
            passed = run(engine, clock, [streams, lines])
            found.append([streams.figures(place) for place in (0, 1)])
            told = [f"{each:.1f}" for figures in found[-1] for each in figures]
            speed = f"{lines.num_tokens / passed[1]:.0f} lines' tokens a second of the processor"
            print(f"{'beside' if batch else 'without'} lines: {' '.join(told)} ms; {speed}", flush=True)
        for place in (0, 1):
            ratios[place].append([b / a for a, b in zip(found[0][place], found[1][place], strict=True)])
    for name, of_pairs in zip(CLOCKS, ratios, strict=True):
        medians = [f"{statistics.median(column):.3f}" for column in zip(*of_pairs, strict=True)]
        print(f"beside ÷ without, {name}, median of pairs: {dict(zip(FIGURES, medians, strict=True))}")


def alone(engine: LocalEngine, clock: Callable[[], Times], options: argparse.Namespace) -> None:
    numbers = count()
    speeds = []
    for _ in range(options.pairs):
        pair = []
        for batch in (False, True):
            load = Load(engine, numbers, LINES, REQUESTS, batch=batch)
            time.sleep(1.1)  # quiet
            pair.append([load.num_tokens / each for each in run(engine, clock, [load])])
        speeds.append([lines / others for others, lines in zip(*pair, strict=True)])
        print(
            f"alone, tokens/s: others {pair[0][0]:.0f}, {pair[0][1]:.0f}; lines {pair[1][0]:.0f}, {pair[1][1]:.0f}"
        )
    for name, column in zip(CLOCKS, zip(*speeds, strict=True), strict=True):
        print(f"lines alone ÷ others alone, {name}, median of pairs: {statistics.median(column):.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description="What lines of batches cost others, and how fast they are alone."
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("part", choices=["beside", "alone"])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--answers", type=int, default=100, help="of the streams, in each run")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        engine = LocalEngine(
            options.model,
            Path(work),
            max_num_seqs=LINES,
            max_model_len=512,
            num_threads=options.threads,
            max_step_ms=-1,
        )
        worked = time_on(engine.built.runner._executor)

        def clock() -> Times:
            return time.perf_counter(), worked()

        if options.part == "beside":
            beside(engine, clock, options)
        else:
            alone(engine, clock, options)
        engine.close()


if __name__ == "__main__":
    main()
