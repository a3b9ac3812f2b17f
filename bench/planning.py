"""What planning a step costs, and whether a longer queue makes it dearer.

    python -m bench.planning [--running 256] [--steps 300]

Prints the median processor time of `Scheduler.plan` with every seat taken by a decoding sequence (half of them on
adapters), and with 100 and 10,000 requests of up to 1,000 tenants waiting behind them: on the base model, and each
tenant on an adapter of its own that is not on the device, while now and then a request ends and another starts. The
ratio is the cost of the long queue over that of the short one.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import statistics
import time
from itertools import count

from loraplex.adapters.ref import AdapterRef
from loraplex.engine.config import SchedulerConfig
from loraplex.engine.scheduling.scheduler import Scheduler
from loraplex.engine.types import EngineRequest, SamplingParams, Sequence
from support.engine.fake_transport import FakeTransport, Fate, make_cache

NUM_SLOTS = 64
MAX_TENANTS = 1000
PROMPT = 200
STEPS_BETWEEN_ENDS = 4
"""One of the running requests ends, and another starts, once in this number of steps."""


class Bench:
    """A full batch with lookahead 0, and a queue behind it; a step is planned, and taken as computed."""

    def __init__(self, running: int) -> None:
        self.now = 0.0
        transport = FakeTransport(lambda: self.now, NUM_SLOTS, load_fate=lambda digest: Fate(0.2))
        self.transport = transport
        self.cache = make_cache(transport, num_slots=NUM_SLOTS)
        self.running = running
        blocks = running * 64
        self.scheduler = Scheduler(SchedulerConfig(blocks, 8192, running, 2 * running, 10**6), self.cache)
        self._order = count()
        for index in range(running):
            ref = self.adapter("running", index % NUM_SLOTS) if index % 2 else None
            self.add("running", ref, max_tokens=100_000)
        while len(self.scheduler.running) < running:
            self.step()

    @staticmethod
    def adapter(tenant: str, number: int) -> AdapterRef:
        digest = hashlib.sha256(f"{tenant} {number}".encode()).hexdigest()
        return AdapterRef(tenant, f"a{number}", 1, digest, 8)

    def add(self, tenant: str, ref: AdapterRef | None, max_tokens: int = 100) -> None:
        order = next(self._order)
        prompt = tuple(range(order * PROMPT, (order + 1) * PROMPT))
        request = EngineRequest(f"r{order}", tenant, prompt, SamplingParams(max_tokens=max_tokens), ref)
        self.scheduler.add_sequence(Sequence(request, self.now, order, list(prompt)))

    def queue(self, waiting: int, *, cold: bool) -> None:
        for index in range(waiting):
            tenant = f"t{index % MAX_TENANTS}"
            self.add(tenant, self.adapter(tenant, 0) if cold else None)

    def step(self) -> float:
        """Seconds that planning it took."""
        self.now += 0.02
        self.transport.settle()
        self.cache.poll()
        started = time.thread_time()
        plan = self.scheduler.plan(self.now)
        seconds = time.thread_time() - started
        sequences = {seq.order: seq for seq in self.scheduler.running}
        for row in plan.scheduled:
            seq = sequences[row.order]
            self.scheduler.computed(seq, row)
            if row.samples:
                seq.token_ids.append(7)
                seq.num_pending -= 1
                self.scheduler.delivered(seq, 1)
        return seconds

    def end_one(self) -> None:
        self.scheduler.finish(next(iter(self.scheduler.running)))


def compare(benches: list[Bench], steps: int) -> list[float]:
    """Median milliseconds of each; they step in turns, so that all see the same machine."""
    for _ in range(50):
        for bench in benches:
            bench.step()
    taken: list[list[float]] = [[] for _ in benches]
    gc.collect()
    gc.disable()
    try:
        for index in range(steps):
            for bench, times in zip(benches, taken, strict=True):
                if index % STEPS_BETWEEN_ENDS == 0:
                    bench.end_one()
                times.append(bench.step())
    finally:
        gc.enable()
    return [statistics.median(times) * 1e3 for times in taken]


def main() -> None:
    parser = argparse.ArgumentParser(description="What planning a step costs.")
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--steps", type=int, default=300)
    arguments = parser.parse_args()
    for name, cold in (("on the base model", False), ("for an adapter each that is not on the device", True)):
        benches = [Bench(arguments.running) for _ in range(2)]
        for bench, waiting in zip(benches, (100, 10_000), strict=True):
            bench.queue(waiting, cold=cold)
        short, long = compare(benches, arguments.steps)
        print(
            f"{arguments.running} running, waiting {name}: 100 {short:.3f} ms a step, 10,000 {long:.3f} ms, "
            f"ratio {long / short:.2f}"
        )


if __name__ == "__main__":
    main()
