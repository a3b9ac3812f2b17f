"""What the HTTP layers of the data plane cost a request.

    PYTHONPATH=tests python -m bench.http.http_cost [--beside CHECKOUT | --traced] [--rounds 15] [--requests 300]

The data plane runs behind uvicorn over an engine that answers from a script at once, in a process of its own. A client
asks one request after the other. The figure is processor time of the event loop's thread for one request: HTTP,
authentication, schemas, formats, and the script itself. Tokenizing is done in other threads and is not in it.

With `--beside`, a second server runs the code of another checkout (a git worktree, say). The two are asked in turns in
each round, the first one alternating. The figures are medians of the rounds, and the median of the differences within a
round. With `--traced`, the first server exports a trace of each request to a collector in the client's process, and the
second does not. Processor time is reported, not elapsed time: other programs of the machine disturb it less. With
`--process` it is that of the whole server: the threads that tokenize and the one that exports count too.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

HERE = Path(__file__).resolve().parents[3]
PORTIONS = ("server", "adapters", "kernels", "admin", "migrations", "tests")
PLANES = ("support.http.data_plane", "support.data_plane")
"""Where the data plane over a scripted engine is, in this checkout or in an older one."""
CHAT = {"messages": [{"role": "user", "content": "x" * 64}], "max_tokens": 16}
REQUESTS: dict[str, tuple[str, dict[str, Any] | None]] = {
    "GET /v1/models": ("/v1/models", None),
    "GET /v1/models/{id}": ("/v1/models/pirate", None),
    "GET /livez": ("/livez", None),
    "chat of 16 tokens": ("/v1/chat/completions", CHAT),
    "completion of 16 tokens": ("/v1/completions", {"prompt": "x" * 64, "max_tokens": 16}),
    "streaming chat of 16 tokens": ("/v1/chat/completions", {**CHAT, "stream": True}),
}


class _NoLog:
    def info(self, event: str, **fields: Any) -> None: ...


def serve(checkout: str, directory: str, clock: str, collector: str) -> None:
    """Prints the port, then answers each line of standard input with the seconds of the loop's thread (or of the
    `clock` "process") so far. `collector`: the URL that traces are sent to, or empty."""
    import loraplex.api

    assert next(iter(loraplex.api.__path__)).startswith(checkout + os.sep), loraplex.api.__path__
    for name in PLANES:
        try:
            support = importlib.import_module(name)
        except ModuleNotFoundError:
            continue
        break
    options = {"tracing": requests_traced_to(collector)} if collector else {}
    with support.running_data_plane(Path(directory), access_log=_NoLog(), **options) as plane:
        plane.engine.default = plane.engine.default.__class__(text="x" * 64)

        async def loop_s() -> float:
            return time.process_time() if clock == "process" else time.thread_time()

        print(plane.server.port, flush=True)
        for _ in sys.stdin:
            print(plane.server.call(loop_s), flush=True)


def requests_traced_to(collector: str) -> Any:
    from loraplex.api.metrics import Metrics
    from loraplex.app.settings import Settings
    from loraplex.app.tracing.setup import start_tracing

    return start_tracing(Settings(otlp_endpoint=collector), "org/tiny", Metrics("org/tiny").traces).requests


class Server:
    """A server of one checkout's code, in a process of its own."""

    def __init__(self, checkout: Path, directory: Path, clock: str, collector: str = "") -> None:
        path = os.pathsep.join(str(checkout / portion) for portion in PORTIONS)
        arguments = [str(checkout), str(directory), clock, collector]
        command = [sys.executable, str(Path(__file__).resolve()), "--serve", *arguments]
        self._process = subprocess.Popen(
            command,
            env=os.environ | {"PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in, self._out = self._process.stdin, self._process.stdout
        self._socket = socket.create_connection(("127.0.0.1", int(self._out.readline())))
        self._answers = self._socket.makefile("rb")

    def measure(self, path: str, body: dict[str, Any] | None, count: int) -> float:
        """Seconds of the loop's thread for one of `count` requests."""
        text = b"" if body is None else json.dumps({"model": "org/tiny", "ignore_eos": True, **body}).encode()
        head = (
            f"{'GET' if body is None else 'POST'} {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer lpx_acme\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(text)}\r\n\r\n"
        )
        before = self._loop_s()
        for _ in range(count):
            self._socket.sendall(head.encode() + text)
            read_answer(self._answers)
        return (self._loop_s() - before) / count

    def _loop_s(self) -> float:
        print(file=self._in, flush=True)
        return float(self._out.readline())

    def close(self) -> None:
        self._answers.close()
        self._socket.close()
        self._in.close()
        self._process.wait(20)
        self._out.close()


def read_answer(answers: BinaryIO) -> None:
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        line = answers.readline()
        if not line:
            raise SystemExit("the server closed the connection")
        head += line
    if not head.startswith(b"HTTP/1.1 200 "):
        raise SystemExit(f"a request failed: {head.decode()}")
    if length := re.search(rb"(?i)content-length: (\d+)", head):
        answers.read(int(length[1]))
        return
    while size := int(answers.readline(), 16):
        answers.read(size + 2)
    answers.read(2)


def commit_of(checkout: Path) -> str:
    command = ["git", "-C", str(checkout), "describe", "--always", "--dirty"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def compare(servers: list[Server], names: list[str], rounds: int, count: int) -> None:
    taken: dict[str, list[list[float]]] = defaultdict(list)
    try:
        for number in range(-1, rounds):  # the first round warms up
            for name, (path, body) in REQUESTS.items():
                times = [0.0] * len(servers)
                for index in sorted(range(len(servers)), reverse=bool(number % 2)):
                    times[index] = servers[index].measure(path, body, count) * 1e3
                if number >= 0:
                    taken[name].append(times)
    finally:
        for server in servers:
            server.close()
    print(f"{'ms a request':30}" + "".join(f"{name:>16}" for name in names) + f"{'difference':>14}")
    for name, found in taken.items():
        medians = [statistics.median(column) for column in zip(*found, strict=True)]
        row = f"{name:30}" + "".join(f"{value:16.3f}" for value in medians)
        if len(servers) == 2:
            row += f"{statistics.median(own - other for own, other in found):+14.3f}"
        print(row)


def main() -> None:
    if sys.argv[1:2] == ["--serve"]:
        serve(*sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description="What the HTTP layers cost a request.")
    second = parser.add_mutually_exclusive_group()
    second.add_argument("--beside", type=Path, help="another checkout")
    second.add_argument("--traced", action="store_true", help="compare with this checkout and traces")
    parser.add_argument("--process", action="store_true", help="processor time of the whole process")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--requests", type=int, default=300, help="of each kind in a round")
    arguments = parser.parse_args()
    clock = "process" if arguments.process else "thread"
    names = [commit_of(HERE)]
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        servers = [Server(HERE, Path(name) / "0", clock)]
        if arguments.beside is not None:
            checkout = arguments.beside.resolve()
            servers.append(Server(checkout, Path(name) / "1", clock))
            names.append(commit_of(checkout))
        elif arguments.traced:
            from support.http.otlp_collector import OtlpCollector

            collector = stack.enter_context(OtlpCollector())
            servers.insert(0, Server(HERE, Path(name) / "1", clock, collector.url))
            names = ["with traces", "without"]
        compare(servers, names, arguments.rounds, arguments.requests)


if __name__ == "__main__":
    main()
