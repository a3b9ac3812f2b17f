"""Shadows: a share of a release's requests is answered again by another version, unseen.

A request whose answer came to its proper end may be sampled. The shadow version then answers it as background work of
the engine, with the same parameters and the same seed, so that a version with the same weights gives the same tokens.
Both versions then score the answer that the caller got: one prefill each of the prompt with the answer. What comes of
it is added up for `ShadowStore`. Nothing of this reaches the caller, its limits, its usage or the access log; what
fails is counted.

One sequence alone is compared: requests for several choices or prompts, for embeddings or scores of a prompt, with a
grammar, or on an activated LoRA are skipped.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from loraplex.adapters.ref import AdapterRef
from loraplex.api.drain import Drain
from loraplex.api.metrics.part_meters import ShadowMeter
from loraplex.control.catalog.shadow_store import TEXT_BYTES, ShadowKey, ShadowStore, ShadowSums, began_of
from loraplex.control.types import ResolvedModel
from loraplex.engine.types import EngineRequest, ErrorCode, SamplingParams, TokenEvent
from loraplex.serving.engines.engines import Engines
from loraplex.serving.engines.stream import RequestStream
from loraplex.serving.errors import EngineOverloaded, EngineUnavailable
from loraplex.serving.text.processor import TextProcessor

MOST_WAITING = 256
"""Samples that wait on a server; more are dropped."""
MOST_OF_TENANT = 64
"""The same of one tenant."""
AT_ONCE = 16
"""Samples whose requests are in the engine."""
AT_ONCE_OF_TENANT = 8
PATIENCE_S = 120.0
"""A sample that is not complete after so long is dropped."""
EVERY_S = 1.0
"""How often sums are written, and the end of the server is looked for."""
CLEAN_S = 3600.0
"""How often texts that are too old are removed."""
MOST_KEYS = 1000
"""Releases whose sums are held while the database is away."""
MOST_TEXTS_HELD = 1000
"""Samples of all releases whose texts are held meanwhile, of up to 48 KiB each; texts of more are not kept."""
NO_FAULT: frozenset[ErrorCode] = frozenset(
    {"server_overloaded", "engine_restarting", "deadline_exceeded", "draining"}
)
"""Ends of a sample that say nothing of the shadow version."""
ShadowOutcome = Literal["exact", "different", "dropped", "failed", "skipped"]


class _Dropped(Exception):
    """The sample was given up, by no fault of its version."""


class _Failed(Exception):
    """The engine could not compute it."""


@dataclass(frozen=True, slots=True)
class _Sample:
    """A request to answer by `adapter`, with the `tokens` that its caller got."""

    key: ShadowKey
    live: EngineRequest
    tokens: tuple[int, ...]
    adapter: AdapterRef
    stops: tuple[str, ...]
    keep_texts: bool
    until: float


@dataclass(slots=True)
class _Tenant:
    waiting: deque[_Sample] = field(default_factory=deque)
    running: int = 0


def is_sampled(request_id: str, sample: float) -> bool:
    """Whether a request is one of the share `sample` (0 … 1) of all, by its id alone."""
    digest = hashlib.sha256(b"shadow/" + request_id.encode()).digest()
    return int.from_bytes(digest[:8], "big") < sample * 2**64


def is_comparable(request: EngineRequest, shadow: AdapterRef) -> bool:
    """Whether a request for one sequence is one that a shadow answers; see above."""
    adapter = request.adapter
    if adapter is None or adapter.invocation or shadow.invocation or request.adapter_from:
        return False
    if request.grammar is not None or request.pooling is not None:
        return False
    return request.sampling.max_tokens > 0 and request.sampling.prompt_logprobs is None


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """The first index at which two answers differ; None where they are the same."""
    for index, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return index
    return None if len(one) == len(other) else min(len(one), len(other))


class Shadows:
    """The samples of one server. For one event loop's thread. `clock` is monotonic seconds."""

    def __init__(
        self,
        engine: Engines,
        text: TextProcessor,
        drain: Drain,
        store: ShadowStore,
        in_thread: Callable[[Callable[[], object]], Awaitable[object]],
        meter: ShadowMeter,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._text = text
        self._drain = drain
        self._store = store
        self._in_thread = in_thread
        self._meter = meter
        self._clock = clock
        self._tenants: OrderedDict[str, _Tenant] = OrderedDict()  # in turns
        self._num_waiting = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._sums: dict[ShadowKey, ShadowSums] = {}
        meter.watch(lambda: self._num_waiting, lambda: len(self._tasks))

    def offer(
        self,
        request_id: str,
        model: ResolvedModel,
        answer: tuple[EngineRequest, tuple[int, ...]] | None,
        stops: Sequence[str],
    ) -> None:
        """Take a request whose answer is with its caller, if it is sampled. See `ShadowSamples`."""
        release, shadow = model.release, model.shadow
        if release is None or shadow is None or release.plan.shadow is None or self._drain.draining:
            return
        its = release.plan.shadow
        if not is_sampled(request_id, its.sample):
            return
        if answer is None or not is_comparable(answer[0], shadow):
            self._meter.ended("skipped")
            return
        key = ShadowKey(release.tenant_id, release.name, began_of(release), shadow.version)
        tenant = self._tenants.setdefault(key.tenant_id, _Tenant())
        if self._num_waiting >= MOST_WAITING or len(tenant.waiting) >= MOST_OF_TENANT:
            self._count(key, "dropped")
            return
        until = self._clock() + PATIENCE_S
        tenant.waiting.append(_Sample(key, *answer, shadow, tuple(stops), its.keep_texts, until))
        self._num_waiting += 1
        self._start_some()

    async def run(self) -> None:
        """Write the sums, and now and then remove texts that are too old. Without end."""
        removed_at = -CLEAN_S
        while True:
            await asyncio.sleep(EVERY_S)
            await self.write()
            if self._clock() - removed_at >= CLEAN_S:
                await self._in_thread(self._store.remove_old_texts)
                removed_at = self._clock()

    async def write(self) -> None:
        """Write what has been added up. Raises what the store does; nothing is lost then. When the server is about to
        stop, all samples are dropped before."""
        if self._drain.draining:
            self._drop_all()
        if not self._sums:
            return
        batch, self._sums = self._sums, {}
        try:
            await self._in_thread(lambda: self._store.add(batch))
        except BaseException:
            for key, sums in self._sums.items():
                batch.setdefault(key, ShadowSums()).add_all(sums)
            self._sums = batch
            raise

    def _drop_all(self) -> None:
        for tenant in self._tenants.values():
            for sample in tenant.waiting:
                self._count(sample.key, "dropped")
            tenant.waiting.clear()
        self._num_waiting = 0
        for task in self._tasks:
            task.cancel()

    def _start_some(self) -> None:
        """Start waiting samples, one of each tenant in turn."""
        for _ in range(len(self._tenants)):
            if len(self._tasks) >= AT_ONCE:
                return
            name, tenant = next(iter(self._tenants.items()))
            self._tenants.move_to_end(name)
            if tenant.waiting and tenant.running < AT_ONCE_OF_TENANT:
                sample = tenant.waiting.popleft()
                self._num_waiting -= 1
                tenant.running += 1
                task = asyncio.create_task(self._follow(sample, tenant))
                self._tasks.add(task)
                task.add_done_callback(self._ended)
            elif not tenant.waiting and not tenant.running:
                del self._tenants[name]

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._start_some()

    async def _follow(self, sample: _Sample, tenant: _Tenant) -> None:
        """Whatever comes of it is counted, and nothing is raised."""
        outcome: ShadowOutcome = "failed"
        try:
            outcome = await self._compare(sample)
        except (_Dropped, EngineOverloaded, EngineUnavailable, asyncio.CancelledError):
            outcome = "dropped"
        except Exception:  # counted: a shadow's failure is nobody's
            outcome = "failed"
        finally:
            tenant.running -= 1
            self._count(sample.key, outcome)

    async def _compare(self, sample: _Sample) -> ShadowOutcome:
        answered_by = sample.live.adapter
        assert answered_by is not None, "is_comparable"
        tokens, text = await self._generate(sample)
        place = first_difference(sample.tokens, tokens)
        values: dict[str, float] = {"live_tokens": len(sample.tokens), "shadow_tokens": len(tokens)}
        values["diverged_at"] = place or 0
        own = await self._score(sample, answered_by, "live")
        same = sample.adapter.digest == answered_by.digest
        values["live_logprob"] = own
        values["shadow_logprob"] = own if same else await self._score(sample, sample.adapter, "shadow")
        values["scored"] = len(sample.tokens)
        texts = None
        if sample.keep_texts:
            texts = await asyncio.to_thread(self._texts, sample, tokens, text)
        sums = self._sums_of(sample.key)
        if sums is not None:
            sums.add(values)
            if texts is not None and self._num_texts < MOST_TEXTS_HELD:
                sums.add_texts(*texts)
        return "exact" if place is None else "different"

    async def _generate(self, sample: _Sample) -> tuple[tuple[int, ...], str]:
        """The shadow's tokens and text, up to a stop string."""
        live = sample.live
        sampling = replace(live.sampling, logprobs=None, prompt_ranks=False, logprob_token_ids=())
        request = self._background(sample, replace(live, sampling=sampling), sample.adapter, "shadow")
        shown = self._text.stream(sample.stops, min_tokens=sampling.min_tokens)
        text = ""
        async with self._submit(request) as stream:
            async for event in stream:
                text += shown.push(event.token_ids, stop_token_id=event.stop_token_id).text
                if shown.finished_by_stop is not None:
                    break
                _check(event)
            else:
                text += shown.finish().text
        return tuple(stream.received[: shown.num_tokens]), text

    async def _score(self, sample: _Sample, adapter: AdapterRef, name: str) -> float:
        """The log probability of the caller's answer under a version."""
        if not sample.tokens:
            return 0.0
        request = replace(
            sample.live,
            prompt_ids=(*sample.live.prompt_ids, *sample.tokens),
            sampling=SamplingParams(max_tokens=0, temperature=0.0, prompt_logprobs=0),
        )
        values: list[float] = []
        async with self._submit(self._background(sample, request, adapter, f"{name}-score")) as stream:
            async for event in stream:
                if event.scores is not None and event.scores.prompt is not None:
                    values += [own for own, _ in event.scores.prompt.rows()]
                _check(event)
        total = sum(values[-len(sample.tokens) :])
        if not math.isfinite(total):
            raise _Failed  # no database and no JSON takes it, and it would stay in the sum
        return total

    def _background(
        self, sample: _Sample, request: EngineRequest, adapter: AdapterRef, name: str
    ) -> EngineRequest:
        left = sample.until - self._clock()
        if left <= 0:
            raise _Dropped
        return replace(
            request,
            request_id=f"{request.request_id}-{name}",
            adapter=adapter,
            deadline=left,
            max_load=None,
            generated=(),
            background=True,
        )

    def _submit(self, request: EngineRequest) -> RequestStream:
        return self._engine.submit(request)[0]

    def _texts(self, sample: _Sample, tokens: tuple[int, ...], text: str) -> tuple[str, str, str]:
        """The beginnings of the prompt, of the caller's answer and of the shadow's, which is of no more tokens than the
        caller's: more would be an answer that nobody pays. A token that has a text has a byte at least."""
        most = len(sample.tokens)
        return (
            self._text_of(sample.live.prompt_ids, ()),
            self._text_of(sample.tokens, sample.stops),
            text if len(tokens) <= most else self._text_of(tokens[:most], sample.stops),
        )

    def _text_of(self, tokens: tuple[int, ...], stops: tuple[str, ...]) -> str:
        text = self._text.stream(stops)
        return text.push(tokens[:TEXT_BYTES]).text + text.finish().text

    def _sums_of(self, key: ShadowKey) -> ShadowSums | None:
        if key not in self._sums and len(self._sums) >= MOST_KEYS:
            return None
        return self._sums.setdefault(key, ShadowSums())

    @property
    def _num_texts(self) -> int:
        return sum(len(sums.texts) for sums in self._sums.values())

    def _count(self, key: ShadowKey, outcome: ShadowOutcome) -> None:
        self._meter.ended(outcome)
        sums = self._sums_of(key)
        if sums is None:
            return
        if outcome in ("exact", "different"):
            sums.add({"samples": 1, "exact": outcome == "exact"})
        else:
            sums.add({outcome: 1})


def _check(event: TokenEvent) -> None:
    """Raise _Dropped or _Failed for the end of a sequence that is not its proper one."""
    if event.finish_reason == "abort" or (event.error is not None and event.error.code in NO_FAULT):
        raise _Dropped
    if event.finish_reason == "error":
        raise _Failed
