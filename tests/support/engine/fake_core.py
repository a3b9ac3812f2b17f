"""A core for tests of the loop and of the clients: no model, and tokens that are a hash of adapter, of the place from
which it acts, and of the position.

A request with `generated` goes on behind these tokens.

A prompt that begins with `CRASH` makes the step raise, with `HANG` never return, with `SPIN` compute without end; one
of `SLOW` and n makes each step take n tenths of a second. An adapter named `DAMAGED` has damaged bytes. `python
tests/support/engine/fake_core.py --socket PATH` is an engine process around it. The model path says how it starts:
"broken" cannot be built, "slow" never gets ready, anything else works. `FAKE_EXIT=N` in the environment ends the
process with N before it connects; `FAKE_STEP_S` is how long a step takes, `FAKE_BEAT_S` the time between heartbeats,
`FAKE_VOCAB` the number of its tokens; with `FAKE_CLOSE=hang` an engine cannot be closed. SIGUSR1 makes its main thread
spin. A spare that is told `FAKE_SPARE=exit` ends at once, with `stop` it stops.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from loraplex.adapters.cache.residency import CacheEntry
from loraplex.adapters.errors import LoraplexError
from loraplex.adapters.numerics import SiteOutputs
from loraplex.adapters.ref import AdapterRef
from loraplex.engine.config import EngineConfig
from loraplex.engine.heartbeat import StepHeartbeat
from loraplex.engine.ipc.log_lines import log
from loraplex.engine.reports import EngineInfo, EngineStats, TenantStats
from loraplex.engine.tenant_terms import TenantTerms
from loraplex.engine.types import (
    AdapterState,
    EngineError,
    EngineRequest,
    MeasureRequest,
    Timing,
    TokenEvent,
    Usage,
)

CRASH = 666
HANG = 667
SLOW = 668
SPIN = 669
DAMAGED = "damaged"
VOCAB_SIZE = int(os.environ.get("FAKE_VOCAB", "1000"))


def fake_token(request: EngineRequest, index: int) -> int:
    digest = request.adapter.digest if request.adapter is not None else "base"
    if request.adapter_from:
        digest = f"{digest} from {request.adapter_from}"
    hashed = hashlib.sha256(f"{digest}:{request.prompt_ids}:{index}".encode()).digest()
    return int.from_bytes(hashed[:4], "big") % VOCAB_SIZE


def fake_tokens(request: EngineRequest) -> tuple[int, ...]:
    """What the fake core answers to this request, behind what was generated before."""
    places = range(len(request.generated), request.sampling.max_tokens)
    return tuple(fake_token(request, index) for index in places)


@dataclass
class _Running:
    request: EngineRequest
    adapter_state: AdapterState | None = None  # told with its first token
    arrival: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.done = len(self.request.generated)


class FakeCore:
    """One token a running request and step. `step_s` is how long a step takes (0: as fast as it goes)."""

    def __init__(
        self, *, max_waiting: int = 64, step_s: float = 0.0, heartbeat: StepHeartbeat | None = None
    ) -> None:
        self._heartbeat = heartbeat or StepHeartbeat()
        self._max_waiting = max_waiting
        self._step_s = step_s
        self._running: dict[str, _Running] = {}
        self._measured: set[str] = set()
        self._ended: list[TokenEvent] = []
        self._states: dict[str, AdapterState] = {}
        self._refs: dict[str, AdapterRef] = {}
        self._pins: set[str] = set()
        self._weights: dict[str, float] = {}
        self._elsewhere: dict[str, float] = {}
        self.elsewhere: frozenset[str] = frozenset()
        """Versions that live on other engines."""
        self._damaged: tuple[str, ...] = ()
        self.num_steps = 0

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._ended)

    def add_request(self, request: EngineRequest) -> None:
        if len(self._running) >= self._max_waiting and not request.generated:
            error = EngineError("server_overloaded", "the queue is full")
            self._ended.append(TokenEvent(request.request_id, finish_reason="error", error=error))
            return
        if request.adapter is not None and request.adapter.name == DAMAGED:
            error = EngineError("adapter_unavailable", "its stored bytes are damaged")
            self._ended.append(TokenEvent(request.request_id, finish_reason="error", error=error))
            self._damaged = (request.adapter.digest,)
            return
        if request.generated and len(request.generated) >= request.sampling.max_tokens:
            usage = Usage(len(request.prompt_ids), len(request.generated))
            self._ended.append(TokenEvent(request.request_id, finish_reason="length", usage=usage))
            return
        running = self._running[request.request_id] = _Running(request)
        if request.adapter is not None:
            running.adapter_state = self._states.get(request.adapter.digest, "cold")
            self._refs[request.adapter.digest] = request.adapter
            self._states[request.adapter.digest] = "hot"

    def measure(self, asked: MeasureRequest) -> None:
        self._measured.add(asked.request_id)
        self.add_request(asked.queued())

    def abort(self, request_id: str) -> None:
        running = self._running.pop(request_id, None)
        if running is not None:
            usage = Usage(len(running.request.prompt_ids), running.done)
            self._ended.append(TokenEvent(request_id, finish_reason="abort", usage=usage))

    def reset(self) -> None:
        for request_id in list(self._running):
            self.abort(request_id)
        self._pins.clear()
        self._weights = dict.fromkeys(self._weights, 1.0)
        self.elsewhere = frozenset()

    def end_background(self) -> None:
        for request_id in [name for name, live in self._running.items() if live.request.background]:
            self.abort(request_id)

    def step(self) -> Sequence[TokenEvent]:
        self.num_steps += 1
        if self._running and self._step_s:
            time.sleep(self._step_s)
        events, self._ended = self._ended, []
        for request_id, running in list(self._running.items()):
            if request_id in self._measured and running.request.adapter is not None:
                sites = ((0, running.request.adapter.name),)
                outputs = SiteOutputs("float32", sites, b"", b"\x01")
                events.append(TokenEvent(request_id, finish_reason="length", measured=outputs))
                del self._running[request_id]
                continue
            if running.request.prompt_ids[:1] == (CRASH,):
                raise RuntimeError("the device is on fire")
            if running.request.prompt_ids[:1] == (HANG,):
                threading.Event().wait()
            if running.request.prompt_ids[:1] == (SPIN,):
                spin()
            if running.request.prompt_ids[:1] == (SLOW,):
                self._heartbeat.step_submitted(len(running.request.prompt_ids))
                time.sleep(running.request.prompt_ids[1] / 10)
                self._heartbeat.step_collected(computed=True)
            token = fake_token(running.request, running.done)
            running.done += 1
            state, running.adapter_state = running.adapter_state, None
            last = running.done == running.request.sampling.max_tokens
            events.append(
                TokenEvent(
                    request_id,
                    (token,),
                    finish_reason="length" if last else None,
                    usage=Usage(len(running.request.prompt_ids), running.done) if last else None,
                    timing=Timing(0.0, 0.0, time.monotonic() - running.arrival) if last else None,
                    adapter_state=state,
                )
            )
            if last:
                del self._running[request_id]
        return events

    def idle_s(self) -> float | None:
        return 0.0 if self._running or self._ended else None

    def stats(self) -> EngineStats:
        # What it was told of weights stands where a real one's counters are.
        tenants = {tenant: TenantStats(counter=weight) for tenant, weight in self._weights.items()}
        return EngineStats(num_running=len(self._running), num_steps=self.num_steps, tenants=tenants)

    def cache_entries(self, digests: Sequence[str] | None = None) -> Sequence[CacheEntry]:
        return [
            CacheEntry(ref, self._states.get(digest, "cold"), pinned=digest in self._pins)
            for digest, ref in self._refs.items()
            if digests is None or digest in digests
        ]

    def expert_rows(self) -> dict[int, tuple[int, ...]]:
        return {0: (self.num_steps, 1)}

    def residency(self) -> dict[str, AdapterState]:
        return dict(self._states)

    def take_damaged(self) -> tuple[str, ...]:
        damaged, self._damaged = self._damaged, ()
        return damaged

    def pin(self, ref: AdapterRef) -> None:
        if ref.rank > 64:
            raise LoraplexError(f"rank {ref.rank} is above 64")
        self._pins.add(ref.digest)
        self.prefetch(ref)

    def unpin(self, digest: str) -> None:
        self._pins.discard(digest)

    def drop(self, digest: str) -> None:
        self._pins.discard(digest)
        self._states.pop(digest, None)
        self._refs.pop(digest, None)

    def set_terms(self, tenant_id: str, terms: TenantTerms) -> None:
        self._weights[tenant_id] = terms.weight

    def set_elsewhere(self, digests: Collection[str]) -> None:
        self.elsewhere = frozenset(digests)

    def exchange_service(self, elsewhere: Mapping[str, float]) -> dict[str, float]:
        served, self._elsewhere = self._elsewhere, dict(elsewhere)
        return served

    def warm(self, refs: Sequence[AdapterRef]) -> None:
        for ref in refs:
            self.prefetch(ref)

    @property
    def is_warming(self) -> bool:
        return False

    def prefetch(self, ref: AdapterRef) -> None:
        self._refs[ref.digest] = ref
        self._states[ref.digest] = "hot"


@dataclass
class FakeEngine:
    core: FakeCore
    info: EngineInfo
    closed: bool = False
    heartbeat: StepHeartbeat = field(default_factory=StepHeartbeat)

    def close(self) -> None:
        if os.environ.get("FAKE_CLOSE") == "hang":
            threading.Event().wait()
        self.closed = True
        if os.environ.get("FAKE_CLOSE") == "log":
            log("fake_closed", switch_interval=sys.getswitchinterval())


def build_fake_engine(
    config: EngineConfig, wake: Callable[[], None], on_stage: Callable[[str], None] = lambda stage: None
) -> FakeEngine:
    if config.model_path == "broken":
        raise LoraplexError("there is no model in /nowhere")
    if config.model_path == "buggy":
        raise RuntimeError("nobody foresaw this")
    if config.model_path == "slow":
        on_stage("something slow")
        threading.Event().wait()
    info = EngineInfo(
        model_name="fake",
        architecture="FakeForCausalLM",
        max_model_len=1024,
        vocab_size=VOCAB_SIZE,
        eos_ids=(0,),
        device="cuda:0" if config.device == "cuda" else "cpu",
        dtype="float32",
        block_size=16,
        num_kv_blocks=64,
        kv_bytes=0,
        arena_page_bytes=0,
        arena_pages=0,
        adapter_cpu_bytes=0,
        max_adapter_rank=64,
        max_num_seqs=config.max_num_seqs or 64,
        max_waiting=config.max_waiting,
    )
    step_s = float(os.environ.get("FAKE_STEP_S", "0.002"))
    heartbeat = StepHeartbeat()
    return FakeEngine(FakeCore(step_s=step_s, heartbeat=heartbeat), info, heartbeat=heartbeat)


def spin(*_: object) -> None:
    while True:
        pass


def prepare_fake_spare(_decoder: str) -> None:
    """What a spare process does ahead, by `FAKE_SPARE`."""
    match os.environ.get("FAKE_SPARE"):
        case "exit":
            os._exit(7)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)


if __name__ == "__main__":
    from loraplex.engine.ipc import protocol as wire
    from loraplex.engine.ipc.process import run

    wire.HEARTBEAT_INTERVAL_S = float(os.environ.get("FAKE_BEAT_S", wire.HEARTBEAT_INTERVAL_S))
    if os.environ.get("FAKE_EXIT"):
        sys.exit(int(os.environ["FAKE_EXIT"]))
    signal.signal(signal.SIGUSR1, spin)
    sys.exit(run(build_fake_engine, prepare=prepare_fake_spare))
