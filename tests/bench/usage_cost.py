"""What the usage ledger costs a request.

    PYTHONPATH=tests python -m bench.usage_cost [--rounds 7] [--seconds 3] [--dir DIRECTORY]

Two servers, each in a process of its own: the real API over an engine that answers from a script at once, one with the
usage ledger (journal with its syncs, and the writer into a SQLite database, all in DIRECTORY), the other with a ledger
that does nothing. They are asked in turns, never at the same time. For each kind of answer, and for one request and 32
at a time: requests a second (median of the rounds, and of the ratios within a round), their times, and the processor
time that the server's process took for one. A model would add its own time to both; the difference stays.

Before them, what a commit costs the writer by its number of rows; after them, the journal by itself beside one that
SQLite keeps: see `bench.usage_sqlite`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import multiprocessing
import os
import re
import statistics
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bench.usage_sqlite import compare
from loraplex.control.db.database import Database
from loraplex.control.usage.journal import UsageJournal
from loraplex.control.usage.ledger import Ledger, Source
from loraplex.control.usage.records import Accepted, Ended
from loraplex.control.usage.segments import Position
from loraplex.control.usage.writer import UsageWriter
from loraplex.migrations.run import upgrade
from support.control.usage import ended
from support.engine.fake_engine import Reply
from support.http.data_plane import BASE, running_data_plane

KINDS = ("none", "ledger")
SHAPES: dict[str, dict[str, Any]] = {
    "a whole answer of 1 token": {"max_tokens": 1},
    "a stream of 32 tokens": {"max_tokens": 32, "stream": True},
}
AT_A_TIME = (1, 32)


class _NoLedger:
    def accept(self, record: Accepted) -> None: ...

    async def end(self, record: Ended) -> None: ...


class _NoLog:
    def info(self, event: str, **fields: Any) -> None: ...


def _serve(kind: str, directory: Path, pipe: Connection) -> None:
    """A server until the pipe says so; answers each message with the processor seconds of this process so far."""
    directory.mkdir()
    with contextlib.ExitStack() as stack:
        writer: UsageWriter | None = None
        ledger: Any = _NoLedger()
        if kind == "ledger":
            url = f"sqlite:///{directory / 'control.db'}"
            upgrade(url)
            database = Database(url)
            stack.callback(database.close)
            ledger = UsageJournal(directory / "usage")
            writer = UsageWriter(database, directory / "usage", ledger)
            stack.callback(writer.close)
            stack.callback(ledger.close)
        plane = stack.enter_context(
            running_data_plane(directory / "model", ledger=ledger, access_log=_NoLog())
        )
        plane.engine.default = Reply(text="x" * 64)
        if writer is not None:
            writing = asyncio.run_coroutine_threadsafe(writer.run(), plane.server.loop)
            stack.callback(writing.cancel)
        pipe.send(plane.server.port)
        while pipe.recv():
            pipe.send(time.process_time())
        pipe.send(None if writer is None else (writer.num_written, writer.num_waiting))


@dataclass
class Round:
    """Seconds that each request took, requests a second, and the server's processor seconds for one."""

    times: list[float]
    rate: float
    processor_s: float


class Server:
    def __init__(self, kind: str, directory: Path) -> None:
        self._pipe, other = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        self._process = context.Process(target=_serve, args=(kind, directory / kind, other), daemon=True)
        self._process.start()
        self._port = int(self._pipe.recv())

    def measure(self, fields: dict[str, Any], at_a_time: int, seconds: float) -> Round:
        body = json.dumps({"model": BASE, "prompt": "x" * 64, "ignore_eos": True, **fields}).encode()
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer lpx_acme\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        before, began = self._processor_s(), time.perf_counter()
        times = asyncio.run(self._load(head.encode() + body, at_a_time, seconds))
        took = time.perf_counter() - began
        return Round(times, len(times) / took, (self._processor_s() - before) / len(times))

    def close(self) -> Any:
        """What the writer of its ledger had written, and what still waited."""
        self._pipe.send(False)
        told = self._pipe.recv()
        self._process.join()
        return told

    def _processor_s(self) -> float:
        self._pipe.send(True)
        return float(self._pipe.recv())

    async def _load(self, request: bytes, at_a_time: int, seconds: float) -> list[float]:
        times: list[float] = []
        end = time.perf_counter() + seconds

        async def client() -> None:
            reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
            while (began := time.perf_counter()) < end:
                writer.write(request)
                await _read_answer(reader)
                times.append(time.perf_counter() - began)
            writer.close()

        await asyncio.gather(*(client() for _ in range(at_a_time)))
        return times


