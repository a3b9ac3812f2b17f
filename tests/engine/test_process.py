"""The loop, the outbox, the wire format and the engine process from its client's end of the socket."""

from __future__ import annotations

import json
import logging
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest

from loraplex.adapters.ref import AdapterRef
from loraplex.engine import protocol as wire
from loraplex.engine.config import EngineConfig
from loraplex.engine.loop import EngineLoop, Outbox
from loraplex.engine.process import JsonLogs
from loraplex.engine.progress import Progress
from loraplex.engine.types import EngineRequest, SamplingParams, TokenEvent, Usage
from support.fake_core import FakeCore, build_fake_engine, fake_tokens

FAKE_ENGINE = (sys.executable, str(Path(__file__).parent.parent / "support" / "fake_core.py"))
REF = AdapterRef("acme", "a", 1, "0" * 64, 8)


def ask(name: str, max_tokens: int = 5) -> EngineRequest:
    return EngineRequest(name, "acme", (1, 2), SamplingParams(max_tokens))


# The wire format.


def test_frames_survive_any_cut() -> None:
    commands = [wire.Add(ask("r")), wire.Pin(1, REF), wire.Shutdown(1.5), wire.Abort(("a", "b"))]
    raw = b"".join(wire.encode_frame(command) for command in commands)
    for size in (1, 3, 7, len(raw)):
        reader = wire.FrameReader()
        payloads = [p for i in range(0, len(raw), size) for p in reader.feed(raw[i : i + size])]
        assert [wire.decode_command(payload) for payload in payloads] == commands


def test_a_frame_above_the_limit_is_refused_by_its_header() -> None:
    with pytest.raises(wire.FrameTooLarge):
        wire.FrameReader().feed(struct.pack(">I", wire.MAX_FRAME_BYTES + 1))
    with pytest.raises(wire.FrameTooLarge):
        wire.encode_frame(wire.Fatal("x" * (wire.MAX_FRAME_BYTES + 1)))


@pytest.mark.parametrize(
    "payload", [b"", b"\xc1", b"\x80", msgspec.msgpack.encode({"type": "Exec", "code": "x"})]
)
def test_what_is_no_message_is_refused(payload: bytes) -> None:
    with pytest.raises(wire.ProtocolError):
        wire.decode_command(payload)
    with pytest.raises(wire.ProtocolError):
        wire.decode_event(payload)


# The outbox.


def test_the_outbox_merges_what_nobody_takes() -> None:
    outbox = Outbox(lambda: None)
    for index in range(1000):
        state = "cold" if index == 0 else None
        outbox.put(wire.Events((TokenEvent("a", (index,), adapter_state=state), TokenEvent("b", (index,)))))
    usage = Usage(1, 1000)
    outbox.put(wire.Events((TokenEvent("a", (1000,), finish_reason="length", usage=usage),)))
    outbox.put(wire.ResidencyChanged({"x": "warm", "y": "hot"}))
    outbox.put(wire.ResidencyChanged({"x": "hot"}))
    assert outbox.num_tokens == 2001
    residency, events = outbox.take()
    assert residency == wire.ResidencyChanged({"x": "hot", "y": "hot"})
    assert events == wire.Events(
        (
            TokenEvent("a", tuple(range(1001)), finish_reason="length", usage=usage, adapter_state="cold"),
            TokenEvent("b", tuple(range(1000))),
        )
    )
    assert outbox.take() == []


# The loop.


@dataclass
class Engine:
    core: Any
    info: wire.EngineInfo = field(
        default_factory=lambda: build_fake_engine(EngineConfig("ok", "/"), lambda: None).info
    )
    closed: int = 0
    progress: Progress = field(default_factory=Progress)

    def close(self) -> None:
        self.closed += 1


class LoopInThread:
    """A loop around a core, and what it emitted."""

    def __init__(self, core: Any) -> None:
        self.engine = Engine(core)
        self.events: list[wire.Event] = []
        self.logged: list[str] = []
        self.emitted = threading.Condition()
        self.loop = EngineLoop(self.build, self.emit, lambda event, **fields: self.logged.append(event))
        self.status: int | None = None
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def build(self, wake: object) -> Engine:
        return self.engine

    def run(self) -> None:
        self.status = self.loop.run()

    def emit(self, event: wire.Event) -> None:
        with self.emitted:
            self.events.append(event)
            self.emitted.notify_all()

    def wait_for(self, kind: type) -> Any:
        with self.emitted:
            assert self.emitted.wait_for(lambda: any(isinstance(e, kind) for e in self.events), 10)
            return next(e for e in self.events if isinstance(e, kind))

    def end(self) -> int:
        self.loop.stop()
        self.thread.join(10)
        assert not self.thread.is_alive()
        assert self.status is not None
        return self.status


