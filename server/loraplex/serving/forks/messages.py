"""Between the server and a process that works for it: msgpack frames over a Unix stream socket."""

from __future__ import annotations

from typing import Literal

import msgspec

Outcome = Literal[
    "done",
    "too_slow",  # it took more CPU time than it may
    "too_large",  # it took more memory than it may, or its nesting more stack
    "timed_out",  # it took more time than it may: it slept, or the machine did not give it enough CPU time
]


class Start(msgspec.Struct, frozen=True):
    """The first frame: what the process loads, and the limits of each job. `memory` in bytes, beyond what the process
    has before it."""

    setup: bytes
    cpu_s: float
    wall_s: float
    memory: int


class Started(msgspec.Struct, frozen=True):
    """`error`: why no job can be done."""

    error: str | None = None


class Job(msgspec.Struct, frozen=True):
    """A fork does jobs of one `owner` alone, of one `weight`, which multiplies the CPU time and the memory of a job."""

    id: int
    owner: str
    body: bytes
    weight: int = 1


class JobDone(msgspec.Struct, frozen=True):
    """`body` is empty unless the outcome is "done"."""

    id: int
    outcome: Outcome
    body: bytes = b""
    cpu_s: float = 0.0
