"""The wire format, the outbox and the step thread's loop."""

from __future__ import annotations

import struct
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest

from loraplex.adapters.ref import AdapterRef
from loraplex.engine.config import EngineConfig
from loraplex.engine.heartbeat import StepHeartbeat
from loraplex.engine.ipc import framing
from loraplex.engine.ipc import loop as loop_module
from loraplex.engine.ipc import protocol as wire
from loraplex.engine.ipc.loop import EngineLoop, Outbox
from loraplex.engine.reports import EngineInfo
from loraplex.engine.types import EngineRequest, SamplingParams, TokenEvent, Usage
from support.engine.fake_core import FakeCore, build_fake_engine, fake_tokens

FAKE_ENGINE = (sys.executable, str(Path(__file__).parents[2] / "support" / "engine" / "fake_core.py"))
REF = AdapterRef("acme", "a", 1, "0" * 64, 8)


def ask(name: str, max_tokens: int = 5) -> EngineRequest:
    return EngineRequest(name, "acme", (1, 2), SamplingParams(max_tokens))


# The wire format.


def test_frames_survive_any_cut() -> None:
    commands = [wire.Add(ask("r")), wire.Pin(1, REF), wire.Shutdown(1.5), wire.Abort(("a", "b"))]
    raw = b"".join(framing.encode_frame(command) for command in commands)
    for size in (1, 3, 7, len(raw)):
        reader = framing.FrameReader()
        payloads = [p for i in range(0, len(raw), size) for p in reader.feed(raw[i : i + size])]
        assert [wire.decode_command(payload) for payload in payloads] == commands


def test_a_frame_above_the_limit_is_refused_by_its_header() -> None:
    with pytest.raises(framing.FrameTooLarge):
        framing.FrameReader().feed(struct.pack(">I", framing.MAX_FRAME_BYTES + 1))
    with pytest.raises(framing.FrameTooLarge):
        framing.encode_frame(wire.Fatal("x" * (framing.MAX_FRAME_BYTES + 1)))


@pytest.mark.parametrize(
    "payload", [b"", b"\xc1", b"\x80", msgspec.msgpack.encode({"type": "Exec", "code": "x"})]
)
def test_malformed_message_is_refused(payload: bytes) -> None:
    with pytest.raises(framing.ProtocolError):
        wire.decode_command(payload)
    with pytest.raises(framing.ProtocolError):
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
    residency, events = outbox.take_events()
    assert residency == wire.ResidencyChanged({"x": "hot", "y": "hot"})
    assert events == wire.Events(
        (
            TokenEvent("a", tuple(range(1001)), finish_reason="length", usage=usage, adapter_state="cold"),
            TokenEvent("b", tuple(range(1000))),
        )
    )
    assert outbox.take_events() == []


# The loop.


@dataclass
class Engine:
    core: Any
    info: EngineInfo = field(
        default_factory=lambda: build_fake_engine(EngineConfig("ok", "/"), lambda: None).info
    )
    closed: int = 0
    heartbeat: StepHeartbeat = field(default_factory=StepHeartbeat)

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
            assert self.emitted.wait_for(lambda: any(isinstance(e, kind) for e in self.events), 60)
            return next(e for e in self.events if isinstance(e, kind))

    def end(self) -> int:
        self.loop.stop()
        self.thread.join(60)
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


def test_a_wake_up_moves_a_waiting_engine_on_and_nothing_else_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_module, "POLL_WHILE_WAITING_S", 3600)  # beside a rare look
    core = WaitingCore()
    running = LoopInThread(core)
    assert core.stepped.acquire(timeout=60)  # at the start
    running.loop.post(wire.Add(ask("r", 1)))
    assert core.stepped.acquire(timeout=60)  # for the command
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
    running.loop.post(wire.GetStats(1))
    running.wait_for(wire.Stats)
    core.loaded.set()
    running.loop.wake()
    running.wait_for(wire.Events)
    running.loop.post(wire.Shutdown(5))
    running.thread.join(60)
    events = [e for batch in running.events if isinstance(batch, wire.Events) for e in batch.events]
    assert sum((e.token_ids for e in events), ()) == fake_tokens(ask("r", 2))
    assert [e.finish_reason for e in events] == [None, "length"]
    assert "duplicate_request_id" in running.logged


def test_a_reset_tells_all_states_again() -> None:
    running = LoopInThread(FakeCore())
    running.loop.post(wire.Prefetch((REF,)))
    assert running.wait_for(wire.ResidencyChanged).states == {REF.digest: "hot"}
    running.events.clear()
    running.loop.post(wire.Reset(7))
    assert running.wait_for(wire.Done) == wire.Done(7)
    assert running.wait_for(wire.ResidencyChanged).states == {REF.digest: "hot"}
    assert running.end() == 0


def test_a_step_that_raises_is_fatal_and_the_engine_is_closed() -> None:
    class Broken(FakeCore):
        def step(self) -> Sequence[TokenEvent]:
            raise MemoryError("no memory\nleft")

    running = LoopInThread(Broken())
    assert running.wait_for(wire.Fatal).message == "the engine failed in a step: MemoryError: no memory left"
    running.thread.join(60)
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
    assert core.aborted.wait(60)
    core.loaded.set()
    running.loop.wake()
    running.thread.join(60)
    assert running.status == 0
    ends = [e for b in running.events if isinstance(b, wire.Events) for e in b.events if e.finish_reason]
    assert [(e.request_id, e.finish_reason) for e in ends] == [("new", "error"), ("old", "abort")]