class WaitingCore(FakeCore):
    """Has work that only a loader's wake-up can move on."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded = threading.Event()
        self.aborted = threading.Event()
        self.stepped = threading.Semaphore(0)

    def abort(self, request_id: str) -> None:
        super().abort(request_id)
        self.aborted.set()

    def step(self) -> Sequence[TokenEvent]:
        self.stepped.release()
        return super().step() if self.loaded.is_set() else []

    def idle_s(self) -> float | None:
        return super().idle_s() if self.loaded.is_set() else None


def test_a_wake_up_moves_a_waiting_engine_on_and_nothing_else_does() -> None:
    core = WaitingCore()
    running = LoopInThread(core)
    running.wait_for(wire.Ready)
    running.loop.post(wire.Add(ask("r", 1)))
    assert core.stepped.acquire(timeout=5)  # at the start
    assert core.stepped.acquire(timeout=5)  # for the command
    assert not core.stepped.acquire(timeout=0.2), "a waiting engine spins"
    core.loaded.set()
    running.loop.wake()
    (event,) = running.wait_for(wire.Events).events
    assert event.token_ids == fake_tokens(ask("r", 1))
    assert running.end() == 0
    assert running.engine.closed == 1


def test_an_id_that_is_live_does_not_disturb_its_owner() -> None:
    core = WaitingCore()
    running = LoopInThread(core)
    running.loop.post(wire.Add(ask("r", 2)))
    running.loop.post(wire.Add(ask("r", 1)))
    running.loop.post(wire.Ping(1))
    running.wait_for(wire.Pong)
    core.loaded.set()
    running.loop.wake()
    running.wait_for(wire.Events)
    running.loop.post(wire.Shutdown(5))
    running.thread.join(10)
    events = [e for batch in running.events if isinstance(batch, wire.Events) for e in batch.events]
    assert sum((e.token_ids for e in events), ()) == fake_tokens(ask("r", 2))
    assert [e.finish_reason for e in events] == [None, "length"]
    assert "duplicate_request_id" in running.logged


def test_a_step_that_raises_is_fatal_and_the_engine_is_closed() -> None:
    class Broken(FakeCore):
        def step(self) -> Sequence[TokenEvent]:
            raise MemoryError("no memory\nleft")

    running = LoopInThread(Broken())
    assert running.wait_for(wire.Fatal).message == "the engine failed in a step: MemoryError: no memory left"
    running.thread.join(10)
    assert running.status == 1
    assert running.engine.closed == 1


def test_a_drain_refuses_what_is_new_and_aborts_what_is_late() -> None:
    core = WaitingCore()
    running = LoopInThread(core)
    running.loop.post(wire.Add(ask("old")))
    running.loop.post(wire.Shutdown(0.05))
    running.loop.post(wire.Add(ask("new")))
    (new,) = running.wait_for(wire.Events).events
    assert (new.request_id, new.error.code) == ("new", "draining")
    assert core.aborted.wait(5)
    core.loaded.set()
    running.loop.wake()
    running.thread.join(10)
    assert running.status == 0
    ends = [e for b in running.events if isinstance(b, wire.Events) for e in b.events if e.finish_reason]
    assert [(e.request_id, e.finish_reason) for e in ends] == [("new", "error"), ("old", "abort")]


# The process.


class Peer:
    """The client's end of a real engine process."""

    def __init__(self, directory: Path, config: EngineConfig) -> None:
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        path = str(directory / "s")
        self.listener.bind(path)
        self.listener.listen(1)
        self.process = subprocess.Popen(
            [*FAKE_ENGINE, "--socket", path], stdin=subprocess.PIPE, stderr=subprocess.PIPE
        )
        assert self.process.stdin is not None
        self.process.stdin.write(msgspec.json.encode(config))
        self.process.stdin.close()
        self.process.stdin = None
        self.listener.settimeout(20)
        self.connection, _ = self.listener.accept()
        self.connection.settimeout(20)
        self.reader = wire.FrameReader()
        self.waiting: list[wire.Event] = []

    def send(self, *commands: wire.Command) -> None:
        self.connection.sendall(b"".join(map(wire.encode_frame, commands)))

    def events(self) -> Iterator[wire.Event]:
        """Until the engine closes its end."""
        while True:
            while self.waiting:
                yield self.waiting.pop(0)
            data = self.connection.recv(1 << 16)
            if not data:
                return
            self.waiting += [wire.decode_event(payload) for payload in self.reader.feed(data)]

    def next(self, kind: type) -> Any:
        return next(event for event in self.events() if isinstance(event, kind))

    def exit(self) -> tuple[int, list[dict[str, Any]]]:
        """The status, and the log's lines."""
        _, stderr = self.process.communicate(timeout=10)
        return self.process.returncode, [json.loads(line) for line in stderr.splitlines()]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        if self.process.stderr is not None:
            self.process.stderr.close()
        self.connection.close()
        self.listener.close()


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[Peer]:
    peer = Peer(tmp_path, EngineConfig("ok", "/nowhere"))
    yield peer
    peer.close()


