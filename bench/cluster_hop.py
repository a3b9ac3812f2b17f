"""Cost of the hop of an engine that dials in, beside an engine on the Unix socket, in the same run.

    PYTHONPATH=tests python -m bench.cluster_hop [--streams 16] [--tokens 200] [--step-ms 20] [--rounds 5] [--asks 400]

Both engines are processes around a fake core: what is measured is the protocol. Printed are microseconds of processor
time per token, of the server's process and of the relay's, for `--streams` answers of `--tokens` tokens at a time; and
the median time of one request of one token, there and back, on an engine whose step takes no time. Rounds and requests
go to the two by turns.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import statistics
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import uvloop

from loraplex.engine.config import EngineConfig
from loraplex.serving.client.session import EngineSession
from loraplex.serving.client.socket_client import SocketEngineClient
from loraplex.serving.cluster.relay import Door, Relay
from loraplex.serving.supervision.engine_supervisor import Supervision
from support.engine.dialled import CONTENT, NODE, TOKEN, listening
from support.engine.fake_processes import FAKE_ENGINE, ask

CONFIG = EngineConfig("ok", "/nowhere")
RULES = Supervision(command=FAKE_ENGINE, start_timeout_s=60)


@dataclass(frozen=True, slots=True)
class Way:
    """A session, and the relay between it and its engine (None: the Unix socket)."""

    session: EngineSession
    relay: int | None = None

    def cpu_s(self) -> tuple[float, float]:
        """Processor seconds so far of this process, and of the relay."""
        return time.process_time(), 0.0 if self.relay is None else _cpu_s(self.relay)


@contextlib.asynccontextmanager
async def both_ways(step_s: float) -> AsyncIterator[dict[str, Way]]:
    """One engine on the Unix socket and one that has dialled in, whose steps take so long."""
    with _environment("FAKE_STEP_S", str(step_s)):
        near = SocketEngineClient(CONFIG, RULES)
        await near.start()
        async with listening() as port:
            command = [sys.executable, "-m", "bench.cluster_hop", "--relay-to", str(port.number)]
            relay = await asyncio.create_subprocess_exec(*command)
            try:
                yield {"Unix socket": Way(near), "dialled in": Way(await port.session(), relay.pid)}
            finally:
                relay.terminate()
                await relay.wait()
                await near.close()


async def load(way: Way, streams: int, tokens: int, name: str) -> tuple[float, float]:
    """Microseconds per token of this process, and of the relay."""
    before = way.cpu_s()
    opened = [way.session.submit(ask(f"{name}-{i}", tokens, (i,)))[0] for i in range(streams)]

    async def read(number: int) -> int:
        return sum([len(event.token_ids) async for event in opened[number]])

    total = sum(await asyncio.gather(*map(read, range(streams))))
    assert total == streams * tokens
    after = way.cpu_s()
    return (after[0] - before[0]) / total * 1e6, (after[1] - before[1]) / total * 1e6


async def round_trip(way: Way, name: str) -> float:
    """Milliseconds from a request to its only token."""
    begun = time.perf_counter()
    await anext(way.session.submit(ask(name, 1))[0])
    return (time.perf_counter() - begun) * 1e3


async def measure(arguments: argparse.Namespace) -> None:
    async with both_ways(arguments.step_ms / 1e3) as ways:
        cpu: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
        for number in range(arguments.rounds + 1):
            for name, way in ways.items():
                taken = await load(way, arguments.streams, arguments.tokens, f"{name}{number}")
                if number:  # the first warms up
                    cpu[name].append(taken)
    async with both_ways(0.0) as ways:
        times: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(arguments.asks):
            for name, way in ways.items():
                times[name].append(await round_trip(way, f"{name}{number}"))
    print(
        f"{arguments.streams} streams, a step each {arguments.step_ms:g} ms, medians of {arguments.rounds} rounds"
    )
    print(f"{'way':<12} {'server µs/token':>16} {'relay µs/token':>15} {'both':>6} {'round trip ms':>14}")
    sums = {}
    for name in cpu:
        server, relay = (statistics.median(column) for column in zip(*cpu[name], strict=True))
        sums[name] = statistics.median(map(sum, cpu[name])), statistics.median(times[name])
        print(f"{name:<12} {server:>16.1f} {relay:>15.1f} {sums[name][0]:>6.1f} {sums[name][1]:>14.3f}")
    (near_cpu, near_ms), (far_cpu, far_ms) = sums.values()
    print(
        f"the hop adds {far_cpu - near_cpu:.1f} µs of processor time a token, {far_ms - near_ms:.3f} ms a round trip"
    )


async def run_relay(number: int) -> None:
    door = Door("127.0.0.1", number, lambda: TOKEN, lambda digest: CONTENT)
    relay = Relay(CONFIG, door, replica="one", node=NODE, rules=RULES)
    try:
        await relay.run()
    finally:
        await relay.close()


def _cpu_s(pid: int) -> float:
    """Processor seconds of a process without its children, in nanoseconds' resolution."""
    files = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(file.read_text().split()[0]) for file in files) / 1e9


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--asks", type=int, default=400)
    parser.add_argument("--relay-to", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    uvloop.run(run_relay(arguments.relay_to) if arguments.relay_to else measure(arguments))


if __name__ == "__main__":
    main()
