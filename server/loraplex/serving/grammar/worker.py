"""The process that checks grammars: `python -m loraplex.serving.grammar.worker FD`, FD one end of a Unix socket.

It loads the model's tokenizer once, and its forks check grammars, one at a time each. llguidance's own limits do not
bound what building one costs, so a fork has limits of the kernel: CPU time, time and memory. One that passes them dies;
this process never builds any, and so has nothing to lose. It ends with the socket.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import resource
import selectors
import signal
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec
from llguidance import LLTokenizer
from llguidance.gbnf_to_lark import gbnf_to_lark

from loraplex.engine.grammar.dictated import DictatesTooMuch, dictated_text
from loraplex.engine.grammar.tokenizer import GrammarsUnsupported, load_grammar_tokenizer, new_matcher
from loraplex.serving.grammar.messages import HEADER, Check, Checked, Outcome, Start, Started, frame

WALKED_TOKENS = 32
"""Tokens sampled from the grammar by way of trial: a grammar that builds quickly may have slow masks, or none. A text
that it dictates counts as one."""
MAX_REASON = 600
NICENESS = 10
"""The engine goes first."""
MAX_CHECKS = 256
"""Of one fork."""
KEPT_SHARE = 1 / 32
"""Of the memory of a check: what a fork may keep of it and still get another, which is to have all of its own."""
_NO_TEXT = "NoExtension"
_NOT_VERBOSE = "\n<non-verbose/>"


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(NICENESS)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    server = socket.socket(fileno=int(sys.argv[1]))
    with contextlib.suppress(EOFError, ConnectionError):
        start = msgspec.msgpack.decode(_read(server), type=Start)
        try:
            tokenizer = load_grammar_tokenizer(Path(start.model_dir), start.eos_ids)
        except GrammarsUnsupported as error:
            server.sendall(frame(Started(error.message[:MAX_REASON])))
            return
        server.sendall(frame(Started()))
        _Forks(server, start, tokenizer).serve()


class _Answer(msgspec.Struct, frozen=True):
    """From a fork. `is_last`: it ends, and takes no other check."""

    checked: Checked
    is_last: bool


@dataclass(slots=True)
class _Fork:
    """`number`: of the check that it has under way, None while it is idle. `cpu_s`: of its checks before that."""

    pid: int
    connection: socket.socket
    number: int | None = None
    cpu_s: float = 0.0


class _Forks:
    """One fork for each check that is under way; the server says how many that may be. An idle fork gets the next
    check: to fork takes as much CPU time as to check a usual schema."""

    def __init__(self, server: socket.socket, start: Start, tokenizer: LLTokenizer) -> None:
        self._server = server
        self._start = start
        self._tokenizer = tokenizer
        self._address_space = _address_space()
        self._selector = selectors.DefaultSelector()
        self._forks: list[_Fork] = []

    def serve(self) -> None:
        self._selector.register(self._server, selectors.EVENT_READ)
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._server:
                    self._begin(msgspec.msgpack.decode(_read(self._server), type=Check))
                else:
                    self._collect(key.data)

    def _begin(self, check: Check) -> None:
        for fork in [fork for fork in self._forks if fork.number is None]:
            with contextlib.suppress(ConnectionError):  # it has ended while it was idle
                fork.connection.sendall(frame(check))
                fork.number = check.id
                return
        fork = self._new()
        fork.number = check.id
        with contextlib.suppress(ConnectionError):  # `_collect` sees why it has ended
            fork.connection.sendall(frame(check))

    def _new(self) -> _Fork:
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            try:
                for connection in (ours, self._server, *(fork.connection for fork in self._forks)):
                    connection.close()
                # Rust writes of its last moments.
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
                with contextlib.suppress(EOFError, ConnectionError):
                    self._check_all(theirs)
            finally:
                os._exit(0)
        theirs.close()
        fork = _Fork(pid, ours)
        self._forks.append(fork)
        self._selector.register(ours, selectors.EVENT_READ, fork)
        return fork

    def _check_all(self, connection: socket.socket) -> None:
        """In the fork: check what comes, as long as the next check has the same memory as the first."""
        start = self._start
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")  # where the machine's memory runs out, this is to end first
        most = self._address_space + start.memory
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        for left in reversed(range(MAX_CHECKS)):
            check = msgspec.msgpack.decode(_read(connection), type=Check)
            before = time.process_time()
            signal.setitimer(
                signal.ITIMER_PROF, start.cpu_s
            )  # the signals end it at once: nobody handles them
            signal.setitimer(signal.ITIMER_REAL, start.wall_s)
            checked = _check(check, self._tokenizer)
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.setitimer(signal.ITIMER_REAL, 0)
            checked = msgspec.structs.replace(checked, cpu_s=time.process_time() - before)
            grown = _address_space() - self._address_space
            is_last = not left or grown > start.memory * KEPT_SHARE or checked.outcome == "too_large"
            connection.sendall(frame(_Answer(checked, is_last)))
            if is_last:
                return

    def _collect(self, fork: _Fork) -> None:
        """An answer, or the end, of a fork."""
        try:
            answer = msgspec.msgpack.decode(_read(fork.connection), type=_Answer)
        except (EOFError, ConnectionError):
            status, cpu_s = self._reap(fork)
            if fork.number is not None:
                self._server.sendall(frame(Checked(fork.number, _cause(status), cpu_s=cpu_s - fork.cpu_s)))
            return
        fork.number = None
        fork.cpu_s += answer.checked.cpu_s
        if answer.is_last:
            self._reap(fork)
        self._server.sendall(frame(answer.checked))

    def _reap(self, fork: _Fork) -> tuple[int, float]:
        """Forget a fork that has ended, or is about to. Returns its status and its CPU time."""
        self._selector.unregister(fork.connection)
        fork.connection.close()
        self._forks.remove(fork)
        _, status, used = os.wait4(fork.pid, 0)
        return status, used.ru_utime + used.ru_stime


def _cause(status: int) -> Outcome:
    """What has ended a fork that did not answer."""
    number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    if number in (signal.SIGPROF, signal.SIGXCPU):
        return "too_slow"
    return "timed_out" if number in (signal.SIGALRM, signal.SIGKILL) else "too_large"


def _check(check: Check, tokenizer: LLTokenizer) -> Checked:
    try:
        text = _lark(check.text) if check.gbnf else check.text
    except (RecursionError, MemoryError):
        return Checked(check.id, "too_large")
    except Exception as error:  # the library raises plain ones
        return Checked(check.id, "refused", str(error)[:MAX_REASON])
    if reason := _trial(text, tokenizer):
        return Checked(check.id, "refused", reason)
    return Checked(check.id, "accepted", text if check.gbnf else "")


def _lark(text: str) -> str:
    return msgspec.json.encode({"grammars": [{"lark_grammar": gbnf_to_lark(text)}]}).decode()


def _trial(text: str, tokenizer: LLTokenizer) -> str:
    """Builds the grammar and samples a few tokens from it. Returns why it is refused, "" where it is not."""
    matcher = new_matcher(tokenizer, text)
    chance = random.Random(0)  # noqa: S311 - the same verdict each time
    for _ in range(WALKED_TOKENS):
        if matcher.is_error() or matcher.is_stopped():
            break
        try:
            follows = matcher.compute_ff_tokens() if dictated_text(matcher) else []
        except DictatesTooMuch as fault:
            return str(fault)
        if follows and not any(map(tokenizer.is_special_token, follows)):
            matcher.consume_tokens(follows)
            continue
        mask = matcher.compute_bitmask()
        if matcher.is_error() or (token := _drawn(mask, chance)) is None:
            break
        # The end; or text that is spelled like such a token, which engines handle.
        if tokenizer.is_special_token(token):
            break
        matcher.consume_token(token)
    reason = str(matcher.get_error()) if matcher.is_error() else ""
    if reason.startswith(_NO_TEXT) or (matcher.is_stopped() and not matcher.is_accepting() and not reason):
        return "no text fits it"
    return reason.split(_NOT_VERBOSE)[0][:MAX_REASON]


def _drawn(mask: bytes, chance: random.Random) -> int | None:
    """One of the tokens that the mask allows, none where it allows none."""
    start = chance.randrange(len(mask))
    for index in itertools.chain(range(start, len(mask)), range(start)):
        if mask[index]:
            bits = [bit for bit in range(8) if mask[index] >> bit & 1]
            return index * 8 + chance.choice(bits)
    return None


def _address_space() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def _read(connection: socket.socket) -> bytes:
    """The next frame. Raises EOFError."""
    (length,) = HEADER.unpack(_exactly(connection, HEADER.size))
    return _exactly(connection, length)


def _exactly(connection: socket.socket, length: int) -> bytes:
    data = bytearray()
    while len(data) < length:
        part = connection.recv(length - len(data))
        if not part:
            raise EOFError
        data += part
    return bytes(data)


if __name__ == "__main__":
    main()
