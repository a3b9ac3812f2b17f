"""The engine process from its client's end of the socket."""

from __future__ import annotations

import json
import logging
import select
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest

from loraplex.adapters.ref import AdapterRef
from loraplex.engine.config import EngineConfig
from loraplex.engine.ipc import framing
from loraplex.engine.ipc import protocol as wire
from loraplex.engine.ipc.log_lines import JsonLogs
from loraplex.engine.types import EngineRequest, SamplingParams
from support.engine.fake_core import fake_tokens

FAKE_ENGINE = (sys.executable, str(Path(__file__).parents[2] / "support" / "engine" / "fake_core.py"))
REF = AdapterRef("acme", "a", 1, "0" * 64, 8)


def ask(name: str, max_tokens: int = 5) -> EngineRequest:
    return EngineRequest(name, "acme", (1, 2), SamplingParams(max_tokens))


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
        self.listener.settimeout(120)
        self.connection, _ = self.listener.accept()
        self.connection.settimeout(60)
        self.reader = framing.FrameReader()
        self.waiting: list[wire.Event] = []

    def send(self, *commands: wire.Command) -> None:
        self.connection.sendall(b"".join(map(framing.encode_frame, commands)))

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
        _, stderr = self.process.communicate(timeout=60)
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


@pytest.mark.parametrize(("device", "seconds"), [("cuda", 2e-4), ("cpu", 5e-3)])
def test_threads_take_short_turns_where_a_step_is_short(
    tmp_path: Path, device: Literal["cuda", "cpu"], seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_CLOSE", "log")
    peer = Peer(tmp_path, EngineConfig("ok", "/nowhere", device=device))
    try:
        peer.next(wire.Ready)
        peer.send(wire.Shutdown(5))
        list(peer.events())
        (line,) = [line for line in peer.exit()[1] if line["event"] == "fake_closed"]
        assert line["switch_interval"] == pytest.approx(seconds)
    finally:
        peer.close()


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
    peer.send(wire.GetStats(1))
    peer.next(wire.Stats)
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
    peer.connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    for pause_s in (0.3, 1.2, 4.8, 19.2):  # a busy machine takes longer for some steps
        steps, merged = read_after(pause_s, peer)
        if steps > 20 and merged > 1:
            break
    assert steps > 20
    assert merged > 1


def read_after(pause_s: float, peer: Peer) -> tuple[int, int]:
    """Nothing of sixty requests is read for `pause_s`: the steps meanwhile, and the most tokens that were merged.
    Checks that each token comes."""
    requests = [ask(f"r{i} {pause_s}", 400) for i in range(60)]
    peer.send(wire.GetStats(1))
    steps_before = peer.next(wire.Stats).stats.num_steps
    peer.send(*map(wire.Add, requests))
    select.select([], [], [], pause_s)
    peer.send(wire.GetStats(2))
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    ended: list[str] = []
    steps = merged = 0
    for event in peer.events():
        if isinstance(event, wire.Stats):
            steps = event.stats.num_steps - steps_before
        if isinstance(event, wire.Events):
            for item in event.events:
                merged = max(merged, len(item.token_ids))
                tokens[item.request_id] += item.token_ids
                ended += [item.request_id] if item.finish_reason else []
        if len(ended) == len(requests) and steps:
            break
    assert sorted(ended) == sorted(tokens)
    assert all(tuple(tokens[r.request_id]) == fake_tokens(r) for r in requests)
    return steps, merged


def test_what_waited_is_sent_as_soon_as_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where no step comes any more, and no heartbeat."""
    monkeypatch.setenv("FAKE_BEAT_S", "1000")
    peer = Peer(tmp_path, EngineConfig("ok", "/nowhere"))
    try:
        peer.next(wire.Ready)
        requests = [ask(f"r{i}", 400) for i in range(60)]
        peer.send(*map(wire.Add, requests))
        select.select([], [], [], 2.0)  # longer than its steps take, and than the socket takes their events
        ended = 0
        while ended < len(requests):
            ended += sum(event.finish_reason is not None for event in peer.next(wire.Events).events)
        peer.send(wire.GetStats(1))
        assert peer.next(wire.Stats).call == 1
    finally:
        peer.close()


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
        assert ("exception" in log[-1]) is not foreseen
    finally:
        peer.close()


@pytest.mark.parametrize("config", [b"", b"not json", b'{"model_path": 1, "artifact_dir": ""}'])
def test_a_bad_config_is_a_bad_start(tmp_path: Path, config: bytes) -> None:
    done = subprocess.run(
        [*FAKE_ENGINE, "--socket", str(tmp_path / "s")],
        input=config,
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert json.loads(done.stderr)["event"] == "engine_start_failed"


def test_log_lines_of_engine_modules_are_json(capfd: pytest.CaptureFixture[str]) -> None:
    logger = logging.Logger("loraplex.engine.core.engine_core")
    logger.addHandler(JsonLogs())
    try:
        raise RuntimeError("two\nlines")
    except RuntimeError as error:
        logger.error("step %d failed", 3, exc_info=error)
    (line,) = capfd.readouterr().err.splitlines()
    said = json.loads(line)
    assert (said["message"], said["logger"], said["level"]) == (
        "step 3 failed",
        "loraplex.engine.core.engine_core",
        "error",
    )
    assert "RuntimeError: two\nlines" in said["exception"]
