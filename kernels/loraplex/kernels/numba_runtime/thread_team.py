"""A team of threads for kernels that numba compiles.

A kernel takes units of work until none are left, so any number of threads may take part. The thread that runs it takes
part at once, and waits in the end only for those that have joined. A thread without a core delays no other thread. Each
of a step's hundreds of OpenMP barriers waits for the slowest thread: beside one other busy process on two cores a step
with OpenMP took ten to seventy times as long (docs/lab/notes.md).

Each thread begins with a share of the units that is its own, and takes from the others' when that is done. Where units
are rows in their order, a row stays in the cache of one core from one kernel to the next.

Threads wait for the next kernel in a loop for about as long as the gap between two of a step, and then asleep.
"""
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, allow-incomplete-defs

from __future__ import annotations

import atexit
import os
import platform
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import cfunc, typeof, types
from numba.core import cgutils  # private: see numba_ir
from numba.extending import intrinsic

from loraplex.kernels.numba_runtime import ir as nir
from loraplex.kernels.numba_runtime.cache import KERNELS
from loraplex.kernels.numba_runtime.vectors import (
    JIT,
    fetch_add,
    host_features,
    jit,
    read_int64,
    write_int64,
)

SMALL = 1 << 15
"""Elements that one thread is done with before it has woken another."""

# A team's memory, by offsets; what different threads write lies on cache lines of its own.
_EPOCH = 0
"""Runs begun so far, and once more at the end."""
_OPEN = 64
"""The epoch of the run that may be joined; 0 while there is none."""
_INSIDE = 128
"""Threads that have joined, or are about to find that they can't."""
_ASLEEP = 192
_LEADER_ASLEEP = 256
_THREADS = 320
"""How many shares a run's units are divided into: one for each thread."""
_END = 384
"""Not 0: the threads are to end."""
_CALL = 448
"""The address of the run's call: 8 bytes each, the address of the kernel's code and its arguments."""
_OWN_CALL = 512
"""Where the call of a run is written that is not one of a list."""
_SHARES = 1024
"""A cache line for each thread: how many units of its share have been taken, and which thread it is."""

_SPINS = 6000
"""Turns of waiting for the next run before going to sleep: 100 to 250 µs, by processor."""
_LEADER_SPINS = 1000
_SYS_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine(), 0)
_PRIVATE_WAIT, _PRIVATE_WAKE = 128, 129


class Kernel:
    """A kernel that a team runs: body(team, arguments, *likes), for each thread that takes part.

    `team` is what `take_unit` wants, `arguments` the address of what `run` was given, 8 bytes each, to be read with
    `read_int64` and `read_float64`. `layout` is their types as `struct` names them, such as
    "qqd". Likes are values of `numba_runtime.vectors.LIKE`, up to three: the body is compiled for each combination of
    their types.
    """

    def __init__(self, body: Callable[..., None], layout: str) -> None:
        self._body = body
        self._struct = struct.Struct(f"=q{layout}")
        self._compiled: dict[tuple[type, ...], Any] = {}

    def run(self, likes: tuple[Any, ...], *arguments: float, alone: bool = False) -> None:
        """Until all units are done, by all threads there are, or by the calling one `alone`. What the arguments are
        addresses of must live as long. For one thread at a time: any other that calls meanwhile does its units alone.
        While a thread records (`record_calls`), it computes nothing."""
        compiled = self._compiled.get((*map(type, likes),))
        if compiled is None:
            compiled = self._compile(likes)
        recorded = _recorded.get()
        if recorded is not None:
            recorded.append((self._struct, (compiled.address, *arguments)))
        else:
            _team(num_threads()).run(self._struct, compiled.address, arguments, alone=alone)

    def _compile(self, likes: tuple[Any, ...]) -> Any:
        signature = types.void(types.int64, types.int64, *map(typeof, likes))
        compiled = cfunc(signature, cache=KERNELS.directory is not None, **JIT)(self._body)
        self._compiled[(*map(type, likes),)] = compiled
        return compiled


Call = tuple[struct.Struct, tuple[float, ...]]
"""The layout of a kernel's call, and its numbers: the address of the kernel's code and the arguments."""
_recorded: ContextVar[list[Call] | None] = ContextVar("recorded", default=None)