async def _read_answer(reader: asyncio.StreamReader) -> None:
    head = await reader.readuntil(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200 "):
        raise SystemExit(f"a request failed: {head.decode()}")
    if length := re.search(rb"(?i)content-length: (\d+)", head):
        await reader.readexactly(int(length[1]))
        return
    while size := int(await reader.readline(), 16):
        await reader.readexactly(size + 2)
    await reader.readexactly(2)


def _sync_ms(directory: Path) -> float:
    """What one sync of a short record takes there, in the median."""
    taken = []
    with open(directory / "probe", "wb", buffering=0) as file:
        file.write(bytes(1 << 20))
        os.fsync(file.fileno())
        file.seek(0)
        for _ in range(200):
            file.write(bytes(300))
            began = time.perf_counter()
            os.fdatasync(file.fileno())
            taken.append(time.perf_counter() - began)
    return statistics.median(taken) * 1e3


def _ms_a_row(directory: Path, rows: int) -> float:
    """Processor time of the writer's thread, with `rows` rows a commit."""
    url = f"sqlite:///{directory / f'{rows}.db'}"
    upgrade(url)
    database, source, commits = Database(url), Source(directory, None), max(20, 200 // rows)
    ledger = Ledger(database)
    batches = [[ended() for _ in range(rows)] for _ in range(commits)]
    began = time.thread_time()
    for number, batch in enumerate(batches, 1):
        ledger.commit(source, batch, Position(1, number))
    took = time.thread_time() - began
    database.close()
    return took / commits / rows * 1e3


def _quantile(rounds: list[Round], part: float) -> float:
    times = sorted(itertools.chain.from_iterable(one.times for one in rounds))
    return times[int(part * (len(times) - 1))] * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description="What the usage ledger costs a request.")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--dir", type=Path, default=None)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.dir) as name:
        directory = Path(name)
        print(
            f"a sync takes {_sync_ms(directory):.2f} ms (median of 200); load {os.getloadavg()[0]:.1f}",
            flush=True,
        )
        for rows in (1, 10, 100):
            print(f"{rows} rows a commit: {_ms_a_row(directory, rows):.2f} ms of processor time a row")
        servers = {kind: Server(kind, directory) for kind in KINDS}
        for shape, fields in SHAPES.items():
            for at_a_time in AT_A_TIME:
                rounds: dict[str, list[Round]] = {kind: [] for kind in KINDS}
                for server in servers.values():
                    server.measure(fields, at_a_time, 0.5)
                for turn in range(arguments.rounds):
                    for kind in KINDS[:: 1 if turn % 2 else -1]:
                        rounds[kind].append(servers[kind].measure(fields, at_a_time, arguments.seconds))
                print(f"{shape}, {at_a_time} at a time:")
                for kind, found in rounds.items():
                    print(
                        f"  {kind:6} {statistics.median(one.rate for one in found):6.0f} a second; "
                        f"{_quantile(found, 0.5):.2f} ms (median), {_quantile(found, 0.99):.2f} ms (99%); "
                        f"{statistics.median(one.processor_s for one in found) * 1e3:.3f} ms of processor time"
                    )
                ratios = [
                    with_it.rate / without.rate for without, with_it in zip(*rounds.values(), strict=True)
                ]
                print(f"  throughput with the ledger ÷ without: {statistics.median(ratios):.3f}", flush=True)
        for kind, server in servers.items():
            if (told := server.close()) is not None:
                print(f"{kind}: {told[0]} rows in the database, {told[1]} waiting")
        compare(directory / "sqlite", arguments.rounds, arguments.seconds)
    print(f"load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
