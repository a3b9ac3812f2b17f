"""What a start takes: of the engine process, of `loraplex serve`, of `loraplex --help`.

    PYTHONPATH=tests python -m bench.start MODEL [--rounds 5] [--trees DIR,DIR] [--kernels auto] [--out FILE]

MODEL is a model directory. `--trees` are checkouts to compare, this one alone by default: each round measures all of
them in turn, after one round that is not counted, in which the caches fill. Each figure is the median of the rounds:
seconds of the processor, user and system together, and of the wall, from the spawn until the process is ready or has
ended. `serve` is given with its engine process (ready together) and without.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
import psutil

from loraplex.engine.config import EngineConfig
from loraplex.engine.ipc import framing
from loraplex.engine.ipc import protocol as wire
from support.servers.live_server import REPOSITORY, SMALL, clean_environment, free_ports

PORTIONS = ("server", "adapters", "kernels", "admin", "migrations")
READY_S = 300.0
Taken = dict[str, tuple[float, float]]
"""(seconds of the processor, seconds) by what was started."""


def environment(tree: Path) -> dict[str, str]:
    path = os.pathsep.join(str(tree / portion) for portion in PORTIONS)
    return clean_environment({"PYTHONPATH": path})


def processor_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def start_engine(tree: Path, model: Path, kernels: str, work: Path) -> Taken:
    config = EngineConfig(
        model_path=str(model),
        artifact_dir=str(work / "artifacts"),
        device="cpu",
        kernels=kernels,  # type: ignore[arg-type]
        kv_cache_memory=512 << 20,
        adapter_memory=256 << 20,
        adapter_cpu_memory=256 << 20,
        cache_dir=str(work),
        plan_dir=str(work),
    )
    path = work / "s"
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen(1)
        began = time.perf_counter()
        child = subprocess.Popen(
            [sys.executable, "-m", "loraplex.engine.ipc.process", "--socket", str(path)],
            env=environment(tree),
            stdin=subprocess.PIPE,
        )
        assert child.stdin is not None
        with child, child.stdin as stdin:
            stdin.write(msgspec.json.encode(config))
            stdin.close()
            connection, _ = server.accept()
            with connection:
                await_ready(connection)
                taken = (processor_s(psutil.Process(child.pid)), time.perf_counter() - began)
    return {"engine": taken}


def await_ready(connection: socket.socket) -> None:
    reader = framing.FrameReader()
    while data := connection.recv(1 << 16):
        for event in map(wire.decode_event, reader.feed(data)):
            if isinstance(event, wire.Fatal):
                raise SystemExit(f"the engine did not start: {event.message}")
            if isinstance(event, wire.Ready):
                return
    raise SystemExit("the engine ended")


def start_server(tree: Path, model: Path, kernels: str, work: Path) -> Taken:
    port, admin_port = free_ports(2)
    given: Mapping[str, object] = {
        "model": model, "data-dir": work / "data", "port": port, "admin-port": admin_port, "drain-grace": 0,
        "kernels": kernels, **{name.replace("_", "-"): value for name, value in SMALL.items()},
    }  # fmt: skip
    options = [part for name, value in given.items() for part in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "loraplex.app.cli", "serve", *options]
    with open(work / "log", "ab") as log:
        began = time.perf_counter()
        child = subprocess.Popen(command, env=environment(tree), stdout=log, stderr=log)
        try:
            while not is_ready(port):
                if child.poll() is not None or time.perf_counter() - began > READY_S:
                    raise SystemExit(f"the server did not start: {(work / 'log').read_text()[-2000:]}")
                time.sleep(0.01)
            wall = time.perf_counter() - began
            server = psutil.Process(child.pid)
            own = processor_s(server)
            engine = sum(
                processor_s(process)
                for process in server.children(recursive=True)
                if "--spare" not in process.cmdline()
            )
        finally:
            child.terminate()
            child.wait(60)
    return {"serve, with its engine": (own + engine, wall), "serve, without": (own, wall)}


def is_ready(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
        connection.request("GET", "/readyz")
        return connection.getresponse().status == 200
    return False


def run_commands(tree: Path, work: Path) -> Taken:
    taken: Taken = {}
    for name, arguments in (
        ("--help", ["--help"]),
        ("tenant list", ["tenant", "list", "--admin-token", "none"]),
    ):
        began = time.perf_counter()
        child = subprocess.Popen(
            [sys.executable, "-m", "loraplex.app.cli", *arguments],
            env=environment(tree) | {"LORAPLEX_ADMIN_URL": "http://127.0.0.1:9"},  # nobody is there
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=work,
        )
        _, _, used = os.wait4(child.pid, 0)
        child.returncode = 0  # it has been waited for
        taken[f"loraplex {name}"] = (used.ru_utime + used.ru_stime, time.perf_counter() - began)
    return taken


def measure(
    arguments: argparse.Namespace, trees: list[Path], work: Path
) -> Iterator[tuple[int, Path, Taken]]:
    for number in range(-1, arguments.rounds):
        for index, tree in enumerate(trees):
            own = work / str(index)
            own.mkdir(exist_ok=True)
            taken = start_engine(tree, arguments.model, arguments.kernels, own)
            taken |= start_server(tree, arguments.model, arguments.kernels, own)
            taken |= run_commands(tree, own)
            yield number, tree, taken


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=lambda given: Path(given).resolve())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--trees", default=str(REPOSITORY))
    parser.add_argument("--kernels", default="auto")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    trees = [Path(tree).resolve() for tree in arguments.trees.split(",")]
    found: dict[str, dict[str, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    with tempfile.TemporaryDirectory() as scratch:
        for number, tree, taken in measure(arguments, trees, Path(scratch)):
            for what, seconds in taken.items():
                if number >= 0:
                    found[what][str(tree)].append(seconds)
            print(f"round {number}, {tree}: {taken}", file=sys.stderr)
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, {arguments.rounds} rounds, load {os.getloadavg()[0]:.1f}"
    )
    print(
        "| started | checkout | processor s | (least, most) | wall s | (least, most) |\n|---|---|---|---|---|---|"
    )
    for what, by_tree in found.items():
        for tree, rounds in by_tree.items():
            cells = []
            for values in zip(*rounds, strict=True):
                cells += [f"{statistics.median(values):.2f}", f"({min(values):.2f}, {max(values):.2f})"]
            print(f"| {what} | {Path(tree).name} | {' | '.join(cells)} |")
    if arguments.out:
        arguments.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
