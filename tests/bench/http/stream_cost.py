"""What a streamed token costs beside the engine's work, thread by thread.

    PYTHONPATH=tests python -m bench.http.stream_cost [--beside CHECKOUT] [--model DIR] [--rounds 5] [--step-mb 256]

`loraplex serve` runs as an operator runs it, but that its engine has no model: it has the product's own loop and
socket, and a core whose step reads `--step-mb` MiB of memory with two threads and then gives each stream one token. So
both cores and their caches are taken as by a decoding step. `--streams` clients read at a time. "ms a step" is the
mean time between two tokens of a stream. The others are microseconds of processor time for each token that was
streamed, by the kernel's count of each thread:

- loop: the event loop's thread of the API process, with the kernel's part of its socket calls
- others: all other threads of the API process (tokenizing, the usage journal, the database)
- socket: the engine process' main thread, which speaks with the API process
- step: the engine process' step thread with the scripted core, without the reading of memory

"steady" are streams of many tokens, so that beginnings and ends of requests do not count. "short" are requests of 64
tokens, each followed at once by the next: the load of vLLM's generator at the same concurrency. "one stream" shows the
step without the others.

With `--model`, the engine serves that model, and only completions are asked for: "step" holds all that it computes.

With `--beside`, a second server runs the code of another checkout (a git worktree, say). The two are asked in turns in
each round, the first one alternating. The figures are medians of the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import selectors
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil

from bench.http.http_cost import HERE, PORTIONS, commit_of
from support.servers.live_server import LiveServer, write_tiny_model

HERE_FILE = Path(__file__).resolve()
END_OF_ANSWER = b"\r\n0\r\n\r\n"
THREADS = ("loop", "others", "socket", "step")
COLUMNS = ("ms a step", *THREADS)
READER = "reader"
"""The name of the threads that read memory."""


@dataclass(frozen=True)
class Load:
    path: str
    body: dict[str, object]
    tokens: int
    streams: int
    requests: int = 1  # of each stream


def loads(tokens: int, streams: int) -> dict[str, Load]:
    chat = {"messages": [{"role": "user", "content": "x" * 64}]}
    prompt = {"prompt": "the " * 64, "ignore_eos": True}
    return {
        "completions, one stream": Load("/v1/completions", prompt, tokens // 2, 1),
        "completions, steady": Load("/v1/completions", prompt, tokens, streams),
        "chat, steady": Load("/v1/chat/completions", chat, tokens, streams),
        "responses, steady": Load("/v1/responses", {"input": "x" * 64}, tokens, streams),
        "messages, steady": Load("/v1/messages", chat, tokens, streams),
        "completions, short": Load("/v1/completions", prompt, 64, streams, requests=6),
    }


# The server's two processes.


def serve() -> None:
    """`loraplex serve` over the scripted engine, with the rest of the arguments."""
    from loraplex.app import serve as product
    from loraplex.app.cli import main as cli

    command = (sys.executable, str(HERE_FILE), "--engine")
    product.SocketEngineClient = partial(product.SocketEngineClient, command=command)  # type: ignore
    cli()


def engine() -> None:
    """The engine process. Each step reads BENCH_STEP_MB of memory."""
    from dataclasses import replace as changed

    import numpy as np

    from loraplex.engine.ipc.process import run
    from loraplex.engine.types import TokenEvent, Usage
    from support.engine.fake_core import FakeCore, FakeEngine, build_fake_engine

    class Weights:
        """Memory that two threads read, half of it each."""

        def __init__(self, num_bytes: int) -> None:
            self._begin, self._end = threading.Semaphore(0), threading.Semaphore(0)
            for _ in range(2):
                half = np.ones(num_bytes // 16, dtype=np.int64)
                threading.Thread(target=self._read_half, args=(half,), daemon=True).start()

        def _read_half(self, half: np.ndarray) -> None:
            Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(READER)
            while True:
                self._begin.acquire()
                half.sum()
                self._end.release()

        def read(self) -> None:
            self._begin.release(2)
            self._end.acquire()
            self._end.acquire()

    class ReadingCore(FakeCore):
        def __init__(self, weights: Weights) -> None:
            super().__init__(max_waiting=1024)
            self._weights = weights

        def step(self) -> Sequence[TokenEvent]:
            if not self._running:
                return super().step()
            self._weights.read()
            events, self._ended = self._ended, []
            for request_id, running in list(self._running.items()):
                running.done += 1
                token, last = 97 + running.done % 26, running.done == running.request.sampling.max_tokens
                if last:
                    usage = Usage(len(running.request.prompt_ids), running.done)
                    events.append(TokenEvent(request_id, (token,), "length", usage=usage))
                    del self._running[request_id]
                else:
                    events.append(TokenEvent(request_id, (token,)))
            return events

    def build(config, wake, on_stage=lambda stage: None):  # type: ignore[no-untyped-def]
        built = build_fake_engine(config, wake, on_stage)
        info = changed(built.info, max_model_len=1 << 16, vocab_size=260, eos_ids=(256,))
        weights = Weights(int(os.environ["BENCH_STEP_MB"]) << 20)
        return FakeEngine(ReadingCore(weights), info, heartbeat=built.heartbeat)

    sys.exit(run(build))


# The clients, and the clocks.


class Server:
    def __init__(self, checkout: Path, directory: Path, step_mb: int, model: Path | None) -> None:
        # Last, this checkout's tests: the other one may not have this file.
        path = os.pathsep.join([*(str(checkout / portion) for portion in PORTIONS), str(HERE / "tests")])
        environment = {"PYTHONPATH": path, "BENCH_STEP_MB": str(step_mb)}
        options = {"environment": environment, "served_model_name": "base"}
        if model is None:
            tiny = write_tiny_model(directory / "model", positions=1 << 16)
            self._server = LiveServer(tiny, directory / "data", **options)
            self._server.command[:4] = [sys.executable, str(HERE_FILE), "--serve", "serve"]
        else:
            self._server = LiveServer(model, directory / "data", threads=os.cpu_count(), **options)
        self._key = ""
        self._engine_pid = 0

    @property
    def pid(self) -> int:
        return self._server.pid

    def __enter__(self) -> Server:
        self._server.__enter__()
        self._server.create_tenant("bench")
        self._key = self._server.create_key("bench")
        children = psutil.Process(self.pid).children()
        self._engine_pid = next(child.pid for child in children if "--socket" in child.cmdline())
        return self

    def __exit__(self, *error: object) -> None:
        self._server.reap()

    def measure(self, load: Load) -> dict[str, float]:
        """The columns of `COLUMNS`."""
        limit = "max_output_tokens" if load.path == "/v1/responses" else "max_tokens"
        text = json.dumps({"model": "base", "stream": True, **load.body, limit: load.tokens}).encode()
        head = (
            f"POST {load.path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {self._key}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(text)}\r\n\r\n"
        )
        before, began = self._times(), time.monotonic()
        self._read(head.encode() + text, load)
        elapsed = time.monotonic() - began
        tokens = load.requests * load.tokens
        taken = {name: seconds - before[name] for name, seconds in self._times().items()}
        found = {name: seconds * 1e6 / (tokens * load.streams) for name, seconds in taken.items()}
        return found | {"ms a step": elapsed * 1e3 / tokens}

    def _read(self, request: bytes, load: Load) -> None:
        """Each stream asks and reads to the end, as often as the load says."""
        with selectors.DefaultSelector() as selector:
            for _ in range(load.streams):
                connection = socket.create_connection(("127.0.0.1", self._server.data_port))
                connection.sendall(request)
                selector.register(connection, selectors.EVENT_READ, _Reader(load.requests))
            while selector.get_map():
                for key, _ in selector.select():
                    connection, reader = key.fileobj, key.data
                    assert isinstance(connection, socket.socket)
                    if not reader.take(connection.recv(1 << 16)):
                        continue
                    if reader.requests:
                        connection.sendall(request)
                    else:
                        selector.unregister(connection)
                        connection.close()

    def _times(self) -> dict[str, float]:
        """Processor seconds so far, by thread."""
        seconds = dict.fromkeys(THREADS, 0.0)
        for pid, first, rest in (
            (self._server.pid, "loop", "others"),
            (self._engine_pid, "socket", "step"),
        ):
            seconds[rest] += process_s(pid)
            for task in Path(f"/proc/{pid}/task").iterdir():
                taken = int((task / "schedstat").read_text().split()[0]) / 1e9
                if int(task.name) == pid:
                    seconds[first] += taken
                    seconds[rest] -= taken
                elif (task / "comm").read_text().strip() == READER:
                    seconds[rest] -= taken
        return seconds


def process_s(pid: int) -> float:
    """Processor seconds of all threads of a process, also of those that have ended: clock_getcpuclockid(3)."""
    return time.clock_gettime((~pid << 3) | 2)


@dataclass
class _Reader:
    """One connection's answers: `requests` are still to be read."""

    requests: int
    _last: bytes = b""

    def take(self, data: bytes) -> bool:
        """Whether an answer has ended."""
        if not self._last and not data.startswith(b"HTTP/1.1 200 "):
            raise SystemExit(f"a request failed: {data.decode()}")
        self._last = (self._last + data)[-len(END_OF_ANSWER) :]
        if self._last != END_OF_ANSWER:
            return False
        self._last = b""
        self.requests -= 1
        return True


