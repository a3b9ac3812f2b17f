"""An engine client whose answers are scripted, for tests of what lies above it.

    engine = FakeEngineClient()
    engine.script(Reply(text="Hello"))                  # for the next request
    engine.script(Reply(text="Hi", hold=True))          # streams, then waits for engine.release() or an abort
    engine.script(Reply(error=("adapter_unavailable", "no room")))
    engine.default = Reply(text="ok")                   # when no script is left

Tokens are those of `ByteTokenizer` (a token is a byte), so that `Reply(text=…)` reads back as that text.
Nothing sleeps: a test holds a stream with `hold` and goes on with `release` or `kill`.
"""

from __future__ import annotations

import asyncio
import itertools
import struct
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from loraplex.adapters.cache.residency import CacheEntry
from loraplex.adapters.numerics import SiteOutputs
from loraplex.adapters.ref import AdapterRef
from loraplex.engine.kv.prefix_keys import next_owners
from loraplex.engine.logprobs import Logprobs, Scores
from loraplex.engine.reports import EngineInfo, EngineStats, MemoryUse
from loraplex.engine.tenant_terms import TenantTerms
from loraplex.engine.types import (
    AdapterState,
    EngineError,
    EngineRequest,
    ErrorCode,
    FinishReason,
    Namespace,
    Timing,
    TokenEvent,
    Usage,
)
from loraplex.serving.engines.stream import RequestStream, error_event
from loraplex.serving.errors import EngineDraining, EngineOverloaded, EngineUnavailable
from support.engine.logprobs import Row, pack_logprobs, with_ranks
from support.placement.fake_cluster import FakeClusterView

EOS_ID = 256
SCORED_PER_STEP = 3
"""Tokens of a prompt whose log probabilities come at a time."""
VOCAB_SIZE = 260
HIDDEN_SIZE = 6


def fake_engine_info(**changes: Any) -> EngineInfo:
    info = EngineInfo(
        model_name="tiny-bytes",
        architecture="LlamaForCausalLM",
        max_model_len=4096,
        vocab_size=VOCAB_SIZE,
        eos_ids=(EOS_ID,),
        device="cpu",
        dtype="float32",
        block_size=16,
        num_kv_blocks=1024,
        kv_bytes=1 << 20,
        kv_host_block_bytes=1 << 12,
        arena_page_bytes=1 << 18,
        arena_pages=64,
        adapter_cpu_bytes=1 << 26,
        max_adapter_rank=64,
        max_num_seqs=64,
        max_waiting=1024,
        hidden_size=HIDDEN_SIZE,
        memory=MemoryUse(weights=1 << 19, arena=1 << 24, kv=1 << 20),
        sites=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    )
    return replace(info, **changes)


FAKE_LABELS = {"pirate": 3, "json": 1}
"""Labels of adapters by name, where they classify; others have two."""


def fake_pooled(request: EngineRequest) -> bytes | None:
    """What the fake engine gives as an embedding: of its prompt, its adapter and its pooling."""
    if request.pooling is None:
        return None
    ids = request.prompt_ids
    if request.pooling in ("classify", "token_classify"):
        labels = FAKE_LABELS.get("" if request.adapter is None else request.adapter.name, 2)
        rows = ids if request.pooling == "token_classify" else (sum(ids) % 64,)
        logits = [(row % (3 + label)) * (1 - 2 * (label % 2)) / 2 for row in rows for label in range(labels)]
        return struct.pack(f"<{len(logits)}f", *logits)
    version = 0 if request.adapter is None else request.adapter.version
    return struct.pack("<6f", len(ids), sum(ids), ids[0], -ids[-1], version, request.pooling == "mean")


def fake_row(token_id: int, position: int, num_top: int) -> Row:
    """What the fake engine tells of a token at a position of its sequence: itself the likeliest, then those with the
    next ids."""
    own = -(token_id % 7 + position % 5 + 1) / 4
    return own, [((token_id + rank) % VOCAB_SIZE, own - rank / 8) for rank in range(num_top)]


def fake_named(token_id: int, position: int, named: Sequence[int], num_top: int = 0) -> Row:
    """What it tells of named tokens, behind the likeliest."""
    own, top = fake_row(token_id, position, num_top)
    return own, [*top, *((other, -(other % 11 + position + 1) / 8) for other in named)]


def fake_rank(token_id: int, position: int) -> int:
    return 1 + (token_id + position) % VOCAB_SIZE


