"""The engine's heart: requests in, steps of the runner, token events out.

`EngineCore` belongs to one thread, the step thread, and has no torch in it. It keeps three promises:
every request ends in exactly one terminal event; what a request held (blocks, leases, its place in the queue) comes
back in the same step in which it ends; and nothing that one request or one step does wrong reaches another request.
"""

from __future__ import annotations

import heapq
import logging
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

from loraplex.adapters.cache import AdapterCache
from loraplex.adapters.ref import AdapterRef
from loraplex.engine.admission import MAX_TOKEN_ID, why_not
from loraplex.engine.config import SchedulerConfig
from loraplex.engine.fairness import WaitingQueue
from loraplex.engine.faults import DeviceLost, DeviceOutOfMemory
from loraplex.engine.gauges import cache_entries, gauges
from loraplex.engine.logprobs import Scores, cut_scores, wrong_scores
from loraplex.engine.progress import Progress
from loraplex.engine.protocol import CacheEntry, EngineStats
from loraplex.engine.scheduler import Scheduler
from loraplex.engine.step_size import StepSize
from loraplex.engine.steps import Flight, Runner
from loraplex.engine.types import (
    AdapterState,
    EngineError,
    EngineRequest,
    ErrorCode,
    FinishReason,
    ScheduledSequence,
    Sequence,
    SequenceState,
    StepPlan,
    Timing,
    TokenEvent,
    Usage,
)

_log = logging.getLogger(__name__)


