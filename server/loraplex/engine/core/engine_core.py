"""The engine's heart: requests in, steps of the runner, token events out.

`EngineCore` belongs to one thread, the step thread, and has no torch in it. It keeps three promises:
every request ends in exactly one terminal event; what a request held (blocks, leases, its place in the queue) comes
back in the same step in which it ends; and nothing that one request or one step does wrong reaches another request.

Its parts: the scheduler plans steps, `InFlightSteps` carries each step through, `RequestTracker` reports to requests.
This module drives them: `add`, `abort` and `step`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from loraplex.adapters.cache.adapter_cache import AdapterCache
from loraplex.adapters.cache.residency import CacheEntry
from loraplex.adapters.ref import AdapterRef
from loraplex.engine.config import SchedulerConfig
from loraplex.engine.core.admission import check_deadline, check_request, check_room, too_slow
from loraplex.engine.core.handover import PrefixHandover
from loraplex.engine.core.in_flight import InFlightSteps, Runner
from loraplex.engine.core.request_tracker import RequestTracker
from loraplex.engine.core.stats import engine_stats
from loraplex.engine.core.timers import SequenceTimers
from loraplex.engine.core.waits import Waits
from loraplex.engine.heartbeat import StepHeartbeat
from loraplex.engine.kv.disk_tier import DiskTier
from loraplex.engine.kv.handed_blocks import PrefixForm
from loraplex.engine.reports import EngineStats
from loraplex.engine.scheduling.background import MAX_BACKGROUND
from loraplex.engine.scheduling.scheduler import Scheduler
from loraplex.engine.scheduling.speculation import Speculation
from loraplex.engine.scheduling.step_budget import StepBudget
from loraplex.engine.scheduling.timing.copy_lead import CopyLead
from loraplex.engine.scheduling.timing.step_bound import StepBound
from loraplex.engine.tenant_terms import DEFAULT_TERMS, TenantTerms
from loraplex.engine.types import (
    AdapterState,
    EngineError,
    EngineRequest,
    MeasureRequest,
    Namespace,
    Sequence,
    SequenceState,
    TokenEvent,
)

if TYPE_CHECKING:  # an engine without a tokenizer has no grammars
    from loraplex.engine.grammar.matchers import GrammarMatchers

MIN_WEIGHT, MAX_WEIGHT = 1e-6, 1e6
LOOK_AGAIN_S = 0.25
"""How often a waiting request whose patience for its adapter is over is looked at, while the adapter is there."""


class EngineCore:
    """One engine: a scheduler, a runner and a cache of adapters.

    `eos_ids` end a sequence unless it ignores them. `clock` gives seconds; all deadlines are by it. `heartbeat` is
    marked at every step. `grammars` builds matchers: a request waits for its own outside of the queue, and holds nobody
    else back. Without it, requests with a grammar are refused. `speculation` drafts tokens, where there is no
    lookahead. `bound` limits the time of steps. With a `lead`, first steps may begin before their adapter's copy is
    done. `disk` has blocks behind host memory. `prefixes` as of `PrefixHandover`. A request that cannot be served
    raises nothing: `add_request` leaves its refusal for the next `step` to return.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        runner: Runner,
        cache: AdapterCache[Any],
        *,
        eos_ids: frozenset[int],
        clock: Callable[[], float],
        heartbeat: StepHeartbeat | None = None,
        grammars: GrammarMatchers | None = None,
        speculation: Speculation | None = None,
        bound: StepBound | None = None,
        lead: CopyLead | None = None,
        disk: DiskTier | None = None,
        prefixes: PrefixForm | None = None,
    ) -> None:
        self._config = config
        self._grammars = grammars
        self._cache = cache
        self._clock = clock
        assert speculation is None or config.lookahead == 0, "a draft behind a token that is not known"
        self._scheduler = Scheduler(config, cache, speculation, bound, lead, disk)
        self._waits = Waits(grammars, disk, self._scheduler.blocks, bound, config.max_num_batched_tokens)
        self._tracker = RequestTracker(
            self._scheduler, cache, eos_ids=eos_ids, clock=clock, on_end=self._waits.close_request
        )
        self._step_budget = StepBudget(config.max_num_batched_tokens)
        self._in_flight = InFlightSteps(
            runner,
            cache,
            self._scheduler,
            self._tracker,
            self._step_budget,
            heartbeat=heartbeat or StepHeartbeat(clock),
            clock=clock,
        )
        self.handover = PrefixHandover(self._scheduler.blocks, prefixes, self._in_flight.copy)
        self._deadlines = SequenceTimers()
        self._max_loads = SequenceTimers()
        self._with_terms: set[str] = set()  # tenants whose terms are not the default
        self._num_added = 0
        self._at_rest = False  # the last step did nothing, and found that nothing had happened
        self._moves = 0

    def step(self) -> list[TokenEvent]:
        """One iteration: poll loads and deadlines, plan, submit, collect. With lookahead 1 the collected step is the
        previous one, so that the device works while the host plans. Called without work too, so that loads move on;
        then it costs next to nothing. Raises DeviceLost: the engine cannot go on then."""
        now = self._clock()
        self._cache.poll()
        self._end_lost()
        self._end_waits(now)
        self._expire(now)
        moving = self._step_budget.pause_s(now) <= 0 and self._move(now)
        events = self._tracker.take_events()
        self._at_rest = self._cache_is_still() and not (moving or events)
        return events

    def _move(self, now: float) -> bool:
        """Plan, submit, collect. False if there was nothing to do."""
        plan = self._scheduler.plan(now, self._step_budget.limit)
        self._fail_unavailable()
        in_flight = self._in_flight
        has_work = bool(plan.parts or plan.copies)
        moving = bool(has_work or plan.loads or in_flight)
        submitted = has_work and in_flight.submit(plan)
        if in_flight and (len(in_flight) > self._config.lookahead or not submitted):
            in_flight.collect()
        return moving

    def _end_waits(self, now: float) -> None:
        """Release the requests that wait for nothing any more, and end those whose grammars cannot be built."""
        for request_id, error in self._waits.take_ended():
            seq = self._tracker.live[request_id]
            if error is None:
                self._release(seq, now)
            else:
                self._tracker.blame_grammar(seq, error)

    def _release(self, seq: Sequence, now: float) -> None:
        """Let a held request be scheduled, unless the tokens that another engine has delivered are the whole answer, or
        its grammar refuses them."""
        request, ends_grammar = seq.request, False
        if request.generated:
            if request.grammar is not None and self._grammars is not None:
                ends_grammar, error = self._grammars.resume(request.request_id, request.generated)
                if error is not None:
                    self._tracker.blame_grammar(seq, error)
                    return
            if self._tracker.end_if_complete(seq, ends_grammar=ends_grammar):
                return
        self._scheduler.release(seq, now)

    def _cache_is_still(self) -> bool:
        """No load and no copy has ended since the last call. If one has, another pass may succeed where the last did
        not: the cache protects a newly loaded adapter from eviction for one pass."""
        moves, self._moves = self._moves, self._cache.num_moves
        return moves == self._moves

    # Requests.

    def add_request(self, request: EngineRequest) -> None:
        """Accept a request, or refuse it by a terminal event of the next `step`. Never raises for bad input."""
        takes_grammars = self._grammars is not None
        refusal = check_request(request, self._config, takes_grammars=takes_grammars)
        if request.generated:
            request = replace(request, max_load=None)  # as one that was preempted, and has begun
        self._add(request, refusal)

    def measure(self, asked: MeasureRequest) -> None:
        """Measure an adapter's sites, once it is on the device. Refuses and reports as `add_request` does."""
        self._add(asked.queued(), check_deadline(asked.deadline), measures=True)

    def _add(self, request: EngineRequest, refusal: EngineError | None, *, measures: bool = False) -> None:
        """`refusal`: why it can never be served."""
        now = self._clock()
        background = self._scheduler.background
        if request.background and background.num_live(batch=request.batch) >= MAX_BACKGROUND:
            message = f"{MAX_BACKGROUND} background requests are here already"
            refusal = refusal or EngineError("server_overloaded", message, is_own=True)
        if request.request_id in self._tracker.live:
            error = EngineError("internal_error", f"request id {request.request_id} is already in use")
            self._tracker.refuse(request, error, duplicate=True)
            return
        # An answer that was begun goes on: the engines that have died bound the number of those.
        if refusal is None and not request.generated and not request.background:
            refusal = check_room(self._config, self._scheduler.num_waiting)
        may_wait = refusal is None or refusal.code == "server_overloaded"
        # First: no other request may be shed for one that is refused then.
        if may_wait and self._refuse_slow_load(request, now):
            return
        if refusal is not None and refusal.code == "server_overloaded" and not request.background:
            held = {tenant: requests for tenant, requests, _ in self._scheduler.queue.tenants()}
            if self._shed_for(request.tenant_id, held):
                refusal = None
            else:
                refusal = replace(refusal, is_own=request.tenant_id in held)
        if refusal is not None:
            self._tracker.refuse(request, refusal)
            return
        self._num_added += 1
        seq = Sequence(
            request,
            now,
            self._num_added,
            [*request.prompt_ids, *request.generated],
            measured={} if measures else None,
        )
        if request.deadline is not None:
            seq.deadline_at = now + request.deadline
            self._deadlines.add(seq.deadline_at, seq)
        if request.adapter is not None and request.max_load is not None:
            self._max_loads.add(now + request.max_load, seq)
        self._tracker.open(seq)
        waits = self._waits.begin(seq)
        if waits and request.adapter is not None and not request.background:
            self._scheduler.adapters.expected.expect(request.adapter, now)
        self._scheduler.add_sequence(seq, hold=bool(request.generated) or waits)
        if request.generated and not waits:
            self._release(seq, now)

    def abort(self, request_id: str) -> None:
        """End a request with finish_reason "abort"; it holds nothing any more when this returns. An id that is
        not live is ignored."""
        seq = self._tracker.live.get(request_id)
        if seq is not None:
            self._tracker.end(seq, "abort")

    def reset(self) -> None:
        """End all that came from outside, as for another client: requests, pins, tenants' terms and what lives
        elsewhere. Adapters and KV blocks stay in memory."""
        for seq in list(self._tracker.live.values()):
            self._tracker.end(seq, "abort")
        for digest in self._cache.pinned:
            self._cache.unpin(digest)
        for tenant_id in list(self._with_terms):
            self.set_terms(tenant_id, DEFAULT_TERMS)
        self._cache.set_elsewhere(())
        self.handover.reset()

    def end_background(self) -> None:
        """End all background requests with finish_reason "abort": the engine is to stop."""
        for seq in [seq for seq in self._tracker.live.values() if seq.request.background]:
            self._tracker.end(seq, "abort")

    def set_terms(self, tenant_id: str, terms: TenantTerms) -> None:
        """From now on a tenant is served by these, also what it has here already. A weight out of bounds counts as the
        nearest within them."""
        (self._with_terms.discard if terms == DEFAULT_TERMS else self._with_terms.add)(tenant_id)
        weight = min(MAX_WEIGHT, max(MIN_WEIGHT, terms.weight))
        self._scheduler.queue.set_weight(tenant_id, weight)
        if (host := self._scheduler.blocks.host) is not None:
            host.set_weight(tenant_id, weight)
        self._cache.tenants.set_limits(tenant_id, terms.memory)

    def exchange_service(self, elsewhere: Mapping[str, float]) -> dict[str, float]:
        """Count what other engines served these tenants since the last exchange; returns what this one did. In units
        of service, as `Charges` prices it."""
        return self._scheduler.queue.exchange_service(elsewhere, self._clock())

    def _shed_for(self, tenant_id: str, held: Mapping[str, int]) -> bool:
        """In a full queue, where tenants hold `held`, end the newest waiting request of the tenant that has most, if
        that one has at least two more than `tenant_id`: no tenant can fill the queue against the others. False if there
        is none."""
        waiting = [
            s
            for s in self._tracker.live.values()
            if s.state is SequenceState.WAITING
            and s.first_scheduled is None
            and not (s.is_resumed or s.request.background)
        ]
        victim = max(waiting, key=lambda s: (held[s.request.tenant_id], s.order), default=None)
        if victim is None or held[victim.request.tenant_id] < held.get(tenant_id, 0) + 2:
            return False
        message = (
            f"{self._config.max_waiting} requests are waiting, and most of them are yours; try again later"
        )
        error = EngineError("server_overloaded", message, is_own=True)
        self._tracker.end(victim, "error", error=error)
        return True

    def _expire(self, now: float) -> None:
        num_live = len(self._tracker.live)
        for seq in self._deadlines.take_due(now, num_live):
            self._tracker.error(seq, "deadline_exceeded", f"not finished within {seq.request.deadline:g} s")
        for seq in self._max_loads.take_due(now, num_live):
            ref = seq.request.adapter
            if ref is None or seq.first_scheduled is not None:
                continue
            if self._cache.state(ref.digest) == "hot":
                self._max_loads.add(now + LOOK_AGAIN_S, seq)  # it may be evicted before the request runs
            else:
                error = too_slow(seq.request, self._scheduler.adapters.seconds_to_device(ref))
                self._tracker.end(seq, "error", error=error)
                self._scheduler.adapters.expected.expect(ref, now)

    def _refuse_slow_load(self, request: EngineRequest, now: float) -> bool:
        """Whether the request is refused because its adapter cannot be on the device in time. It is loaded then."""
        ref = request.adapter
        if ref is None or request.max_load is None or self._cache.state(ref.digest) == "hot":
            return False
        seconds = self._scheduler.adapters.seconds_to_device(ref)
        if 0 < request.max_load >= seconds:
            return False
        self._tracker.refuse(request, too_slow(request, seconds))
        self._scheduler.adapters.expected.expect(ref, now)
        return True

    def _fail_unavailable(self) -> None:
        failed, self._scheduler.failed = self._scheduler.failed, []
        for seq, message in failed:
            self._tracker.error(seq, "adapter_unavailable", message)

    def _end_lost(self) -> None:
        """End the running requests of adapters whose copy has failed behind their first step."""
        lost = self._cache.take_lost()
        for seq in list(self._scheduler.running) if lost else ():
            ref = seq.request.adapter
            if ref is not None and ref.digest in lost:
                self._tracker.error(seq, "adapter_unavailable", lost[ref.digest], spoilt=True)

    # What others may know.

    @property
    def has_work(self) -> bool:
        """Some request has not ended, a step is in flight, or events wait to be returned."""
        return bool(self._tracker.live or self._in_flight or self._tracker.has_events)

    @property
    def num_waiting_for_adapter(self) -> int:
        return self._scheduler.num_waiting_for_adapter

    def idle_s(self) -> float | None:
        """0 if a step can do something at once; else the seconds until the next deadline or time-out; None if
        there is none, and only a new request, an abort or a finished load can change anything."""
        scheduler, now = self._scheduler, self._clock()
        pause_s = self._step_budget.pause_s(now)
        if self._tracker.has_events or self._in_flight:
            return 0.0
        if pause_s <= 0 and (
            scheduler.running
            or scheduler.queue.num_ready
            or (scheduler.is_waiting_for_adapters and not self._at_rest)
            or (not len(scheduler.queue) and scheduler.background.has_ready(batch=False))
        ):
            return 0.0
        due = (self._deadlines.next_at(), self._max_loads.next_at())
        times = [at - now for at in due if at is not None]
        if pause_s > 0 and self._tracker.live:
            times.append(pause_s)
        if (timeout := self._cache.next_timeout_s()) is not None:
            times.append(timeout)
        if (wait := scheduler.batch_lines.wait_s(now)) is not None:
            times.append(wait)
        if (timeout := self._waits.next_timeout_s()) is not None:
            times.append(timeout)
        return max(0.0, min(times)) if times else None

    def stats(self) -> EngineStats:
        """Gauges of this moment and counters since the start."""
        return replace(
            engine_stats(self._scheduler, self._cache, self._tracker.live.values(), self._config.lacks_disk),
            num_waiting_for_grammar=self._waits.num_for_grammars(self._scheduler.held),
            num_steps=self._in_flight.num_steps,
            steps_by_tokens=self._in_flight.step_tokens.steps,
            num_step_tokens=self._in_flight.step_tokens.total,
            experts=self._in_flight.experts.stats,
            num_out_of_memory=self._step_budget.num_ran_out,
            prompt_tokens=self._tracker.prompt_tokens,
            generation_tokens=self._tracker.generation_tokens,
            num_adapter_waits=self._tracker.num_adapter_waits,
            adapter_wait_s=self._tracker.adapter_wait_s,
        )

    def expert_rows(self) -> dict[int, tuple[int, ...]]:
        """The rows that routers have sent to each expert since the start, by layer."""
        return self._in_flight.experts.rows()

    # The adapter cache belongs to the step thread as well: this is how others reach it.

    def cache_entries(self, digests: Collection[str] | None = None) -> tuple[CacheEntry, ...]:
        """All adapters in memory, or those of `digests`: their `leases` count requests that wait or were preempted
        too."""
        entries = self._cache.entries(digests)
        if digests is None:
            return entries
        adapters = (seq.request.adapter for seq in self._tracker.live.values())
        live = Counter(adapter.digest for adapter in adapters if adapter is not None)
        return tuple(replace(entry, leases=max(entry.leases, live[entry.ref.digest])) for entry in entries)

    def residency(self) -> dict[str, AdapterState]:
        """The versions on the device or in host memory."""
        return self._cache.residency()

    def take_damaged(self) -> tuple[str, ...]:
        """The versions whose stored bytes loads have found damaged or lost since this was last called."""
        return self._cache.take_damaged()

    def pin(self, ref: AdapterRef) -> None:
        """Raises PinRefused where it can never fit."""
        self._cache.pin(ref)

    def unpin(self, digest: str) -> None:
        self._cache.unpin(digest)

    def drop(self, digest: str) -> None:
        self._scheduler.adapters.expected.remove(digest)
        if self._scheduler.speculation is not None:
            self._scheduler.speculation.forget(digest, self._tracker.live.values())
        adapters = (seq.request.adapter for seq in self._tracker.live.values())
        is_used = any(adapter is not None and adapter.digest == digest for adapter in adapters)
        self._scheduler.blocks.erase(digest, is_used=is_used)
        self._cache.drop(digest)

    def forget_tenant(self, tenant_id: str) -> None:
        self._scheduler.blocks.erase_tenant(tenant_id)

    def prefix_owners(self) -> set[Namespace]:
        """Whose prefixes are kept behind the pool, in host memory and on the disk."""
        return self._scheduler.blocks.owners()

    def set_elsewhere(self, digests: Collection[str]) -> None:
        self._cache.set_elsewhere(digests)

    def prefetch(self, ref: AdapterRef) -> None:
        self._cache.prefetch(ref)

    def warm(self, refs: Iterable[AdapterRef]) -> None:
        self._cache.warm(refs)

    @property
    def is_warming(self) -> bool:
        """Whether adapters are still to be loaded by recorded demand."""
        return self._cache.is_warming
