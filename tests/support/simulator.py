"""Random histories of the engine core, each from one seed, with an oracle beside every step.

    play(seed) -> Summary         raises Violation, with the seed and the last things that happened

A history has tenants with weights, adapters (some with the same bytes under two tenants), prompts with common
starts, bursts of arrivals, aborts (in the middle of a scored prompt too), deadlines, loads and copies that take time,
fail, hang or come too late, steps and rows that fail, KV that is not finite and is noticed late, a device that has
too little memory for a while, pins and drops, and never quite enough blocks, pages, slots or host memory. The core, the
scheduler, the blocks and the adapter cache are the real ones; the runner, the transport and the clock are fakes.

What is checked, after every step or at the end:
  every manager's own `check_integrity`; a request ends exactly once, and when it was told to; its tokens are the
  fake model's for its own digest and prompt, cut at the right place; its usage, times and first event are right; an
  error has its cause; nobody reads another tenant's KV; an engine that says it is idle has nothing to do, and one
  that waits for something waits for something that will come; at the end nothing is held. Every eighth history is
  about fairness alone: the served amounts of backlogged tenants stay within the bound.
"""

from __future__ import annotations

import logging
import random
from collections import deque
from dataclasses import dataclass, field, replace
from math import inf

from loraplex.adapters.ref import AdapterRef
from loraplex.engine.config import BLOCK_SIZE, SchedulerConfig
from loraplex.engine.core import EngineCore
from loraplex.engine.logprobs import Scores, join_scores
from loraplex.engine.types import (
    EngineError,
    EngineRequest,
    SamplingParams,
    ScheduledSequence,
    StepPlan,
    TokenEvent,
)
from support.fake_runner import FakeRunner, Fault, reference, reference_scores
from support.fake_transport import FakeTransport, Fate, make_cache

MIN_EVENTS = 200
VOCAB_SIZE = 61
EOS_IDS = frozenset({0, 1})
LOAD_TIMEOUT_S = 4.0
MAX_DRAIN_STEPS = 4_000
FAIR_EVERY = 8


class Violation(AssertionError):
    """The engine broke a promise."""


@dataclass
class Summary:
    """What a history, or many, consisted of."""

    histories: int = 0
    events: int = 0
    steps: int = 0
    requests: int = 0
    tokens: int = 0
    preemptions: int = 0
    prefix_hits: int = 0
    loads: int = 0
    out_of_memory: int = 0
    poisoned: int = 0
    cut_prompts: int = 0
    endings: dict[str, int] = field(default_factory=dict)

    def add(self, other: Summary) -> None:
        for name in (
            "histories",
            "events",
            "steps",
            "requests",
            "tokens",
            "preemptions",
            "prefix_hits",
            "loads",
            "out_of_memory",
            "poisoned",
            "cut_prompts",
        ):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for ending, count in other.endings.items():
            self.endings[ending] = self.endings.get(ending, 0) + count

    def __str__(self) -> str:
        endings = ", ".join(f"{count} {ending}" for ending, count in sorted(self.endings.items()))
        return (
            f"{self.histories} histories, {self.events} events, {self.steps} steps, {self.requests} requests "
            f"({endings}), {self.tokens} tokens, {self.preemptions} preemptions, {self.prefix_hits} tokens found in "
            f"the prefix cache, {self.loads} loads, {self.out_of_memory} steps out of memory, {self.poisoned} rows "
            f"with KV that is not finite, {self.cut_prompts} prompts aborted while they were scored"
        )


@dataclass(slots=True)
class _Record:
    """What is known of one request from outside."""

    request: EngineRequest
    arrival: float
    crowded: bool  # the queue may have been full when it came, or when another did while it waited
    tokens: list[int] = field(default_factory=list)
    scores: list[Scores] = field(default_factory=list)
    told_state: bool = False
    aborted: bool = False
    room: float = inf  # the least memory that the device had in its time
    terminal: TokenEvent | None = None


@dataclass(slots=True)
class _Pair:
    """Two tenants, and how far their service has drifted while both had requests waiting."""

    low: float | None = None
    high: float = 0.0


