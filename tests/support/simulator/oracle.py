"""What must be true of every event of a history, and after every step, whatever the history does.

The oracle knows the requests from outside alone: what was sent, when, what was told of it. What tokens it should have
brought is the fake model's to say; whether an error has a cause, the world's and the runner's.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import inf

from loraplex.adapters.numerics import SiteOutputs
from loraplex.engine.core.engine_core import EngineCore
from loraplex.engine.logprobs import Scores, join_scores
from loraplex.engine.types import EngineError, EngineRequest, TokenEvent
from loraplex.kernels.attention import BLOCK_SIZE
from support.adapters.cache_fakes import PAGE_BYTES
from support.engine.fake_runner import (
    FakeRunner,
    reference,
    reference_measured,
    reference_pooled,
    reference_scores,
)
from support.simulator.core_integrity import check_core
from support.simulator.grammars import FakeGrammars, grammar_of
from support.simulator.tiers import TieredTransport, WatchedCache
from support.simulator.world import EOS_IDS, LOAD_TIMEOUT_S, VOCAB_SIZE, World, memory_needed


class Violation(AssertionError):
    """The engine broke a promise."""


@dataclass(slots=True)
class Record:
    """What is known of one request from outside."""

    request: EngineRequest
    arrival: float
    crowded: bool  # the queue may have been full when it came, or when another did while it waited
    tokens: list[int] = field(default_factory=list)
    scores: list[Scores] = field(default_factory=list)
    told_state: bool = False
    was_hot: bool = False  # its adapter, when it came or at the end of a step since
    aborted: bool = False
    lost: bool = False  # its engine died
    room: float = inf  # the least memory that the device had in its time
    terminal: TokenEvent | None = None

    @property
    def ending(self) -> str:
        """By which of the ways out it went; it must have ended."""
        if self.lost:
            return "engine_restarting"
        assert self.terminal is not None
        error = self.terminal.error
        if _too_large(error):
            return "too_large"
        ending = error.code if error else self.terminal.finish_reason
        assert ending is not None
        return ending


class Oracle:
    """All requests of a history, `records`, and those that have not ended, `live`, by id. `operated`: an operator has
    pinned, and a pin may leave no room for others. All checks raise Violation."""

    def __init__(self, world: World, runner: FakeRunner, grammars: FakeGrammars) -> None:
        self._world = world
        self._runner = runner
        self._grammars = grammars
        self.num_grammar_ends = 0
        self.num_measured = 0
        self.operated = False
        self.known: set[str] = set()  # tenants whose limits the engine knows
        self.brought_before: set[str] = set()  # tenants with an adapter from before that
        self.deleted: dict[str, float] = {}  # digests that nobody waited for, and when
        self.records: dict[str, Record] = {}
        self.live: dict[str, Record] = {}

    def sent(self, request: EngineRequest, now: float, room: float, *, is_hot: bool) -> None:
        """`room`: what the device has of memory for a step now. `is_hot`: its adapter is on the device."""
        self.known.add(request.tenant_id)
        crowded = len(self.live) >= self._world.config.max_waiting
        for other in self.live.values():
            other.crowded |= crowded
        record = Record(request, now, crowded, room=room, was_hot=is_hot)
        self.records[request.request_id] = self.live[request.request_id] = record

    def restarted(self, runner: FakeRunner, grammars: FakeGrammars) -> None:
        """The engine died, and all of its requests; another one is there."""
        for record in self.live.values():
            record.lost = True
        self.live.clear()
        self._runner, self._grammars = runner, grammars
        self.operated = False
        self.known.clear()
        self.brought_before.clear()

    def resumed(self, record: Record, now: float, room: float) -> EngineRequest:
        """The answer of a request whose engine died goes on in another. Returns the request for that one."""
        request, deadline = record.request, record.request.deadline
        record.request = replace(
            request,
            generated=tuple(record.tokens),
            deadline=None if deadline is None else record.arrival + deadline - now,
        )
        record.arrival, record.room = now, min(record.room, room)
        record.lost = record.told_state = False
        self.known.add(request.tenant_id)
        self.live[request.request_id] = record
        return record.request

    def room_is(self, room: float) -> None:
        for record in self.live.values():
            record.room = min(record.room, room)

    def take(self, event: TokenEvent, now: float) -> None:
        record = self.records.get(event.request_id)
        if record is None:
            raise Violation(f"an event for {event.request_id}, which never was")
        if event.duplicate:
            _expect(event.finish_reason == "error" and not event.token_ids, event, "a twin must be refused")
            return
        _expect(record.terminal is None, event, "an event after the end")
        named = record.request.adapter is not None
        _expect(
            (event.adapter_state is not None) == (named and not record.told_state), event, "adapter_state"
        )
        record.told_state = True
        record.tokens += event.token_ids
        if event.scores is not None:
            record.scores.append(event.scores)
        if event.finish_reason is None:
            _expect(bool(event.token_ids or event.scores), event, "an event that says nothing")
            return
        record.terminal = event
        del self.live[event.request_id]
        self._check_ending(record, event, now)

    def _check_ending(self, record: Record, event: TokenEvent, now: float) -> None:
        request, usage, timing = record.request, event.usage, event.timing
        expected, reason = self._expected(request)
        if event.finish_reason in ("stop", "length"):
            _expect(record.tokens == expected, event, f"tokens {record.tokens} instead of {expected}")
            _expect(event.finish_reason == reason, event, f"it should have ended by {reason}")
            ends = EOS_IDS.union(request.sampling.stop_token_ids)
            stop = expected[-1] if reason == "stop" and expected[-1] in ends else None
            self.num_grammar_ends += reason == "stop" and stop is None
            _expect(event.stop_token_id == stop, event, f"stopped by {stop}")
            _expect(not record.aborted, event, "it was aborted before")
            _expect(_scores(record) == self._expected_scores(record), event, "wrong log probabilities")
            _expect(event.pooled == self._expected_pooled(request), event, "a wrong embedding")
            _expect(event.measured == self._expected_measured(request), event, "wrong outputs of sites")
            self.num_measured += request.request_id in self._world.measured
        else:
            _expect(event.pooled is None, event, "an embedding of a request that failed")
            _expect(event.measured is None, event, "outputs of sites of a request that failed")
            _expect(record.tokens == expected[: len(record.tokens)], event, "wrong tokens before its end")
            _expect(_begins(_scores(record), self._expected_scores(record)), event, "wrong log probabilities")
            complete = bool(expected) and len(record.tokens) == len(expected)
            _expect(not complete, event, "it was complete")
        if event.finish_reason == "abort":
            _expect(record.aborted, event, "nobody aborted it")
        if event.error is not None:
            _expect(self._has_cause(record, event.error, now), event, "no cause for this error")
        num_new = len(record.tokens) - len(request.generated)
        began = bool(record.tokens) or (timing is not None and timing.queue_s < timing.total_s)
        counts = {len(request.prompt_ids)} if began else {0, len(request.prompt_ids)}
        _expect(usage is not None and usage.prompt_tokens in counts, event, "prompt tokens")
        _expect(
            usage is not None and usage.completion_tokens == len(record.tokens), event, "completion tokens"
        )
        assert usage is not None
        cached = usage.cached_tokens
        findable = max(0, len(request.prompt_ids) - 1)
        _expect(cached % BLOCK_SIZE == 0 and 0 <= cached <= findable, event, "cached tokens")
        _expect(cached <= usage.prompt_tokens, event, "more cached tokens than prompt tokens")
        _expect(request.pooling not in ("mean", "cls") or cached == 0, event, "hidden states are not cached")
        assert timing is not None
        _expect((timing.first_token_s is not None) == bool(num_new), event, "time of the first token")
        _expect(
            0 <= timing.queue_s <= (timing.first_token_s or timing.total_s) <= timing.total_s, event, "times"
        )

    def _expected(self, request: EngineRequest) -> tuple[list[int], str]:
        sampling = request.sampling
        digest = None if request.adapter is None else request.adapter.digest
        if sampling.max_tokens == 0:
            return [], "length"
        tokens = reference(digest, request.prompt_ids, sampling.max_tokens, VOCAB_SIZE, request.adapter_from)
        grammar = grammar_of(request)
        for index, token in enumerate(tokens):
            if grammar == ("ends", index + 1):
                return tokens[: index + 1], "stop"
            if index < sampling.min_tokens:
                continue
            if token in sampling.stop_token_ids or (token in EOS_IDS and not sampling.ignore_eos):
                return tokens[: index + 1], "stop"
        return tokens, "length"

    def _expected_scores(self, record: Record) -> Scores:
        request = record.request
        digest = None if request.adapter is None else request.adapter.digest
        return reference_scores(
            digest, request.prompt_ids, tuple(record.tokens), request.sampling, request.adapter_from
        )

    def _expected_pooled(self, request: EngineRequest) -> bytes | None:
        if request.pooling is None:
            return None
        digest = None if request.adapter is None else request.adapter.digest
        return reference_pooled(digest, request.prompt_ids, request.pooling, request.adapter_from)

    def _expected_measured(self, request: EngineRequest) -> SiteOutputs | None:
        if request.request_id not in self._world.measured or request.adapter is None:
            return None
        return reference_measured(request.adapter.digest)

    def _has_cause(self, record: Record, error: EngineError, now: float) -> bool:
        request, config, suspects = record.request, self._world.config, self._world.suspects
        total = len(request.prompt_ids) + request.sampling.max_tokens
        match error.code:
            case "internal_error":
                return request.request_id in self._runner.faulted
            case "adapter_not_finite":
                return request.request_id in self._runner.faulted and request.adapter is not None
            case "grammar_failed":
                broken = (grammar_of(request) or ("",))[0] in ("breaks", "refused")
                return broken or request.request_id in self._grammars.late
            case "deadline_exceeded":
                return request.deadline is not None and now >= record.arrival + request.deadline
            case "adapter_unavailable" if error.message.endswith("it is being loaded"):
                patience = request.max_load
                timing = None if record.terminal is None else record.terminal.timing
                at_once = timing is not None and timing.arrived is None
                in_time = (
                    patience is not None
                    and not request.generated
                    and (at_once or now >= record.arrival + patience)
                )
                return in_time and error.retry_after_s is not None and error.retry_after_s >= 0
            case "adapter_unavailable":
                digest = request.adapter.digest if request.adapter is not None else None
                cap = self._world.caps.get(request.tenant_id)
                if digest is not None and "device_bytes_max" in error.message:
                    too_large = cap is not None and self._world.sizes[digest] * PAGE_BYTES > cap
                    return too_large or self.operated or (cap is not None and bool(suspects))
                # A copy past its time keeps its pages; others may not fit beside them, or may not have for a while.
                crowded = bool(suspects) and error.message.startswith("it does not fit")
                return digest in suspects or self.operated or crowded
            case "server_overloaded" if _too_large(error):
                # What fits alone, token by token, is never lost.
                return memory_needed(1, total) > record.room
            case "server_overloaded":
                return record.crowded and not record.tokens
            case "context_length_exceeded":
                computed = len(request.prompt_ids) + max(0, request.sampling.max_tokens - 1)
                return total > config.max_model_len or config.block_needs.of(computed) > config.num_blocks
        return False

    def check_step(
        self, core: EngineCore, cache: WatchedCache, transport: TieredTransport, started: float
    ) -> None:
        """After a step that began at `started`."""
        check_core(core)
        if complaints := self._runner.complaints or cache.complaints:
            raise Violation("; ".join(complaints))
        if cache.usage().host_bytes_used != transport.live_bytes:
            raise Violation(f"images of {transport.live_bytes} bytes live, which the cache does not know")
        if transport.damaged and not transport.damaged <= {*core.take_damaged()}:
            raise Violation(f"nobody was told that {sorted(transport.damaged)} are damaged")
        transport.damaged.clear()
        for digest, since in self.deleted.items():
            if started > since + 2 * LOAD_TIMEOUT_S and digest in core.residency():
                raise Violation(f"{digest[:6]} was deleted and is still in memory")
        held = core.stats().tenant_bytes if self._world.caps else {}
        for tenant, cap in self._world.caps.items():
            if tenant in held and held[tenant].device > cap and tenant not in self.brought_before:
                raise Violation(f"{tenant} has {held[tenant].device} bytes on the device, above its cap")
        for request_id, record in self.live.items():
            deadline = record.request.deadline
            if record.aborted:
                raise Violation(f"{request_id} was aborted and goes on")
            if deadline is not None and record.arrival + deadline <= started:
                raise Violation(f"{request_id} goes on past its deadline")
            patience, ref = record.request.max_load, record.request.adapter
            if patience is None or ref is None or record.request.generated:
                continue
            record.was_hot |= core.residency().get(ref.digest) == "hot"
            if record.arrival + patience <= started and not record.was_hot:
                raise Violation(f"{request_id} waits for its adapter for longer than it wanted")

    def check_end(self, core: EngineCore) -> None:
        """The core has said that it has no work."""
        stats = core.stats()
        if self.live:
            raise Violation(f"the core has nothing to do, but {sorted(self.live)} never ended")
        held = stats.num_kv_blocks_used, stats.num_states_used, stats.num_leases
        if any(held) or stats.num_running or stats.num_waiting:
            raise Violation(f"at the end, something is still held: {stats}")
        if self._grammars.ready or self._grammars.waiting:
            raise Violation("at the end, a matcher is still held")
        if self._runner.num_in_flight:
            raise Violation("a step was never collected")


def _too_large(error: EngineError | None) -> bool:
    return error is not None and error.message.startswith("the device has too little memory")


def _scores(record: Record) -> Scores:
    return join_scores(record.scores) or Scores()


def _begins(found: Scores, expected: Scores) -> bool:
    """What was told before a request was cut short: of all its output, and of the first tokens of its prompt."""
    if found.output != expected.output:
        return False
    return found.prompt is None or (
        expected.prompt is not None and found.prompt == expected.prompt.part(0, len(found.prompt))
    )


def _expect(condition: bool, event: TokenEvent, what: str) -> None:
    if not condition:
        raise Violation(f"{what}: {event}")
