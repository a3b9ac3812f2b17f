"""Everything about the GPU path in one run of a few minutes: what is right, and how fast it is.

    PYTHONPATH=tests:server:adapters:kernels python3 -m bench.gpu.suite --budget 540 --out build/gpu

Cases run in order of importance, in processes of their own that are ended where they hang. Each result is on the disk
before the next case begins: what is cut off still counts, and a second run with the same --out goes on from there. The
report is written at the end, as JSON and as Markdown. `--small` runs tiny shapes interpreted, without a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from queue import Empty, Queue
from typing import Any

from bench.gpu.report import write_report

_RESERVE_S = 5.0
"""Of the budget, for the report."""
_BUILD_S = 180.0
"""So long a worker may take to make what several cases share: a model with its recordings."""
_START_S = 90.0
"""So long a worker may take until it is there."""
AB_NAMES = (
    "gemv", "shrink", "early", "strips", "prompt-recordings", "columns", "planes",
    "prompt-rows", "kv-codes", "int4", "int8", "fp8", "humming", "prefill",
)  # fmt: skip
"""Keys of `bench.gpu.decoding.switches`, which imports torch; "prefill" compares attention to prompts."""
LANES = 4
"""Processes beside each other, for cases that are not timed."""


class WorkerLost(Exception):
    """A worker died, or did not answer in time; `cut`: because the budget was spent."""

    def __init__(self, message: str, *, cut: bool = False) -> None:
        super().__init__(message)
        self.cut = cut


class Worker:
    """See `bench.gpu.worker`. One case at a time."""

    def __init__(self, catalogue: str, environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.gpu.worker", catalogue],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,
        )
        self._answers: Queue[str] = Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def hello(self, left_s: float) -> dict[str, Any]:
        """Wait at most `left_s` for the worker's list of cases and its device. Raises WorkerLost."""
        return self._answer(min(_START_S, left_s), cut=left_s < _START_S)

    def run(self, key: str, limit_s: float, left_s: float) -> dict[str, Any]:
        """A case's result. It may take `limit_s`, and _BUILD_S before that where it builds what others use too; all
        together no more than `left_s`. Raises WorkerLost, with what became of it."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(key) + "\n")
            self._process.stdin.flush()
        except OSError as error:
            raise WorkerLost("died before the case began") from error
        end = time.monotonic() + left_s
        allowed = limit_s
        while True:
            left = end - time.monotonic()
            answer = self._answer(min(allowed, left), cut=left < allowed)
            if "building" not in answer:
                return answer
            allowed = _BUILD_S if answer["building"] else limit_s

    def close(self) -> None:
        """End it, whatever it does."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put("")

    def _answer(self, limit_s: float, *, cut: bool = False) -> dict[str, Any]:
        try:
            line = self._answers.get(timeout=max(0.1, limit_s))
        except Empty:
            message = "the budget was spent" if cut else f"no answer within {limit_s:.0f} s"
            raise WorkerLost(message, cut=cut) from None
        if not line:
            raise WorkerLost(f"the process died (exit status {self._process.wait()})")
        found: dict[str, Any] = json.loads(line)
        return found