def _pack(tokens: Sequence[int], start: int, end: int, num_top: int | None) -> Logprobs | None:
    """Of the tokens at positions start … end-1 of a sequence."""
    rows = [(tokens[place], place) for place in range(start, min(end, len(tokens)))]
    if num_top is None or not rows:
        return None
    return pack_logprobs([fake_row(token, place, num_top) for token, place in rows], num_top)


def fake_prompt_scores(request: EngineRequest, start: int, end: int) -> Scores:
    found = _pack(request.prompt_ids, start, end, request.sampling.prompt_logprobs)
    if found is not None and request.sampling.prompt_ranks:
        places = range(start, start + len(found))
        found = with_ranks(found, [fake_rank(request.prompt_ids[place], place) for place in places])
    return Scores(prompt=found)


def fake_scores(request: EngineRequest, tokens: Sequence[int], start: int, end: int) -> Scores | None:
    """Of output tokens start … end-1."""
    if request.sampling.logprobs is None:
        return None
    sequence, num_prompt = (*request.prompt_ids, *tokens), len(request.prompt_ids)
    if named := request.sampling.logprob_token_ids:
        places = range(num_prompt + start, min(num_prompt + end, len(sequence)))
        num_top = request.sampling.logprobs
        rows = [fake_named(sequence[place], place, named, num_top) for place in places]
        return Scores(pack_logprobs(rows, num_top + len(named))) if rows else None
    output = _pack(sequence, num_prompt + start, num_prompt + end, request.sampling.logprobs)
    return None if output is None else Scores(output)


def _end_scores(request: EngineRequest, tokens: Sequence[int], ends_with_eos: bool) -> Scores | None:
    if not ends_with_eos:
        return None
    return fake_scores(request, (*tokens, EOS_ID), len(tokens), len(tokens) + 1)


async def _measure_nothing(ref: AdapterRef) -> SiteOutputs:
    raise EngineUnavailable(f"this engine was not told how to measure {ref.name} of {ref.tenant_id}")


@dataclass(frozen=True)
class Reply:
    """What the fake engine answers to one request. `text` (or `token_ids`) comes in chunks of `chunk` tokens, or
    of the sizes in `cuts` by turns, and is cut at the request's max_tokens (finish_reason "length"). With `hold`, the
    stream stops after `hold_after` tokens (None: after all of them, before the terminal event) until `release`, an
    abort or `kill`. `error` ends it with an error after the tokens; one that is `refused` was never begun, and
    `is_own`: by a queue that its tenant fills."""

    text: str | None = None
    token_ids: tuple[int, ...] = ()
    chunk: int = 1
    finish_reason: FinishReason = "stop"
    eos: bool = True
    error: tuple[ErrorCode, str] | None = None
    refused: bool = False
    is_own: bool = False
    retry_after_s: float | None = None
    hold: bool = False
    hold_after: int | None = None
    adapter_state: AdapterState = "hot"
    cuts: tuple[int, ...] = ()
    cached_tokens: int = 0
    timing: Timing | None = None

    def slices(self, count: int) -> Iterator[tuple[int, int]]:
        """Where each chunk of this number of tokens begins and ends."""
        sizes = itertools.cycle(self.cuts or (self.chunk,))
        start = 0
        while start < count:
            end = start + next(sizes)
            yield start, end
            start = end

    def tokens(self) -> tuple[int, ...]:
        return tuple(self.text.encode()) if self.text is not None else self.token_ids


