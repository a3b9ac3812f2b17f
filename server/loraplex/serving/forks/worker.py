"""A process whose forks do a server's jobs, one at a time each: `python -m MODULE FD`, FD one end of a Unix socket.

What a job costs cannot be known before it is done. So a fork has limits of the kernel: CPU time, time and memory. One
that passes them dies; this process never does a job, and so has nothing to lose. It ends with the socket.
"""

from __future__ import annotations

import contextlib
import os
import resource
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from loraplex.engine.ipc.framing import HEADER_BYTES, ProtocolError, encode_frame, frame_length
from loraplex.serving.forks.messages import Job, JobDone, Outcome, Start, Started

NICENESS = 10
"""The engine goes first."""
MAX_JOBS = 256
"""Most jobs of one fork."""
MAX_IDLE = 8
"""Forks that wait for another job of their owner."""
MAX_ERROR = 600
KEPT_SHARE = 1 / 32
"""Part of a job's memory that a fork may keep and still get another job, which is to have all of its own."""

Work = Callable[[bytes], bytes]
"""Does a job. What it raises is taken for too much nesting or memory."""


class SetupFailed(Exception):
    """No job can be done: the message says why."""


def serve_forks(set_up: Callable[[bytes], Work]) -> None:
    """The main function of such a process. `set_up` gets `Start.setup` and returns what forks do with each job; it may
    raise SetupFailed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(NICENESS)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    server = socket.socket(fileno=int(sys.argv[1]))
    with contextlib.suppress(EOFError, ConnectionError):
        start = msgspec.msgpack.decode(_read(server), type=Start)
        try:
            work = set_up(start.setup)
        except SetupFailed as error:
            server.sendall(encode_frame(Started(str(error)[:MAX_ERROR])))
            return
        server.sendall(encode_frame(Started()))
        _Forks(server, start, work).serve()


class _Answer(msgspec.Struct, frozen=True):
    """From a fork. `is_last`: it ends, and takes no other job."""

    done: JobDone
    is_last: bool


@dataclass(slots=True)
class _Fork:
    """`number`: of the job that it has under way, None while it is idle. `cpu_s`: of its jobs before that."""

    pid: int
    connection: socket.socket
    owner: str
    number: int | None = None
    cpu_s: float = 0.0


class _Forks:
    """One fork for each job that is under way; the server says how many that may be. An idle fork gets the next job of
    its owner: to fork takes as much CPU time as a usual job."""

    def __init__(self, server: socket.socket, start: Start, work: Work) -> None:
        self._server = server
        self._start = start
        self._work = work
        self._address_space = _address_space()
        self._selector = selectors.DefaultSelector()
        self._forks: list[_Fork] = []

    def serve(self) -> None:
        self._selector.register(self._server, selectors.EVENT_READ)
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._server:
                    self._begin(msgspec.msgpack.decode(_read(self._server), type=Job))
                elif key.data in self._forks:  # else it was dismissed just now
                    self._collect(key.data)

    def _begin(self, job: Job) -> None:
        idle = [fork for fork in self._forks if fork.number is None]
        for fork in idle:
            if fork.owner != job.owner:
                continue
            with contextlib.suppress(ConnectionError):  # it has ended while it was idle
                fork.connection.sendall(encode_frame(job))
                fork.number = job.id
                return
        if len(idle) >= MAX_IDLE:
            self._reap(idle[0])
        fork = self._new(job.owner)
        fork.number = job.id
        with contextlib.suppress(ConnectionError):  # `_collect` sees why it has ended
            fork.connection.sendall(encode_frame(job))

    def _new(self, owner: str) -> _Fork:
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            try:
                self._selector.close()
                for connection in (ours, self._server, *(fork.connection for fork in self._forks)):
                    connection.close()
                # Libraries write of its last moments.
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
                with contextlib.suppress(EOFError, ConnectionError):
                    self._do_all(theirs)
            finally:
                os._exit(0)
        theirs.close()
        fork = _Fork(pid, ours, owner)
        self._forks.append(fork)
        self._selector.register(ours, selectors.EVENT_READ, fork)
        return fork

    def _do_all(self, connection: socket.socket) -> None:
        """In the fork: do what comes, as long as the next job has the same memory as the first."""
        start = self._start
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")  # where the machine's memory runs out, this is to end first
        for left in reversed(range(MAX_JOBS)):
            job = msgspec.msgpack.decode(_read(connection), type=Job)
            if left == MAX_JOBS - 1:
                most = self._address_space + start.memory * job.weight
                resource.setrlimit(resource.RLIMIT_AS, (most, most))
            before = time.process_time()
            # The signals end it at once: nobody handles them.
            signal.setitimer(signal.ITIMER_PROF, start.cpu_s * job.weight)
            signal.setitimer(signal.ITIMER_REAL, start.wall_s)
            outcome, body = self._do(job)
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.setitimer(signal.ITIMER_REAL, 0)
            done = JobDone(job.id, outcome, body, time.process_time() - before)
            grown = _address_space() - self._address_space
            is_last = not left or grown > start.memory * KEPT_SHARE or outcome != "done"
            connection.sendall(encode_frame(_Answer(done, is_last)))
            if is_last:
                return

    def _do(self, job: Job) -> tuple[Outcome, bytes]:
        try:
            return "done", self._work(job.body)
        except (RecursionError, MemoryError):
            return "too_large", b""

    def _collect(self, fork: _Fork) -> None:
        """An answer, or the end, of a fork."""
        try:
            answer = msgspec.msgpack.decode(_read(fork.connection), type=_Answer)
        except (EOFError, ConnectionError, ProtocolError):
            status, cpu_s = self._reap(fork)
            if fork.number is not None:
                self._server.sendall(
                    encode_frame(JobDone(fork.number, _cause(status), cpu_s=cpu_s - fork.cpu_s))
                )
            return
        fork.number = None
        fork.cpu_s += answer.done.cpu_s
        if answer.is_last:
            self._reap(fork)
        self._server.sendall(encode_frame(answer.done))

    def _reap(self, fork: _Fork) -> tuple[int, float]:
        """Forget a fork that has ended, or does so when its connection is closed. Returns its status and its CPU
        time."""
        self._selector.unregister(fork.connection)
        fork.connection.close()
        self._forks.remove(fork)
        _, status, used = os.wait4(fork.pid, 0)
        return status, used.ru_utime + used.ru_stime


def _cause(status: int) -> Outcome:
    """The cause that ended a fork that did not answer."""
    number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    if number in (signal.SIGPROF, signal.SIGXCPU):
        return "too_slow"
    return "timed_out" if number in (signal.SIGALRM, signal.SIGKILL) else "too_large"


def _address_space() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def _read(connection: socket.socket) -> bytes:
    """The next frame. Raises EOFError."""
    return _exactly(connection, frame_length(_exactly(connection, HEADER_BYTES)))


def _exactly(connection: socket.socket, length: int) -> bytes:
    data = bytearray()
    while len(data) < length:
        part = connection.recv(length - len(data))
        if not part:
            raise EOFError
        data += part
    return bytes(data)