class EngineCore:
    """One engine: a scheduler, a runner and a cache of adapters.

    `eos_ids` end a sequence unless it ignores them. `clock` gives seconds; all deadlines are by it. `progress` is told
    of every step, and `queue` says who is served next (None: weighted fair queueing by tenant). A request that can't
    be served is never an exception: `add` leaves its refusal for the next `step` to return.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        runner: Runner,
        cache: AdapterCache[Any],
        *,
        eos_ids: frozenset[int],
        clock: Callable[[], float],
        progress: Progress | None = None,
        queue: WaitingQueue | None = None,
    ) -> None:
        self._config = config
        self._runner = runner
        self._cache = cache
        self._eos_ids = eos_ids
        self._clock = clock
        self._progress = progress or Progress(clock)
        self._scheduler = Scheduler(config, cache, queue=queue)
        self._step_size = StepSize(config.max_num_batched_tokens)
        self._live: dict[str, Sequence] = {}
        self._in_flight: deque[Flight] = deque()
        self._deadlines: list[tuple[float, int, Sequence]] = []
        self._events: list[TokenEvent] = []
        self._num_added = 0
        self._num_steps = 0
        self._at_rest = False  # the last step did nothing, and found that nothing had happened
        self._moves = 0
        self._prompt_tokens = 0
        self._generation_tokens = 0

    def step(self) -> list[TokenEvent]:
        """One turn: notice finished loads and passed deadlines, plan, submit, collect. With lookahead 1 the step
        that is collected is the one before, so that the device works while the host plans. Raises DeviceLost: then
        the engine is of no use any more."""
        now = self._clock()
        self._cache.poll()
        self._expire(now)
        moving = self._step_size.pause_s(now) <= 0 and self._move(now)
        events, self._events = self._events, []
        self._at_rest = self._cache_is_still() and not (moving or events)
        return events

    def _move(self, now: float) -> bool:
        """Plan, submit, collect. False if there was nothing to do."""
        plan = self._scheduler.plan(now, self._step_size.limit)
        self._fail_unavailable()
        moving = bool(plan.scheduled or plan.loads or self._in_flight)
        submitted = bool(plan.scheduled) and self._submit(plan)
        if self._in_flight and (len(self._in_flight) > self._config.lookahead or not submitted):
            self._collect()
        return moving

    def _cache_is_still(self) -> bool:
        """No load and no copy has ended since this was last asked. If one has, another pass may do what the last
        could not: the cache keeps what has just arrived from being evicted for one pass."""
        usage = self._cache.usage()
        moves, self._moves = self._moves, usage.loads + usage.copies + usage.load_failures
        return moves == self._moves

    # Requests.

    def add(self, request: EngineRequest) -> None:
        """Take a request in, or refuse it by a terminal event of the next `step`. Never raises for bad input."""
        now = self._clock()
        if request.request_id in self._live:
            error = EngineError("internal_error", f"request id {request.request_id} is in flight already")
            self._refuse(request, error, duplicate=True)
            return
        refusal = why_not(request, self._config, self._scheduler.num_waiting)
        if refusal is not None and refusal.code == "server_overloaded" and self._shed_for(request.tenant_id):
            refusal = None
        if refusal is not None:
            self._refuse(request, refusal)
            return
        self._num_added += 1
        seq = Sequence(request, now, self._num_added, list(request.prompt_ids))
        if request.adapter is not None:
            seq.adapter_state = self._cache.state(request.adapter.digest)
        if request.deadline is not None:
            seq.deadline_at = now + request.deadline
            heapq.heappush(self._deadlines, (seq.deadline_at, seq.order, seq))
        self._live[request.request_id] = seq
        self._scheduler.add(seq)

    def abort(self, request_id: str) -> None:
        """End a request with finish_reason "abort"; it holds nothing any more when this returns. An id that is
        not in flight is ignored."""
        seq = self._live.get(request_id)
        if seq is not None:
            self._end(seq, "abort")

    def set_weight(self, tenant_id: str, weight: float) -> None:
        """A tenant's share (above 0) is another from now on. Ignored for one without a request here: its next one
        brings it."""
        self._scheduler.queue.set_weight(tenant_id, weight)

    def _shed_for(self, tenant_id: str) -> bool:
        """In a full queue, end the newest request that waits of the tenant that has most, if that one has at least
        two more than `tenant_id`: nobody can fill the queue against the others. False if there is none."""
        held = {tenant: requests for tenant, requests, _ in self._scheduler.queue.tenants()}
        waiting = [s for s in self._live.values() if s.first_scheduled is None]
        victim = max(waiting, key=lambda s: (held[s.request.tenant_id], s.order), default=None)
        if victim is None or held[victim.request.tenant_id] < held.get(tenant_id, 0) + 2:
            return False
        self._error(
            victim,
            "server_overloaded",
            f"{self._config.max_waiting} requests are waiting, and most of them are yours; try again later",
        )
        return True

    def _refuse(self, request: EngineRequest, error: EngineError, *, duplicate: bool = False) -> None:
        self._events.append(
            TokenEvent(
                request.request_id,
                finish_reason="error",
                error=error,
                usage=Usage(0, 0),
                timing=Timing(0.0, None, 0.0),
                adapter_state=None if request.adapter is None else self._cache.state(request.adapter.digest),
                duplicate=duplicate,
            )
        )

    def _expire(self, now: float) -> None:
        while self._deadlines and self._deadlines[0][0] <= now:
            _, _, seq = heapq.heappop(self._deadlines)
            if seq.state is not SequenceState.FINISHED:
                self._error(seq, "deadline_exceeded", f"not finished within {seq.request.deadline:g} s")
        if len(self._deadlines) > 2 * len(self._live) + 64:
            # Requests with long deadlines end long before them: don't keep every one of them until then.
            self._deadlines = [d for d in self._deadlines if d[2].state is not SequenceState.FINISHED]
            heapq.heapify(self._deadlines)

    def _fail_unavailable(self) -> None:
        failed, self._scheduler.failed = self._scheduler.failed, []
        for seq, message in failed:
            self._error(seq, "adapter_unavailable", message)

    # Steps.

    def _submit(self, plan: StepPlan) -> bool:
        adapters = {s.seq.request.adapter.digest for s in plan.scheduled if s.seq.request.adapter is not None}
        leases = [self._cache.acquire(digest) for digest in sorted(adapters)]
        self._num_steps += 1
        try:
            handle = self._runner.submit(plan)
        except DeviceLost:
            raise
        except DeviceOutOfMemory as error:
            while self._in_flight:  # they went before
                self._collect()
            self._start_over(Flight(plan, None, leases), error)
            return False
        except Exception as error:
            self._fail_step(Flight(plan, None, leases), error)
            return False
        self._in_flight.append(Flight(plan, handle, leases))
        self._progress.begin(plan.num_tokens)
        return True

    def _collect(self) -> None:
        flight = self._in_flight.popleft()
        error = self._take_step(flight, frozenset())
        if error is not None:
            self._start_over(flight, error)

    def _take_step(self, flight: Flight, void: Collection[Sequence]) -> DeviceOutOfMemory | None:
        """Wait for a step, and take what it brings but for the `void` sequences: a step before this one has not
        computed what it builds on. Returns what was raised if it did not fit into memory; its leases are kept then."""
        try:
            result = self._runner.collect(flight.handle)
            if result.step_id != flight.plan.step_id or len(result.token_ids) != len(flight.plan.scheduled):
                raise RuntimeError(f"the answer to step {flight.plan.step_id} is one to another step")
        except DeviceLost:
            raise
        except DeviceOutOfMemory as error:
            self._progress.end(computed=False)
            return error
        except Exception as error:
            self._progress.end(computed=False)
            self._fail_step(flight, error, void)
            return None
        self._progress.end(computed=True)
        self._step_size.computed()
        now = self._clock()
        for index, (scheduled, token_ids) in enumerate(
            zip(flight.plan.scheduled, result.token_ids, strict=True)
        ):
            if scheduled.seq not in void:
                scores = result.scores.get(index)
                if index in result.not_finite and scheduled.seq.request.adapter is not None:
                    self._blame_adapter(scheduled.seq)
                else:
                    self._take_row(scheduled, token_ids, scores, result.failed.get(index), now)
        self._land(flight)
        return None

    def _start_over(self, flight: Flight, error: DeviceOutOfMemory) -> None:
        """A step did not fit into the device's memory. What it was to compute is computed anew in smaller steps, for
        which the scheduler preempts those that are too many: no token is lost, and none changes. A request that does
        not fit even alone and token by token ends."""
        rows, void = list(flight.plan.scheduled), set(flight.sequences)
        self._land(flight)
        while self._in_flight:
            later = self._in_flight.popleft()
            fits = self._take_step(later, void) is None
            rows += [row for row in later.plan.scheduled if not fits or row.seq in void]
            if not fits:
                void.update(later.sequences)
                self._land(later)
        self._scheduler.roll_back(rows)
        goes_on = self._step_size.ran_out(flight.plan, self._clock())
        limit = self._step_size.limit
        _log.warning(
            "a step of %d tokens: %s; steps are of %d at most now", flight.plan.num_tokens, error, limit
        )
        if not goes_on:
            for row in flight.plan.scheduled:
                if row.seq.state is not SequenceState.FINISHED:
                    self._error(
                        row.seq, "server_overloaded", "the device has too little memory for this request now"
                    )

    def _fail_step(self, flight: Flight, error: Exception, void: Collection[Sequence] = ()) -> None:
        """Every request of a step that raised ends here. Nothing of the step was registered, so what it may have
        left in the blocks can't be found; later steps overwrite it before they read."""
        _log.error("step %d failed", flight.plan.step_id, exc_info=error)
        for scheduled in flight.plan.scheduled:
            if scheduled.seq.state is not SequenceState.FINISHED and scheduled.seq not in void:
                self._error(scheduled.seq, "internal_error", "the step that computed this request failed")
        self._land(flight)

    def _land(self, flight: Flight) -> None:
        for lease in flight.leases:
            self._cache.release(lease)

    def _blame_adapter(self, seq: Sequence) -> None:
        """The base alone gives finite numbers for whatever prompt; a row that has none has them from its adapter."""
        adapter = seq.request.adapter
        if seq.state is SequenceState.FINISHED or adapter is None:
            return
        message = (
            f"adapter {adapter.name}@v{adapter.version} gives numbers for this prompt that are infinite, or none, "
            "in the precision that the model is served in; its weights are too large"
        )
        _log.warning("request %s: %s", seq.request_id, message)
        self._error(seq, "adapter_not_finite", message, spoilt=True)

    def _take_row(
        self,
        scheduled: ScheduledSequence,
        token_ids: tuple[int, ...],
        scores: Scores | None,
        failure: str | None,
        now: float,
    ) -> None:
        """One slice's outcome. A sequence that ended meanwhile (aborted, or at an eos that the step before drew)
        does not want it any more."""
        seq = scheduled.seq
        if seq.state is SequenceState.FINISHED:
            return
        if failure is None and bool(token_ids) != scheduled.samples:
            failure = f"{len(token_ids)} tokens came for a slice that draws {'some' if scheduled.samples else 'none'}"
        if failure is None and token_ids and not 0 <= min(token_ids) <= max(token_ids) <= MAX_TOKEN_ID:
            failure = "a token was drawn that is not in any vocabulary"
        if failure is None:
            asked = seq.request.sampling.logprobs is not None
            failure = wrong_scores(scores, len(token_ids) if asked else 0, len(scheduled.targets))
        if failure is not None:
            _log.error("request %s failed in step: %s", seq.request_id, failure)
            self._error(seq, "internal_error", "computing this request failed", spoilt=True)
            return
        self._scheduler.computed(scheduled)
        seq.num_scored += len(scheduled.targets)
        if token_ids:
            # A longer answer to the step before may have brought the first of these already.
            known = seq.num_outputs - scheduled.output_index
            self._take_tokens(seq, token_ids[known:], cut_scores(scores, known, len(token_ids)), now)
        elif (
            seq.request.sampling.max_tokens == 0 and scheduled.start + scheduled.num_tokens == seq.num_prompt
        ):
            self._prompt_tokens += seq.num_prompt
            self._end(seq, "length", scores=scores)
        elif scores is not None:
            self._events.append(
                TokenEvent(seq.request_id, adapter_state=self._tell_state(seq), scores=scores)
            )

    def _take_tokens(
        self, seq: Sequence, token_ids: tuple[int, ...], scores: Scores | None, now: float
    ) -> None:
        """Append drawn tokens up to the one that ends the sequence, and tell of them. What was drawn behind that
        one is dropped. Tokens of an epoch before a preemption are as good as any (see `Scheduler._preempt`)."""
        if not token_ids:
            return
        sampling = seq.request.sampling
        reason: FinishReason | None = None
        stop_token_id: int | None = None
        count = 0
        for token_id in token_ids:
            seq.token_ids.append(token_id)
            count += 1
            stops = token_id in sampling.stop_token_ids or (
                not sampling.ignore_eos and token_id in self._eos_ids
            )
            if stops and seq.num_outputs > sampling.min_tokens:
                reason, stop_token_id = "stop", token_id
                break
            if seq.num_outputs >= sampling.max_tokens:
                reason = "length"
                break
        seq.num_pending = max(0, seq.num_pending - count)
        if seq.first_token is None:
            seq.first_token = now
            self._prompt_tokens += seq.num_prompt
        self._generation_tokens += count
        self._scheduler.delivered(seq, count)
        taken, scores = token_ids[:count], cut_scores(scores, 0, count)
        if reason is None:
            state = self._tell_state(seq)
            self._events.append(TokenEvent(seq.request_id, taken, adapter_state=state, scores=scores))
        else:
            self._end(seq, reason, taken, stop_token_id=stop_token_id, scores=scores)

    # Endings.

    def _error(self, seq: Sequence, code: ErrorCode, message: str, *, spoilt: bool = False) -> None:
        self._end(seq, "error", error=EngineError(code, message), spoilt=spoilt)

    def _end(
        self,
        seq: Sequence,
        reason: FinishReason,
        token_ids: tuple[int, ...] = (),
        *,
        error: EngineError | None = None,
        stop_token_id: int | None = None,
        scores: Scores | None = None,
        spoilt: bool = False,
    ) -> None:
        """The one way out for every request that was taken in. `spoilt`: none of its KV is good for others."""
        del self._live[seq.request_id]
        self._scheduler.finish(seq, spoilt=spoilt)
        now = self._clock()
        self._events.append(
            TokenEvent(
                seq.request_id,
                token_ids,
                finish_reason=reason,
                error=error,
                usage=Usage(
                    0 if seq.first_scheduled is None else seq.num_prompt, seq.num_outputs, seq.num_cached
                ),
                timing=Timing(
                    queue_s=(now if seq.first_scheduled is None else seq.first_scheduled) - seq.arrival,
                    first_token_s=None if seq.first_token is None else seq.first_token - seq.arrival,
                    total_s=now - seq.arrival,
                ),
                adapter_state=self._tell_state(seq),
                stop_token_id=stop_token_id,
                scores=scores,
            )
        )

    def _tell_state(self, seq: Sequence) -> AdapterState | None:
        state, seq.adapter_state = seq.adapter_state, None
        return state

    # What others may know.

    @property
    def has_work(self) -> bool:
        """Some request has not ended, a step is in flight, or events wait to be returned."""
        return bool(self._live or self._in_flight or self._events)

    @property
    def num_waiting_for_adapter(self) -> int:
        return len(self._scheduler.parked)

    def idle_s(self) -> float | None:
        """0 if a step can do something at once; else the seconds until the next deadline or time-out; None if
        there is none, and only a new request, an abort or a finished load can change anything."""
        scheduler, now = self._scheduler, self._clock()
        pause_s = self._step_size.pause_s(now)
        if self._events or self._in_flight:
            return 0.0
        if pause_s <= 0 and (
            scheduler.running or scheduler.num_ready or (scheduler.parked and not self._at_rest)
        ):
            return 0.0
        while self._deadlines and self._deadlines[0][2].state is SequenceState.FINISHED:
            heapq.heappop(self._deadlines)
        times = [self._deadlines[0][0] - now] if self._deadlines else []
        if pause_s > 0 and self._live:
            times.append(pause_s)
        if (timeout := self._cache.next_timeout_s()) is not None:
            times.append(timeout)
        return max(0.0, min(times)) if times else None

    def stats(self) -> EngineStats:
        """Gauges of this moment and counters since the start."""
        return replace(
            gauges(self._scheduler, self._cache, self._live.values()),
            num_steps=self._num_steps,
            num_out_of_memory=self._step_size.num_ran_out,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generation_tokens,
        )

    # The adapter cache belongs to the step thread as well: this is how others reach it.

    def cache_entries(self) -> list[CacheEntry]:
        return cache_entries(self._cache, self._clock())

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
        self._cache.drop(digest)

    def prefetch(self, ref: AdapterRef) -> None:
        self._cache.prefetch(ref)

    def check_integrity(self) -> None:
        """Raise AssertionError unless every request is in exactly one place, and every block, every lease and
        every place in the queue belongs to one that has not ended. For tests: costs O(blocks + requests)."""
        self._scheduler.check_integrity(self._live.values())
        assert len(self._in_flight) <= self._config.lookahead, "a step was left uncollected"
        leases = [lease for lease in self._scheduler.running.values() if lease is not None]
        leases += [lease for flight in self._in_flight for lease in flight.leases]
        held = {id(lease) for lease in leases}
        assert len(held) == len(leases) == self._cache.usage().num_leases, "a lease is lost or held twice"
        self._cache.check_integrity()