class FakeEngineClient(FakeClusterView):
    """Implements Engines. `requests` are all that were submitted, `aborted` the ids that were aborted, in
    order; `pins` by digest, `drops` and `prefetches` in order; `warmed` by the last
    call, `memory` by tenant, `looked_up` what `cache` was last asked for; `states` is what `adapter_state` answers;
    `held_at`: when each stream came to where it waits, by the monotonic clock."""

    def __init__(self, info: EngineInfo | None = None, *, max_inflight: int = 1088) -> None:
        super().__init__()
        self._info = info or fake_engine_info()
        self.max_inflight = max_inflight
        self.default = Reply(text="ok")
        self.requests: list[EngineRequest] = []
        self.aborted: list[str] = []
        self.pins: dict[str, AdapterRef] = {}
        self.drops: list[str] = []
        self.forgotten_tenants: list[str] = []
        self.owners: set[Namespace] = set()
        self.owners_asked: list[Namespace | None] = []
        self.prefetches: list[str] = []
        self.warmed: list[AdapterRef] = []
        self.warming = False
        self.terms: dict[str, TenantTerms] = {}
        self.states: dict[str, AdapterState] = {}
        self.entries: list[CacheEntry] = []
        self.expert_counts: dict[int, tuple[int, ...]] = {}
        self.looked_up: set[str] | None = None
        self.engine_stats: EngineStats | None = None
        self.num_restarts = 0
        self.held_at: list[float] = []
        self.unhealthy_reason: str | None = None
        self.closed_with: float | None = None
        self.measure: Callable[[AdapterRef], Awaitable[SiteOutputs]] = _measure_nothing
        """Stand-in for `measure_sites`; see `fake_measure`."""
        self._scripts: deque[Reply] = deque()
        self._streams: dict[str, RequestStream] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._released: dict[str, asyncio.Event] = {}
        self._began: set[str] = set()
        self._started = False

    # What a test says.

    def script(self, *replies: Reply) -> None:
        self._scripts.extend(replies)

    def forget_script(self) -> None:
        """What was scripted and not asked for."""
        self._scripts.clear()

    def release(self, request_id: str | None = None) -> None:
        """Let a held stream (None: all of them) go on."""
        for key, event in self._released.items():
            if request_id in (None, key):
                event.set()

    def kill(self) -> None:
        """As if the engine process died: every live stream ends with an error, nothing new is taken."""
        self.unhealthy_reason = "the engine process is being restarted"
        for request_id, stream in list(self._streams.items()):
            self._tasks[request_id].cancel()
            self._end(stream, error_event(request_id, "engine_restarting", "the engine process died"))

    def revive(self) -> None:
        self.unhealthy_reason = None
        self.num_restarts += 1

    @property
    def live(self) -> list[str]:
        return list(self._streams)

    # Engines.

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def healthy(self) -> bool:
        return self._started and self.unhealthy_reason is None and self.closed_with is None

    @property
    def num_live(self) -> int:
        return len(self._streams)

    async def start(self) -> None:
        self._started = True

    async def close(self, *, drain_s: float = 0) -> None:
        self.closed_with = drain_s
        tasks = list(self._tasks.values())
        if drain_s > 0 and tasks:
            await asyncio.wait(tasks, timeout=drain_s)
        for request_id, stream in list(self._streams.items()):
            self._tasks[request_id].cancel()
            self._end(stream, error_event(request_id, "draining", "the server is shutting down"))
        await asyncio.gather(*tasks, return_exceptions=True)

    def submit(self, *requests: EngineRequest, terms: TenantTerms | None = None) -> list[RequestStream]:
        if terms is not None:
            self.set_tenants({requests[0].tenant_id: terms})
        if self.closed_with is not None:
            raise EngineDraining("the server is shutting down")
        if not self.healthy:
            raise EngineUnavailable(self.unhealthy_reason or "the engine has not been started")
        if len(self._streams) + len(requests) > self.max_inflight:
            own = {stream.request.tenant_id for stream in self._streams.values()}
            raise EngineOverloaded(
                f"{self.max_inflight} requests are in flight already", is_own=requests[0].tenant_id in own
            )
        return [self._submit(request) for request in requests]

    def _submit(self, request: EngineRequest) -> RequestStream:
        if request.request_id in self._streams:
            raise ValueError(f"request id {request.request_id} is live already")
        self.requests.append(request)
        reply = self._scripts.popleft() if self._scripts else self.default
        stream = RequestStream(request, self._abort)
        self._streams[request.request_id] = stream
        self._released[request.request_id] = asyncio.Event()
        self._tasks[request.request_id] = asyncio.create_task(self._play(stream, reply))
        return stream

    def adapter_state(self, digest: str) -> AdapterState:
        return self.states.get(digest, "cold")

    @property
    def resident(self) -> dict[str, AdapterState]:
        return dict(self.states)

    async def stats(self) -> EngineStats:
        return self.engine_stats or EngineStats(
            num_running=len(self._streams), num_kv_blocks=self._info.num_kv_blocks
        )

    async def cache(self, digests: Collection[str] | None = None) -> list[CacheEntry]:
        self.looked_up = None if digests is None else set(digests)
        return [entry for entry in self.entries if digests is None or entry.ref.digest in digests]

    async def expert_rows(self) -> dict[int, tuple[int, ...]]:
        return self.expert_counts

    async def pin(self, ref: AdapterRef) -> None:
        self.pins[ref.digest] = ref

    async def unpin(self, digest: str) -> None:
        self.pins.pop(digest, None)

    def prefetch(self, refs: Sequence[AdapterRef]) -> None:
        self.prefetches += [ref.digest for ref in refs]

    def warm(self, refs: Sequence[AdapterRef]) -> None:
        self.warmed = list(refs)

    async def wait_pins(self, refs: Sequence[AdapterRef]) -> list[CacheEntry]:
        wanted = {ref.digest for ref in refs}
        return [entry for entry in self.entries if entry.ref.digest in wanted and entry.state != "hot"]

    @property
    def served_tenants(self) -> set[str]:
        return {stream.request.tenant_id for stream in self._streams.values()}

    def set_tenants(self, terms: Mapping[str, TenantTerms]) -> None:
        self.terms |= terms

    async def drop(self, digest: str) -> None:
        self.drops.append(digest)
        self.owners = {owner for owner in self.owners if owner[1] != digest}
        self.states.pop(digest, None)
        self.pins.pop(digest, None)

    async def forget_tenant(self, tenant_id: str) -> None:
        self.forgotten_tenants.append(tenant_id)
        self.owners = {owner for owner in self.owners if owner[0] != tenant_id}

    async def prefix_owners(self, after: Namespace | None) -> set[Namespace]:
        self.owners_asked.append(after)
        return {*next_owners(self.owners, after)}

    async def measure_sites(self, ref: AdapterRef) -> SiteOutputs:
        if not self.healthy:
            raise EngineUnavailable(self.unhealthy_reason or "the engine has not been started")
        return await self.measure(ref)

    # How it answers.

    def _abort(self, request_id: str) -> None:
        self.aborted.append(request_id)
        stream = self._streams.get(request_id)
        if stream is not None:
            self._tasks[request_id].cancel()
            drawn = stream.num_received
            began = drawn or request_id in self._began
            usage = Usage(len(stream.request.prompt_ids) if began else 0, drawn)
            self._end(stream, TokenEvent(request_id, finish_reason="abort", usage=usage))

    def _end(self, stream: RequestStream, event: TokenEvent) -> None:
        request_id = stream.request.request_id
        stream.put(event)
        self._streams.pop(request_id, None)
        self._released.pop(request_id, None)
        self._began.discard(request_id)
        self._tasks.pop(request_id, None)

    async def _hold(self, request_id: str) -> None:
        self.held_at.append(time.monotonic())
        await self._released[request_id].wait()

    async def _play(self, stream: RequestStream, reply: Reply) -> None:
        request = stream.request
        self._began.add(request.request_id)
        arrived = time.monotonic()
        wanted = reply.tokens()
        tokens = wanted[: request.sampling.max_tokens]
        state = reply.adapter_state if request.adapter is not None else None
        for first in range(1 + request.sampling.scored_from, len(request.prompt_ids), SCORED_PER_STEP):
            if request.sampling.prompt_logprobs is not None:
                await asyncio.sleep(0)
                found = fake_prompt_scores(request, first, first + SCORED_PER_STEP)
                stream.put(TokenEvent(request.request_id, adapter_state=state, scores=found))
                state = None
        held = reply.hold
        hold_after = len(tokens) if reply.hold_after is None else min(reply.hold_after, len(tokens))
        for start, end in reply.slices(len(tokens)):
            if held and start >= hold_after:
                await self._hold(request.request_id)
                held = False
            await asyncio.sleep(0)  # one step of the engine
            scores = fake_scores(request, tokens, start, end)
            stream.put(TokenEvent(request.request_id, tokens[start:end], adapter_state=state, scores=scores))
            state = None
        if held:
            await self._hold(request.request_id)
        cut = len(wanted) > len(tokens) or request.sampling.max_tokens == 0
        ends_with_eos = reply.eos and not cut and reply.finish_reason == "stop" and reply.error is None
        num_output = len(tokens) + ends_with_eos
        if num_output > request.sampling.max_tokens:
            ends_with_eos, cut, num_output = False, True, len(tokens)
        usage = Usage(len(request.prompt_ids), num_output, reply.cached_tokens)
        if reply.error is not None:
            error = EngineError(*reply.error, reply.retry_after_s, is_own=reply.is_own)
            usage = Usage(0, 0) if reply.refused else usage
            terminal = TokenEvent(request.request_id, (), "error", error, usage, adapter_state=state)
        else:
            terminal = TokenEvent(
                request.request_id,
                (EOS_ID,) if ends_with_eos else (),
                "length" if cut else reply.finish_reason,
                usage=usage,
                timing=replace(
                    reply.timing
                    or Timing(0.001, 0.002 if tokens else None, 0.003, 0.003 if tokens else None),
                    arrived=arrived,
                ),
                adapter_state=state,
                stop_token_id=EOS_ID if ends_with_eos else None,
                scores=_end_scores(request, tokens, ends_with_eos),
                pooled=fake_pooled(request),
            )
        self._end(stream, terminal)