def compare(servers: Sequence[Server], names: Sequence[str], kinds: dict[str, Load], rounds: int) -> None:
    taken: dict[str, list[list[dict[str, float]]]] = defaultdict(list)
    for number in range(-1, rounds):  # the first round warms up
        for name, load in kinds.items():
            found: list[dict[str, float]] = [{}] * len(servers)
            for index in sorted(range(len(servers)), reverse=bool(number % 2)):
                found[index] = servers[index].measure(load)
            if number >= 0:
                taken[name].append(found)
    print(f"{'µs a token':26}{'':18}" + "".join(f"{name:>10}" for name in COLUMNS))
    for name, found_by_round in taken.items():
        for index, server in enumerate(names):
            medians = (statistics.median(found[index][part] for found in found_by_round) for part in COLUMNS)
            print(f"{name:26}{server:18}" + "".join(f"{value:10.1f}" for value in medians))


def main() -> None:
    if sys.argv[1:2] == ["--serve"]:
        del sys.argv[1]
        serve()
        return
    if sys.argv[1:2] == ["--engine"]:
        del sys.argv[1]
        engine()
        return
    parser = argparse.ArgumentParser(description="What a streamed token costs beside the engine's work.")
    parser.add_argument("--beside", type=Path, help="another checkout")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--step-mb", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=256, help="of each steady stream")
    parser.add_argument("--only", default="", help="loads whose names contain this")
    parser.add_argument("--model", type=Path, help="a model's directory")
    arguments = parser.parse_args()
    checkouts = [HERE, *([arguments.beside.resolve()] if arguments.beside is not None else [])]
    kinds = {
        name: load
        for name, load in loads(arguments.tokens, arguments.streams).items()
        if arguments.only in name and (arguments.model is None or "completions" in name)
    }
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        servers = [
            stack.enter_context(Server(checkout, Path(name) / str(index), arguments.step_mb, arguments.model))
            for index, checkout in enumerate(checkouts)
        ]
        compare(servers, [commit_of(checkout) for checkout in checkouts], kinds, arguments.rounds)


if __name__ == "__main__":
    main()