class Journal:
    """Results as lines of JSON, each on the disk before the next case begins."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self.lines: list[dict[str, Any]] = []
        if path.exists():
            for line in path.read_text("utf-8").splitlines():
                try:
                    self.lines.append(json.loads(line))
                except ValueError:
                    continue  # the last one of a run that was cut off
        self._file = path.open("a", encoding="utf-8")
        if path.stat().st_size and not path.read_bytes().endswith(b"\n"):
            self._file.write("\n")

    def add(self, line: dict[str, Any]) -> None:
        with self._lock:
            self.lines.append(line)
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()
            os.fsync(self._file.fileno())

    @property
    def runs(self) -> list[dict[str, Any]]:
        return [line["run"] for line in self.lines if "run" in line]

    def results(self) -> dict[str, dict[str, Any]]:
        """By case, the last of each."""
        return {line["case"]: line for line in self.lines if "case" in line}


@dataclass
class Suite:
    """One run. `catalogue`: "module:function" that gives the cases, with ":" and
    an argument behind it for each that it takes. `say` is told of progress. `blocks`: seconds by section, for cases in
    the order of these sections; what a section has not run by then waits until all others have had theirs."""

    catalogue: str
    out: Path
    budget_s: float
    only: Sequence[str] = ("",)
    lanes: int = LANES
    blocks: Mapping[str, float] = field(default_factory=dict)
    commit: str = "unknown"
    program: str = "bench.gpu.suite"
    environment: dict[str, str] = field(default_factory=lambda: dict(os.environ))
    say: Callable[[str], None] = print
    clock: Callable[[], float] = time.monotonic
    _workers: list[Worker] = field(default_factory=list)
    _stopped: threading.Event = field(default_factory=threading.Event)

    def run(self) -> bool:
        """Whether all that ran was right. Raises WorkerLost where not even a first worker starts, and ValueError where
        `out` holds results of something else."""
        self._end = end = self.clock() + self.budget_s - _RESERVE_S
        self.out.mkdir(parents=True, exist_ok=True)
        self._journal = Journal(self.out / "results.jsonl")
        first = self.start()
        keys: list[str] = []
        try:
            hello = first.hello(self.left)
            self._begin(hello["environment"])
            cases = [case for case in hello["cases"] if any(part in case["key"] for part in self.only)]
            keys = [case["key"] for case in cases]
            own = _Lane(self, first)
            for section, seconds in self.blocks.items():
                self._end = min(end, self.clock() + seconds)
                self._run_all([case for case in cases if case["key"].startswith(f"{section}/")], own)
            self._end = end
            self._run_all(cases, own)
        finally:
            self._stopped.set()
            for worker in self._workers:
                worker.close()
            if keys:
                write_report(self.out, self._journal.runs, keys, self._journal.results())
        found = self._journal.results()
        return all(found[key]["status"] in ("ok", "skipped") for key in keys if _counts(found.get(key)))

    def start(self) -> Worker:
        worker = Worker(self.catalogue, self.environment)
        self._workers.append(worker)
        return worker

    def _begin(self, environment: dict[str, Any]) -> None:
        identity = _identity(self.commit, self.catalogue, environment)
        for run in self._journal.runs:
            other = [name for name, value in identity.items() if run["identity"].get(name) != value]
            if other:
                raise ValueError(
                    f"{self.out} holds results of another {', '.join(other)}: name another --out"
                )
        run = {
            "identity": identity,
            "environment": environment,
            "started": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
            "command": shlex.join(["python3", "-m", self.program, *sys.argv[1:]]),
            "budget_s": self.budget_s,
        }
        self._journal.add({"run": run})

    def _run_all(self, listed: list[dict[str, Any]], own: _Lane) -> None:
        done = self._journal.results()
        cases = [case for case in listed if not _counts(done.get(case["key"]))]
        for alone, group in groupby(cases, key=lambda case: bool(case["alone"])):
            waiting = deque(group)
            others = [_Lane(self, None) for _ in range(0 if alone else min(self.lanes, len(waiting)) - 1)]
            threads = [threading.Thread(target=lane.run, args=(waiting,), daemon=True) for lane in others]
            for thread in threads:
                thread.start()
            own.run(waiting)
            for thread in threads:
                thread.join()
            for lane in others:
                lane.close()  # for the memory of the device

    def one(self, lane: _Lane, case: dict[str, Any]) -> None:
        """Run a case, and keep what comes of it."""
        begun = time.monotonic()
        try:
            worker = lane.ready()
            result = worker.run(case["key"], case["limit_s"], self.left)
            if result.pop("leaving"):
                lane.close()
        except WorkerLost as error:
            lane.close()
            result = {
                "case": case["key"],
                "status": "cut" if error.cut else "lost",
                "rows": [],
                "note": str(error),
                "seconds": round(time.monotonic() - begun, 2),
            }
        if not self._stopped.is_set():
            self._journal.add(result)
            self.say(f"{result['status']:7}{result['seconds']:7.1f} s  {result['case']}")

    @property
    def left(self) -> float:
        """Seconds of the budget, or of a section's part of it."""
        return self._end - self.clock()

    @property
    def open(self) -> bool:
        return self.left > 0 and not self._stopped.is_set()


class _Lane:
    """A worker, and another one where that was lost."""

    def __init__(self, suite: Suite, worker: Worker | None) -> None:
        self._suite = suite
        self._worker = worker

    def run(self, waiting: deque[dict[str, Any]]) -> None:
        """Take cases from those that wait, as long as there is time."""
        while self._suite.open:
            try:
                case = waiting.popleft()
            except IndexError:
                return
            self._suite.one(self, case)

    def ready(self) -> Worker:
        """Raises WorkerLost."""
        if self._worker is None:
            self._worker = self._suite.start()
            self._worker.hello(self._suite.left)
        return self._worker

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()
        self._worker = None


def _identity(commit: str, catalogue: str, environment: dict[str, Any]) -> dict[str, str]:
    """What the results of one folder must have in common. All else, such as a driver's patch number, is recorded with
    each run."""
    minor = {name: ".".join(environment[name].split(".")[:2]) for name in ("torch", "triton")}
    return {"commit": commit, "catalogue": catalogue, "device": environment["device"], **minor}


def _counts(result: dict[str, Any] | None) -> bool:
    """Whether a case has run: what the budget cut off has not."""
    return result is not None and result["status"] != "cut"


def current_commit() -> str:
    """As git tells it, with a plus where files differ from it; "unknown" without git."""
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--dirty=+", "--exclude=*"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return found.stdout.strip()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.gpu.suite", description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("build/gpu"), help="folder for results and report")
    parser.add_argument("--budget", type=float, default=540.0, help="seconds for everything")
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        help="cases whose section and name hold this; may be repeated: then those that hold one of them",
    )
    parser.add_argument("--small", action="store_true", help="tiny shapes, interpreted, without a GPU")
    parser.add_argument("--lanes", type=int, default=LANES, help="processes for cases that are not timed")
    parser.add_argument("--commit", default=None, help="where git is not there to ask")
    parser.add_argument(
        "--ab",
        action="append",
        default=[],
        metavar="NAME",
        choices=AB_NAMES,
        help="steps of both sides of a switch instead, in turns; may be repeated: " + ", ".join(AB_NAMES),
    )
    given = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    environment = dict(os.environ)
    if given.small:
        environment |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    size = "small" if given.small else "full"
    suite = Suite(
        catalogue=":".join(["bench.gpu.catalogue", f"{size}_ab" if given.ab else size, *given.ab]),
        out=given.out,
        budget_s=given.budget,
        only=given.only or ("",),
        lanes=1 if given.small else given.lanes,
        commit=given.commit or current_commit(),
        environment=environment,
        say=lambda line: print(line, flush=True),
    )
    try:
        right = suite.run()
    except (WorkerLost, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    print(f"written: {given.out / 'results.md'}")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