@contextmanager
def record_calls() -> Iterator[list[Call]]:
    """The calls of kernels that this thread makes meanwhile are kept in the list, in their order, and not made."""
    calls: list[Call] = []
    token = _recorded.set(calls)
    try:
        yield calls
    finally:
        _recorded.reset(token)


def run_calls(address: int, count: int, stride: int) -> None:
    """`count` calls one after the other, each when the one before is done. They lie `stride` bytes apart, as their
    layouts pack them. As `Kernel.run` otherwise."""
    _team(num_threads()).run_calls(address, count, stride)


class Team:
    """`threads` threads, the calling one among them."""

    def __init__(self, threads: int) -> None:
        threads = threads if _SYS_FUTEX else 1
        self._memory, self._address = _memory(threads)
        self._busy = threading.Lock()
        self._others = [
            threading.Thread(
                target=_serve, args=(self._address, number), name=f"kernels-{number}", daemon=True
            )
            for number in range(1, threads)
        ]
        for thread in self._others:
            thread.start()

    def run(self, layout: struct.Struct, code: int, arguments: tuple[float, ...], *, alone: bool) -> None:
        """See `Kernel.run`; `layout` is of the code's address and the arguments."""
        if self._busy.acquire(blocking=False):
            try:
                layout.pack_into(self._memory, _OWN_CALL, code, *arguments)
                if self._others and not alone:
                    _lead(self._address, self._address + _OWN_CALL)
                else:
                    _run_alone(self._address, self._address + _OWN_CALL)
            finally:
                self._busy.release()
        else:
            memory, address = _memory()
            layout.pack_into(memory, _OWN_CALL, code, *arguments)
            _run_alone(address, address + _OWN_CALL)

    def run_calls(self, address: int, count: int, stride: int) -> None:
        """See the function of this name."""
        if self._busy.acquire(blocking=False):
            try:
                _lead_all(self._address, address, count, stride, len(self._others))
            finally:
                self._busy.release()
        else:
            _, own = _memory()
            _lead_all(own, address, count, stride, 0)

    def close(self) -> None:
        """End the threads: none may be in compiled code when that is freed at the process's end."""
        with self._busy:
            _end(self._address)
            for thread in self._others:
                thread.join()
            self._others = []


def num_threads() -> int:
    """How many threads a run may have: as many as torch's operations."""
    return torch.get_num_threads()


def rows_of_unit(rows: int) -> int:
    """How many of `rows` rows make a unit: about four units for each thread, so that none is left with much more to
    do."""
    return -(-rows // (4 * num_threads()))


@cache
def _team(threads: int) -> Team:
    made = Team(threads)
    atexit.register(made.close)
    return made


# Threads do not survive a fork.
os.register_at_fork(after_in_child=_team.cache_clear)


def _memory(threads: int = 1) -> tuple[memoryview, int]:
    """A team's, and its address, at the beginning of a cache line."""
    size = _SHARES + 64 * threads
    numbers = np.zeros(size + 64, np.uint8)
    first = -numbers.ctypes.data % 64
    numbers = numbers[first : first + size]
    words = numbers.view(np.int64)
    words[_THREADS // 8] = threads
    words[_SHARES // 8 + 1 :: 8] = range(threads)
    return numbers.data, numbers.ctypes.data


@intrinsic
def _read(typing, address):
    """An int64 that other threads write. What they wrote before it is seen."""

    def lower(context, builder, signature, values):
        return builder.load_atomic(nir.pointer(builder, values[0], nir.I64), "seq_cst", 8)

    return types.int64(types.int64), lower


@intrinsic
def _write(typing, address, value):
    """Nothing that follows happens before it."""

    def lower(context, builder, signature, values):
        builder.atomic_rmw("xchg", nir.pointer(builder, values[0], nir.I64), values[1], "seq_cst")
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), lower


@intrinsic
def _pause(typing):
    """A moment, in which the other thread of the core has it for itself."""

    def lower(context, builder, signature, values):
        if "sse2" in host_features():
            nir.call(builder, "llvm.x86.sse2.pause", ir.VoidType(), [])
        return context.get_dummy_value()

    return types.void(), lower


@intrinsic
def _futex(typing, address, operation, value):
    """futex(2) on the lower half of an int64."""

    def lower(context, builder, signature, values):
        kind = ir.FunctionType(nir.I64, [nir.I64], var_arg=True)
        syscall = cgutils.get_or_insert_function(builder.module, kind, "syscall")
        zero = nir.i64(0)
        number = nir.i64(_SYS_FUTEX)
        builder.call(syscall, [number, values[0], values[1], values[2], zero, zero, zero])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), lower


@intrinsic
def _call(typing, code, team, arguments):
    """Call a kernel. Its likes, whose types alone count, are integers or floats in any order: what the
    calling conventions put into registers by kind is passed for three of each."""

    def lower(context, builder, signature, values):
        kind = ir.FunctionType(ir.VoidType(), [nir.I64] * 5 + [nir.F32] * 3)
        function = builder.inttoptr(values[0], kind.as_pointer())
        none = ir.Constant(nir.F32, 0.0)
        builder.call(function, [values[1], values[2], *[nir.i64(0)] * 3, none, none, none])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), lower


