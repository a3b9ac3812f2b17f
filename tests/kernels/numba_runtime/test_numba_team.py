"""The threads that numba's kernels share."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from loraplex.kernels.numba_runtime.thread_team import Kernel, take_unit
from loraplex.kernels.numba_runtime.vectors import LIKE, fetch_add, read_float64, read_int64

TESTS = Path(__file__).parents[2]


def _count(team, arguments, like):
    """Adds 1 to each of `total` counters, and looks at a number that should have come as it is."""
    total, counters = read_int64(arguments), read_int64(arguments + 8)
    expected = read_float64(arguments + 16)
    while True:
        unit = take_unit(team, total)
        if unit >= total:
            break
        if expected == -0.75:
            fetch_add(counters + unit * 8, 1)


count = Kernel(_count, "qqd")


def _meet(team, arguments):
    """Two units for two threads. The first waits until the second has been taken, and then tells that it was; the
    second is told to be done long after it."""
    told, done, patience = read_int64(arguments), read_int64(arguments + 8), read_int64(arguments + 16)
    taken = read_int64(arguments + 24)
    while True:
        unit = take_unit(team, 2)
        if unit >= 2:
            break
        if unit == 0:
            for _ in range(patience):
                if fetch_add(taken, 0) >= 1:
                    fetch_add(taken, -1)
                    fetch_add(told, 1)
                    break
        else:
            fetch_add(taken, 1)
            for _ in range(400_000):  # some milliseconds
                fetch_add(done, 0)
            fetch_add(done, 1)


meet = Kernel(_meet, "qqqq")
PATIENCE = 200_000_000
"""Some seconds, within which another thread gets a core."""


@pytest.fixture(params=[1, 2, 5])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("like", LIKE.values(), ids=str)
def test_every_unit_is_done_once_in_each_run(threads: int, like: object) -> None:
    counters = np.zeros(257, np.int64)
    for _ in range(500):
        count.run((like,), len(counters), counters.ctypes.data, -0.75)
        # Also those that other threads have done.
        assert counters[0] == counters[-1]
    assert (counters == 500).all()


def _name(team, arguments):
    """Writes down which thread did each unit. No thread goes on from its first before all have one."""
    names, total, begun = read_int64(arguments), read_int64(arguments + 8), read_int64(arguments + 16)
    threads, patience = read_int64(arguments + 24), read_int64(arguments + 32)
    mine = -1
    while True:
        unit = take_unit(team, total)
        if unit >= total:
            break
        if mine < 0:
            mine = fetch_add(begun, 1)
            for _ in range(patience):
                if fetch_add(begun, 0) >= threads:
                    break
        fetch_add(names + unit * 8, mine + 1)


name_units = Kernel(_name, "qqqqq")


def test_a_thread_begins_with_a_share_of_its_own(threads: int) -> None:
    names, begun = np.zeros(10 * threads, np.int64), np.zeros(1, np.int64)
    name_units.run((), names.ctypes.data, len(names), begun.ctypes.data, threads, PATIENCE)
    firsts = names[::10]
    assert sorted(firsts) == list(range(1, threads + 1)), "each share's first unit is another thread's"
    assert ((names >= 1) & (names <= threads)).all()


def test_several_callers_at_once(threads: int) -> None:
    like = LIKE[torch.float32]
    results = [np.zeros(33, np.int64) for _ in range(4)]

    def call(counters: np.ndarray) -> None:
        for _ in range(500):
            count.run((like,), len(counters), counters.ctypes.data, -0.75)

    callers = [threading.Thread(target=call, args=(counters,)) for counters in results]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert all((counters == 500).all() for counters in results)


def test_no_units_at_all(threads: int) -> None:
    counters = np.zeros(1, np.int64)
    count.run((LIKE[torch.bfloat16],), 0, counters.ctypes.data, -0.75)
    assert counters[0] == 0


def test_a_run_ends_when_those_have_that_joined_it() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    told, done, taken = np.zeros(1, np.int64), np.zeros(1, np.int64), np.zeros(1, np.int64)
    for run in range(20):
        meet.run((), told.ctypes.data, done.ctypes.data, PATIENCE, taken.ctypes.data)
        assert (told[0], done[0]) == (run + 1, run + 1)
    torch.set_num_threads(before)


def in_a_process(program: str) -> str:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])}
    done = subprocess.run(
        [sys.executable, "-c", program],
        check=False,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_process_ends_while_they_wait_in_a_loop() -> None:
    program = """
import numpy as np, torch
torch.set_num_threads(4)
from kernels.numba_runtime.test_numba_team import count
from loraplex.kernels.numba_runtime.vectors import LIKE
counters = np.zeros(64, np.int64)
for _ in range(200):
    count.run((LIKE[torch.bfloat16],), 64, counters.ctypes.data, -0.75)
print(int(counters.sum()))
"""
    assert in_a_process(program).split() == ["12800"]


def test_a_fork_has_threads_of_its_own() -> None:
    program = """
import os, numpy as np, torch
torch.set_num_threads(2)
from kernels.numba_runtime.test_numba_team import PATIENCE, meet
told, done, taken = np.zeros(1, np.int64), np.zeros(1, np.int64), np.zeros(1, np.int64)
run = lambda: meet.run((), told.ctypes.data, done.ctypes.data, PATIENCE, taken.ctypes.data)
run()
child = os.fork()
if not child:
    run()
    os._exit(0 if (told[0], done[0]) == (2, 2) else 1)
print(os.waitpid(child, 0)[1])
"""
    assert in_a_process(program).split() == ["0"]


@pytest.mark.parametrize(
    "dtype",
    [pytest.param("float32", marks=pytest.mark.soak), pytest.param("bfloat16", marks=pytest.mark.slow)],
)
def test_an_engine_compiles_nothing_after_its_start(dtype: str, tmp_path: Path) -> None:
    """Neither for a prompt nor for one token, with an adapter or without."""
    program = f"""
import sys
from pathlib import Path
from numba.core import event
from support.engine.local_engine import LocalEngine
from support.models.checkpoints import FAMILIES, save_tiny
from support.adapters.tiny_adapters import ADAPTERS, save_adapters
path = Path({str(tmp_path)!r})
base = save_tiny(path / "base", FAMILIES["llama"])
adapters = save_adapters(base, path, ADAPTERS)
engine = LocalEngine(base, path, dtype={dtype!r}, kernels="numba", kv_cache_memory=1 << 24, max_num_batched_tokens=48)
recording = event.RecordingListener()
event.register("numba:compile", recording)
event.register("numba:llvm_lock", recording)
for number, adapter in enumerate((None, *adapters.values())):
    ref = None if adapter is None else engine.publish(adapter, name=f"a{{number}}")
    engine.add(str(number), range(3, 3 + 11 * (number + 1)), ref, max_tokens=4)
engine.run()
assert all(len(engine.tokens(name)) == 4 for name in engine.events)
print(len(engine.events), len(recording.buffer))
engine.close()
"""
    answered, compiled = map(int, in_a_process(program).split())
    assert answered >= 3
    assert compiled == 0