class History:
    def __init__(self, seed: int, *, fair: bool | None = None) -> None:
        self.rng = rng = random.Random(seed)
        self.asking = random.Random(seed)  # for log probabilities
        self.mishaps = random.Random(seed)  # of memory and numbers
        self.seed = seed
        self.fair = seed % FAIR_EVERY == 0 if fair is None else fair
        self.now = 100.0
        self.num_events = 0
        self.num_steps = 0
        self.trail: deque[str] = deque(maxlen=40)
        self.records: dict[str, _Record] = {}
        self.live: dict[str, _Record] = {}
        self.room = inf  # for a step, see `_needs`
        self.num_poisoned = self.num_cut_prompts = 0
        self.lookahead = rng.randint(0, 1)
        self._draw_sizes()
        self._draw_world()
        self.transport = FakeTransport(
            lambda: self.now, self.num_pages, self._pages_of, self._load_fate, self._copy_fate
        )
        self.cache = make_cache(
            self.transport,
            num_slots=rng.randint(2, 4),
            host_pages=rng.randint(2, 10),
            load_timeout_s=LOAD_TIMEOUT_S,
        )
        self.runner = FakeRunner(
            self.config.num_blocks,
            self.transport.mark_in_slot,
            vocab_size=VOCAB_SIZE,
            fault=self._fault,
            tokens_per_row=self._tokens_per_row,
            max_in_flight=1 + self.lookahead,
        )
        self.core = EngineCore(self.config, self.runner, self.cache, eos_ids=EOS_IDS, clock=lambda: self.now)

    # The world.

    def _draw_sizes(self) -> None:
        rng = self.rng
        self.p_abort = rng.choice((0.0, 0.03, 0.15))
        self.max_new = rng.choice((3, 8, 20, 40))
        num_blocks = rng.choice((3, 4, 5, 5, 6, 6, 8, 14))
        self.config = SchedulerConfig(
            num_blocks=num_blocks,
            max_model_len=rng.choice((40, 16 * num_blocks, 16 * num_blocks + 1, 400)),
            max_num_seqs=rng.randint(1, 6),
            max_num_batched_tokens=rng.choice((2, 5, 16, 24, 40, 64)),
            max_waiting=rng.choice((3, 10, 20, 60)),
            lookahead=1 if self.lookahead else 0,
            adapter_wait_aging_s=rng.choice((0.0, 0.3, 1.0, 3.0)),
        )
        if rng.random() < 0.25:
            # Long answers on few blocks: preemption after preemption.
            self.max_new, self.p_abort, num_blocks = 40, 0.0, rng.randint(4, 6)
            self.config = SchedulerConfig(
                num_blocks,
                16 * num_blocks,
                rng.randint(3, 6),
                rng.choice((16, 40)),
                20,
                self.config.lookahead,
                self.config.adapter_wait_aging_s,
            )
        if self.fair:
            self.config = SchedulerConfig(
                24, 64, rng.randint(1, 4), rng.choice((24, 48)), 1000, self.config.lookahead
            )
        self.config = replace(
            self.config,
            max_scored_tokens=self.asking.choice((1, 5, 16, 128)),
            # So little is served in a history that the usual quantum would keep every adapter where it is.
            residency_quantum=random.Random(self.seed).choice((0.0, 0.0, 30.0, 2048.0)),
        )
        self.num_pages = rng.randint(2, 5)
        self.p_arrive = rng.choice((0.05, 0.1, 0.2, 0.5))
        self.p_deadline = rng.choice((0.0, 0.1, 0.4))
        self.p_fault = rng.choice((0.0, 0.01, 0.05))
        self.p_bad_load = rng.choice((0.0, 0.05, 0.3))
        self.p_operator = rng.choice((0.0, 0.0, 0.05))
        self.speculates = rng.random() < 0.25
        self.p_shortage = self.mishaps.choice((0.0, 0.005, 0.02))
        self.p_poison = self.mishaps.choice((0.0, 0.0, 0.02, 0.1))
        self.slow = rng.choice((0.05, 0.5, 2.0))

    def _draw_world(self) -> None:
        rng = self.rng
        self.tenants = [f"t{index}" for index in range(rng.randint(1, 4))]
        self.weights = {tenant: float(rng.choice((1, 1, 2, 4))) for tenant in self.tenants}
        # A digest may belong to several tenants: they uploaded the same bytes.
        digests = [rng.randbytes(32).hex() for _ in range(rng.randint(1, 6))]
        self.sizes = {digest: rng.randint(1, min(3, self.num_pages)) for digest in digests}
        self.adapters: dict[str, list[AdapterRef | None]] = {}
        for tenant in self.tenants:
            mine = rng.sample(digests, rng.randint(0, len(digests)))
            refs = [AdapterRef(tenant, f"a{number}", number, digest, 8) for number, digest in enumerate(mine)]
            self.adapters[tenant] = [None, *refs]
        one, two, three = (tuple(rng.randrange(VOCAB_SIZE) for _ in range(BLOCK_SIZE)) for _ in range(3))
        # The last two differ in their first block alone.
        self.starts = [(), (), one, (*one, *three), (*two, *three)]
        self.suspects: set[str] = set()  # digests whose way to the device went wrong, or might
        self.operated = False

    def _pages_of(self, digest: str) -> int:
        return self.sizes[digest]

    def _load_fate(self, digest: str) -> Fate:
        return self._fate(digest, self.slow, hang=True)

    def _copy_fate(self, digest: str) -> Fate:
        # A copy that never ends takes its pages with it for good, and with them the history: it ends late instead.
        return self._fate(digest, self.slow / 10, hang=False)

    def _fate(self, digest: str, seconds: float, *, hang: bool) -> Fate:
        rng = self.rng
        seconds *= rng.random()
        if rng.random() >= self.p_bad_load:
            return Fate(seconds)
        self.suspects.add(digest)
        match rng.randrange(3):
            case 0:
                return Fate(seconds, "the disk said no")
            case 1 if hang:
                return Fate(None)
            case _:
                return Fate(LOAD_TIMEOUT_S + 3 * rng.random())

    def _fault(self, plan: StepPlan) -> Fault:
        rng = self.rng
        if self.p_fault and not self.fair and rng.random() < self.p_fault:
            self._happened("a step fails")
            kind = rng.randrange(3)
            if kind < 2:
                return Fault(("submit", "collect")[kind])
            count = len(plan.scheduled)
            return Fault(rows=frozenset(rng.sample(range(count), rng.randint(1, count))))
        mishaps = self.mishaps
        if sum(_needs(row.num_tokens, row.start + row.num_tokens) for row in plan.scheduled) > self.room:
            self._happened("a step does not fit")
            return Fault(mishaps.choice(("submit", "collect")), memory=True)
        if self.p_poison and not self.fair and mishaps.random() < self.p_poison:
            self._happened("what a row leaves is not finite")
            self.num_poisoned += 1
            return Fault(poisoned=frozenset({mishaps.randrange(len(plan.scheduled))}))
        return Fault()

    def _tokens_per_row(self, row: ScheduledSequence) -> int:
        return self.rng.randint(1, 3) if self.speculates else 1

    def _happened(self, what: str) -> None:
        self.num_events += 1
        self.trail.append(f"{self.num_steps}: {what}")

    # The play.

    def play(self) -> Summary:
        try:
            self._play()
        except Violation as error:
            raise Violation(f"seed {self.seed}: {error}\n" + "\n".join(self.trail)) from error
        except Exception as error:
            raise Violation(f"seed {self.seed}: {error!r}\n" + "\n".join(self.trail)) from error
        stats = self.core.stats()
        endings: dict[str, int] = {}
        for record in self.records.values():
            assert record.terminal is not None
            error = record.terminal.error
            ending = (
                "too_large" if _too_large(error) else error.code if error else record.terminal.finish_reason
            )
            assert ending is not None
            endings[ending] = endings.get(ending, 0) + 1
        return Summary(
            1,
            self.num_events,
            self.num_steps,
            len(self.records),
            stats.generation_tokens,
            stats.num_preemptions,
            stats.prefix_cache_hits,
            self.transport.num_loads,
            stats.num_out_of_memory,
            self.num_poisoned,
            self.num_cut_prompts,
            endings,
        )

    def _play(self) -> None:
        if self.fair:
            self._flood()
        else:
            while self.num_events < MIN_EVENTS:
                self._act()
                self._step()
        first = self.num_steps
        while self.core.has_work:
            if self.num_steps - first > MAX_DRAIN_STEPS:
                raise Violation(f"after {MAX_DRAIN_STEPS} steps, {sorted(self.live)} have not ended")
            self._step()
        self._check_end()

    def _act(self) -> None:
        rng = self.rng
        if self.live and rng.random() < 0.01:
            self._duplicate(rng.choice(list(self.live)))
        if rng.random() < self.p_arrive:
            for _ in range(rng.choice((1, 1, 2, 3, 8))):
                self._arrive()
        if self.live and rng.random() < self.p_abort:
            self._abort(rng.choice(list(self.live)))
        self._mishap()
        if rng.random() < 0.02:
            self._jump(10 ** rng.uniform(-1, 1))
        if self.p_operator and rng.random() < self.p_operator:
            self._operate()

    def _mishap(self) -> None:
        mishaps = self.mishaps
        scored = [name for name, record in self.live.items() if record.scores and not record.tokens]
        if scored and mishaps.random() < 0.1:
            self.num_cut_prompts += 1
            self._abort(mishaps.choice(scored))
        if mishaps.random() < (self.p_shortage if self.room == inf else 0.05):
            self.room = mishaps.choice((1, 2, 3, 4, 8, 16)) if self.room == inf else inf
            self._happened(f"a step may need {self.room} of the device's memory")
            for record in self.live.values():
                record.room = min(record.room, self.room)

    def _arrive(self) -> None:
        rng, asking = self.rng, self.asking
        tenant = rng.choice(self.tenants)
        prompt = rng.choice(self.starts) + tuple(rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 12)))
        request = EngineRequest(
            f"r{len(self.records)}",
            tenant,
            prompt,
            SamplingParams(
                max_tokens=rng.randint(1, self.max_new) if asking.random() < 0.95 else 0,
                logprobs=asking.choice((0, 3)) if asking.random() < 0.2 else None,
                prompt_logprobs=asking.choice((0, 2)) if asking.random() < 0.2 else None,
                stop_token_ids=(5,) if rng.random() < 0.2 else (),
                min_tokens=rng.choice((0, 0, 3)),
                ignore_eos=rng.random() < 0.3,
            ),
            rng.choice(self.adapters[tenant]),
            weight=self.weights[tenant],
            priority=rng.choice((0, 0, 0, 1)),
            deadline=10 ** rng.uniform(-1, 1) if rng.random() < self.p_deadline else None,
        )
        self._add(request)

    def _add(self, request: EngineRequest) -> None:
        crowded = len(self.live) >= self.config.max_waiting
        for other in self.live.values():
            other.crowded |= crowded
        record = _Record(request, self.now, crowded, room=self.room)
        self.records[request.request_id] = self.live[request.request_id] = record
        self._happened(f"{request.request_id} arrives")
        self.core.add(request)

    def _abort(self, request_id: str) -> None:
        self._happened(f"{request_id} is aborted")
        self.live[request_id].aborted = True
        self.core.abort(request_id)
        self.core.abort("nobody")

    def _duplicate(self, request_id: str) -> None:
        self._happened(f"{request_id} is sent twice")
        self.core.add(self.live[request_id].request)
        self.core.check_integrity()

    def _operate(self) -> None:
        refs = [ref for refs in self.adapters.values() for ref in refs if ref is not None]
        if not refs:
            return
        ref = self.rng.choice(refs)
        self._happened(f"the operator touches {ref.digest[:6]}")
        match self.rng.randrange(3):
            case 0:
                self.core.drop(ref.digest)
            case 1:
                self.core.prefetch(ref)
            case 2:
                self.operated = True  # a pin may leave no room for others
                try:
                    self.core.pin(ref)
                except Exception:
                    for other in refs:
                        self.core.unpin(other.digest)

    def _jump(self, seconds: float) -> None:
        self._happened(f"{seconds:.2f} s pass")
        self.now += seconds

    def _step(self) -> None:
        self.now += 0.005 + 0.05 * self.rng.random()
        for _ in range(self.transport.settle()):
            self._happened("a load or a copy ends")
        started = self.now
        self.num_steps += 1
        before = self._backlog() if self.fair else None
        for event in self.core.step():
            self._take(event)
        self._check_step(started)
        if before is not None:
            self._check_fairness(before)
        self._wait_if_idle()

    def _wait_if_idle(self) -> None:
        """If the core says that only time or a load can help, let time pass until then."""
        idle_s = self.core.idle_s()
        if idle_s == 0.0 or not self.core.has_work:
            return
        times = [] if idle_s is None else [self.now + idle_s]
        if self.transport.next_due is not None:
            times.append(self.transport.next_due)
        if not times:
            raise Violation(f"{sorted(self.live)} wait for something that will never come")
        self.now = max(self.now, min(times))

    # The oracles.

    def _take(self, event: TokenEvent) -> None:
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
        if self.fair:
            self.served[record.request.tenant_id] += 2 * len(event.token_ids)
        if event.finish_reason is None:
            _expect(bool(event.token_ids or event.scores), event, "an event that says nothing")
            return
        record.terminal = event
        del self.live[event.request_id]
        self._check_ending(record, event)

    def _check_ending(self, record: _Record, event: TokenEvent) -> None:
        request, usage, timing = record.request, event.usage, event.timing
        expected, reason = self._expected(request)
        if event.finish_reason in ("stop", "length"):
            _expect(record.tokens == expected, event, f"tokens {record.tokens} instead of {expected}")
            _expect(event.finish_reason == reason, event, f"it should have ended by {reason}")
            stop = expected[-1] if reason == "stop" else None
            _expect(event.stop_token_id == stop, event, f"stopped by {stop}")
            _expect(not record.aborted, event, "it was aborted before")
            _expect(_scores(record) == self._expected_scores(record), event, "wrong log probabilities")
        else:
            _expect(record.tokens == expected[: len(record.tokens)], event, "wrong tokens before its end")
            _expect(_begins(_scores(record), self._expected_scores(record)), event, "wrong log probabilities")
            complete = bool(expected) and len(record.tokens) == len(expected)
            _expect(not complete, event, "it was complete")
        if event.finish_reason == "abort":
            _expect(record.aborted, event, "nobody aborted it")
        if event.error is not None:
            _expect(self._has_cause(record, event.error), event, "no cause for this error")
        began = bool(record.tokens) or (timing is not None and timing.queue_s < timing.total_s)
        counts = {len(request.prompt_ids)} if began else {0, len(request.prompt_ids)}
        _expect(usage is not None and usage.prompt_tokens in counts, event, "prompt tokens")
        _expect(
            usage is not None and usage.completion_tokens == len(record.tokens), event, "completion tokens"
        )
        assert usage is not None
        cached = usage.cached_tokens
        _expect(cached % BLOCK_SIZE == 0 and 0 <= cached < len(request.prompt_ids), event, "cached tokens")
        assert timing is not None
        _expect((timing.first_token_s is not None) == bool(record.tokens), event, "time of the first token")
        _expect(
            0 <= timing.queue_s <= (timing.first_token_s or timing.total_s) <= timing.total_s, event, "times"
        )

    def _expected(self, request: EngineRequest) -> tuple[list[int], str]:
        sampling = request.sampling
        digest = None if request.adapter is None else request.adapter.digest
        if sampling.max_tokens == 0:
            return [], "length"
        tokens = reference(digest, request.prompt_ids, sampling.max_tokens, VOCAB_SIZE)
        for index, token in enumerate(tokens[sampling.min_tokens :], sampling.min_tokens):
            if token in sampling.stop_token_ids or (token in EOS_IDS and not sampling.ignore_eos):
                return tokens[: index + 1], "stop"
        return tokens, "length"

    def _expected_scores(self, record: _Record) -> Scores:
        request = record.request
        digest = None if request.adapter is None else request.adapter.digest
        return reference_scores(digest, request.prompt_ids, tuple(record.tokens), request.sampling)

    def _has_cause(self, record: _Record, error: EngineError) -> bool:
        request = record.request
        total = len(request.prompt_ids) + request.sampling.max_tokens
        match error.code:
            case "internal_error":
                return request.request_id in self.runner.faulted
            case "adapter_not_finite":
                return request.request_id in self.runner.faulted and request.adapter is not None
            case "deadline_exceeded":
                return request.deadline is not None and self.now >= record.arrival + request.deadline
            case "adapter_unavailable":
                digest = request.adapter.digest if request.adapter is not None else None
                # A copy past its time keeps its pages; others may not fit beside them, or may not have for a while.
                crowded = bool(self.suspects) and error.message.startswith("it does not fit")
                return digest in self.suspects or self.operated or crowded
            case "server_overloaded" if _too_large(error):
                # What fits alone, token by token, is never lost.
                return _needs(1, total) > record.room
            case "server_overloaded":
                return record.crowded and not record.tokens
            case "context_length_exceeded":
                computed = len(request.prompt_ids) + max(0, request.sampling.max_tokens - 1)
                return total > self.config.max_model_len or computed > self.config.num_blocks * BLOCK_SIZE
        return False

    def _check_step(self, started: float) -> None:
        self.core.check_integrity()
        if self.runner.complaints:
            raise Violation("; ".join(self.runner.complaints))
        for request_id, record in self.live.items():
            deadline = record.request.deadline
            if record.aborted:
                raise Violation(f"{request_id} was aborted and goes on")
            if deadline is not None and record.arrival + deadline <= started:
                raise Violation(f"{request_id} goes on past its deadline")

    def _check_end(self) -> None:
        stats = self.core.stats()
        if self.live:
            raise Violation(f"the core has nothing to do, but {sorted(self.live)} never ended")
        if stats.num_kv_blocks_used or stats.num_leases or stats.num_running or stats.num_waiting:
            raise Violation(f"at the end, something is still held: {stats}")
        if self.runner.num_in_flight:
            raise Violation("a step was never collected")

    # Fairness.

    def _flood(self) -> None:
        """Every tenant has more waiting than can be served for a long time; new tenants come in between."""
        rng = self.rng
        self.served = dict.fromkeys(self.tenants, 0.0)
        self.charged: dict[str, int] = {}
        self.pairs: dict[tuple[str, str], _Pair] = {}
        self.max_prompt, self.max_new = rng.choice((20, 50)), rng.choice((3, 10))
        tenants = self.tenants = [f"t{index}" for index in range(rng.randint(2, 4))]
        self.weights = {tenant: float(rng.choice((1, 1, 2, 4))) for tenant in tenants}
        self.served = dict.fromkeys(tenants, 0.0)
        self.runner.keep_plans = True
        for tenant in rng.sample(tenants, len(tenants)):
            longest = rng.randint(1, self.max_prompt)
            for _ in range(MIN_EVENTS // len(tenants) + 1):
                prompt = tuple(rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, longest)))
                sampling = SamplingParams(max_tokens=rng.randint(1, self.max_new), ignore_eos=True)
                request_id = f"{tenant}-{len(self.records)}"
                self._add(EngineRequest(request_id, tenant, prompt, sampling, weight=self.weights[tenant]))
            for _ in range(rng.randint(0, 20)):
                self._step()

    def _backlog(self) -> set[str]:
        """Tenants with a request that was never scheduled."""
        return {r.request.tenant_id for id_, r in self.live.items() if id_ not in self.charged}

    def _check_fairness(self, before: set[str]) -> None:
        for plan in self.runner.plans:
            for row in plan.scheduled:
                seq = row.seq
                done = self.charged.get(seq.request_id, 0)
                end = min(row.start + row.num_tokens, seq.num_prompt)
                self.served[seq.request.tenant_id] += max(0, end - done)
                self.charged[seq.request_id] = max(done, end)
        self.runner.plans.clear()
        waiting = sorted(before & self._backlog())
        # What the tenant with the least counter can still be charged for when another's turn comes: one prompt, and
        # all that its running sequences will decode.
        largest = self.max_prompt + 2 * self.config.max_num_seqs * self.max_new
        pairs: dict[tuple[str, str], _Pair] = {}
        for index, one in enumerate(waiting):
            for other in waiting[:index]:
                drift = self.served[one] / self.weights[one] - self.served[other] / self.weights[other]
                pair = self.pairs.get((one, other)) or _Pair()
                pair.low = drift if pair.low is None else min(pair.low, drift)
                pair.high = (
                    drift if pair.low == drift and (one, other) not in self.pairs else max(pair.high, drift)
                )
                pairs[one, other] = pair
                if pair.high - pair.low > 2 * largest:
                    raise Violation(
                        f"{one} and {other} drifted apart by {pair.high - pair.low:.0f} units of service, over "
                        f"{2 * largest}, while both were waiting"
                    )
        self.pairs = pairs


def _too_large(error: EngineError | None) -> bool:
    return error is not None and error.message.startswith("the device has too little memory")


def _needs(num_tokens: int, position: int) -> int:
    """Device memory that a slice up to this position needs, beside the KV."""
    return num_tokens + position // BLOCK_SIZE


def _scores(record: _Record) -> Scores:
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


def play(seed: int, *, fair: bool | None = None) -> Summary:
    """One history. Raises Violation."""
    log = logging.getLogger("loraplex.engine.core")
    level = log.level
    log.setLevel(logging.CRITICAL)  # steps fail by the thousand here, each with a traceback
    try:
        return History(seed, fair=fair).play()
    finally:
        log.setLevel(level)


def play_many(seeds: range) -> Summary:
    total = Summary()
    for seed in seeds:
        total.add(play(seed))
    return total