@jit
def take_unit(team, units):
    """The number of a unit, below `units`, that no other thread gets; `units` where none is left. `team` is the
    body's."""
    number = read_int64(team + 8)
    shares = team - number * 64
    threads = read_int64(shares - _SHARES + _THREADS)
    for _ in range(threads):
        first = units * number // threads
        count = units * (number + 1) // threads - first
        taken = shares + number * 64
        if _read(taken) < count:
            unit = fetch_add(taken, 1)
            if unit < count:
                return first + unit
        number = number + 1 if number + 1 < threads else 0
    return units


@jit
def _clear_shares(team):
    for number in range(read_int64(team + _THREADS)):
        write_int64(0, team + _SHARES + number * 64)


@jit
def _take_part(team, number):
    call = _read(team + _CALL)
    _call(read_int64(call), team + _SHARES + number * 64, call + 8)


@jit
def _run_alone(team, call):
    _clear_shares(team)
    _write(team + _CALL, call)
    _take_part(team, 0)


@jit
def _lead_all(team, calls, count, stride, others):
    for number in range(count):
        if others != 0:
            _lead(team, calls + number * stride)
        else:
            _run_alone(team, calls + number * stride)


@jit
def _lead(team, call):
    _clear_shares(team)
    _write(team + _CALL, call)
    epoch = _read(team + _EPOCH) + 1
    _write(team + _OPEN, epoch)
    _write(team + _EPOCH, epoch)
    if _read(team + _ASLEEP) != 0:
        _futex(team + _EPOCH, _PRIVATE_WAKE, 1 << 30)
    _take_part(team, 0)
    _write(team + _OPEN, 0)
    spins = 0
    while True:
        inside = _read(team + _INSIDE)
        if inside == 0:
            break
        spins += 1
        if spins < _LEADER_SPINS:
            _pause()
        else:
            # A thread that is still inside may wait for this very core.
            _write(team + _LEADER_ASLEEP, 1)
            inside = _read(team + _INSIDE)
            if inside != 0:
                _futex(team + _INSIDE, _PRIVATE_WAIT, inside)
            _write(team + _LEADER_ASLEEP, 0)


@jit
def _serve(team, number):
    """One of the other threads, until the end."""
    seen = 0
    while True:
        spins = 0
        while _read(team + _EPOCH) == seen:
            spins += 1
            if spins < _SPINS:
                _pause()
            else:
                fetch_add(team + _ASLEEP, 1)
                if _read(team + _EPOCH) == seen:
                    _futex(team + _EPOCH, _PRIVATE_WAIT, seen)
                fetch_add(team + _ASLEEP, -1)
                spins = 0
        seen = _read(team + _EPOCH)
        if _read(team + _END) != 0:
            return
        # In this order: the leader closes the run first, then counts the threads inside.
        fetch_add(team + _INSIDE, 1)
        if _read(team + _OPEN) == seen:
            _take_part(team, number)
        if fetch_add(team + _INSIDE, -1) == 1 and _read(team + _LEADER_ASLEEP) != 0:
            _futex(team + _INSIDE, _PRIVATE_WAKE, 1)


@jit
def _end(team):
    _write(team + _END, 1)
    _write(team + _EPOCH, _read(team + _EPOCH) + 1)
    _futex(team + _EPOCH, _PRIVATE_WAKE, 1 << 30)