def test_a_clean_life(peer: Peer) -> None:
    assert peer.next(wire.Ready).info.model_name == "fake"
    peer.send(wire.Add(ask("r", 3)), wire.Shutdown(5))
    batches = [event for event in peer.events() if isinstance(event, wire.Events)]
    tokens = sum((e.token_ids for batch in batches for e in batch.events), ())
    assert tokens == fake_tokens(ask("r", 3))
    status, log = peer.exit()
    assert status == 0
    assert all(line["logger"] == "engine" for line in log)
    assert "engine_ready" in [line["event"] for line in log]


def test_the_clients_end_ends_the_process(peer: Peer) -> None:
    peer.next(wire.Ready)
    peer.send(wire.Add(ask("r", 1_000_000)))
    peer.next(wire.Events)
    peer.connection.close()
    status, log = peer.exit()
    assert status == 0
    assert log[-1]["event"] == "client_gone"


def test_sigint_is_the_parents_affair_and_sigterm_is_clean(peer: Peer) -> None:
    peer.next(wire.Ready)
    peer.send(wire.Add(ask("r", 1_000_000)))
    peer.process.send_signal(signal.SIGINT)
    peer.next(wire.Events)
    peer.send(wire.Ping(1))
    peer.next(wire.Pong)
    peer.process.send_signal(signal.SIGTERM)
    ends = [e for b in peer.events() if isinstance(b, wire.Events) for e in b.events if e.finish_reason]
    assert [e.finish_reason for e in ends] == ["abort"]
    assert peer.exit()[0] == 0


def test_garbage_on_the_socket_ends_it(peer: Peer) -> None:
    peer.next(wire.Ready)
    peer.connection.sendall(struct.pack(">I", 3) + b"abc")
    _, log = peer.exit()
    assert "protocol_error" in [line["event"] for line in log]


def test_a_client_that_does_not_read_stops_nothing(peer: Peer) -> None:
    """The step thread goes on, what waits is merged, and nothing is lost."""
    peer.next(wire.Ready)
    requests = [ask(f"r{i}", 400) for i in range(60)]
    peer.connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    peer.send(*map(wire.Add, requests), wire.GetStats(1))
    steps = peer.next(wire.Stats).stats.num_steps
    select.select([], [], [], 0.3)  # nobody reads for a while
    peer.send(wire.GetStats(2))
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    ended: list[str] = []
    merged = 0
    for event in peer.events():
        if isinstance(event, wire.Stats):
            assert event.stats.num_steps > steps + 20
        if isinstance(event, wire.Events):
            for item in event.events:
                merged = max(merged, len(item.token_ids))
                tokens[item.request_id] += item.token_ids
                ended += [item.request_id] if item.finish_reason else []
            if len(ended) == len(requests):
                break
    assert sorted(ended) == sorted(tokens)
    assert all(tuple(tokens[r.request_id]) == fake_tokens(r) for r in requests)
    assert merged > 1


@pytest.mark.parametrize(
    ("model", "message", "foreseen"),
    [
        ("broken", "there is no model in /nowhere", True),
        ("buggy", "RuntimeError: nobody foresaw this", False),
    ],
)
def test_a_build_that_fails_is_one_line_to_the_client_and_a_traceback_where_nobody_foresaw_it(
    tmp_path: Path, model: str, message: str, foreseen: bool
) -> None:
    peer = Peer(tmp_path, EngineConfig(model, "/nowhere"))
    try:
        assert peer.next(wire.Fatal).message == message
        status, log = peer.exit()
        assert status == 3
        assert ("traceback" in log[-1]) is not foreseen
    finally:
        peer.close()


@pytest.mark.parametrize("config", [b"", b"not json", b'{"model_path": 1, "artifact_dir": ""}'])
def test_a_bad_config_is_a_bad_start(tmp_path: Path, config: bytes) -> None:
    done = subprocess.run(
        [*FAKE_ENGINE, "--socket", str(tmp_path / "s")],
        input=config,
        capture_output=True,
        timeout=20,
        check=False,
    )
    assert done.returncode == 2
    assert json.loads(done.stderr)["event"] == "engine_start_failed"


def test_what_the_engines_modules_log_is_json_too(capfd: pytest.CaptureFixture[str]) -> None:
    logger = logging.Logger("loraplex.engine.core")
    logger.addHandler(JsonLogs())
    try:
        raise RuntimeError("two\nlines")
    except RuntimeError as error:
        logger.error("step %d failed", 3, exc_info=error)
    (line,) = capfd.readouterr().err.splitlines()
    said = json.loads(line)
    assert (said["event"], said["logger"], said["level"]) == (
        "step 3 failed",
        "loraplex.engine.core",
        "error",
    )
    assert "RuntimeError: two\nlines" in said["traceback"]
