"""The engine's heart: requests in, steps of the runner, token events out.

`EngineCore` belongs to one thread, the step thread, and has no torch in it. It keeps three promises:
every request ends in exactly one terminal event; what a request held (blocks, leases, its place in the queue) comes
back in the same step in which it ends; and nothing that one request or one step does wrong reaches another request.

Its parts: the `scheduler` says what is computed next, `steps` sees each step through, `answers` has the requests and
what they are told. Here is what drives them: `add`, `abort` and `step`.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from loraplex.adapters.cache import AdapterCache
from loraplex.adapters.ref import AdapterRef
from loraplex.engine.admission import why_not
from loraplex.engine.answers import Answers
from loraplex.engine.config import SchedulerConfig
from loraplex.engine.gauges import cache_entries, gauges
from loraplex.engine.progress import Progress
from loraplex.engine.protocol import CacheEntry, EngineStats
from loraplex.engine.scheduler import Scheduler
from loraplex.engine.step_size import StepSize
from loraplex.engine.steps import Flights, Runner
from loraplex.engine.types import (
    AdapterState,
    EngineError,
    EngineRequest,
    Sequence,
    SequenceState,
    TokenEvent,
)


class EngineCore:
    """One engine: a scheduler, a runner and a cache of adapters.

    `eos_ids` end a sequence unless it ignores them. `clock` gives seconds; all deadlines are by it. `progress` is told
    of every step. A request that can't be served is never an exception: `add` leaves its refusal for the next `step` to
    return.
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
    ) -> None:
        self._config = config
        self._cache = cache
        self._clock = clock
        self._scheduler = Scheduler(config, cache)
        self._answers = Answers(self._scheduler, cache, eos_ids=eos_ids, clock=clock)
        self._step_size = StepSize(config.max_num_batched_tokens)
        self._flights = Flights(
            runner,
            cache,
            self._scheduler,
            self._answers,
            self._step_size,
            progress=progress or Progress(clock),
            clock=clock,
        )
        self._deadlines: list[tuple[float, int, Sequence]] = []
        self._num_added = 0
        self._at_rest = False  # the last step did nothing, and found that nothing had happened
        self._moves = 0

    def step(self) -> list[TokenEvent]:
        """One turn: notice finished loads and passed deadlines, plan, submit, collect. With lookahead 1 the step
        that is collected is the one before, so that the device works while the host plans. Raises DeviceLost: then
        the engine is of no use any more."""
        now = self._clock()
        self._cache.poll()
        self._expire(now)
        moving = self._step_size.pause_s(now) <= 0 and self._move(now)
        events = self._answers.take_events()
        self._at_rest = self._cache_is_still() and not (moving or events)
        return events

    def _move(self, now: float) -> bool:
        """Plan, submit, collect. False if there was nothing to do."""
        plan = self._scheduler.plan(now, self._step_size.limit)
        self._fail_unavailable()
        flights = self._flights
        moving = bool(plan.scheduled or plan.loads or flights)
        submitted = bool(plan.scheduled) and flights.submit(plan)
        if flights and (len(flights) > self._config.lookahead or not submitted):
            flights.collect()
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
        if request.request_id in self._answers.live:
            error = EngineError("internal_error", f"request id {request.request_id} is in flight already")
            self._answers.refuse(request, error, duplicate=True)
            return
        refusal = why_not(request, self._config, self._scheduler.num_waiting)
        if refusal is not None and refusal.code == "server_overloaded":
            held = {tenant: requests for tenant, requests, _ in self._scheduler.queue.tenants()}
            if self._shed_for(request.tenant_id, held):
                refusal = None
            else:
                refusal = replace(refusal, is_own=request.tenant_id in held)
        if refusal is not None:
            self._answers.refuse(request, refusal)
            return
        self._num_added += 1
        seq = Sequence(request, now, self._num_added, list(request.prompt_ids))
        if request.deadline is not None:
            seq.deadline_at = now + request.deadline
            heapq.heappush(self._deadlines, (seq.deadline_at, seq.order, seq))
        self._answers.open(seq)
        self._scheduler.add(seq)

    def abort(self, request_id: str) -> None:
        """End a request with finish_reason "abort"; it holds nothing any more when this returns. An id that is
        not in flight is ignored."""
        seq = self._answers.live.get(request_id)
        if seq is not None:
            self._answers.end(seq, "abort")

    def set_weight(self, tenant_id: str, weight: float) -> None:
        """A tenant's share (above 0) is another from now on. Ignored for one without a request here: its next one
        brings it."""
        self._scheduler.queue.set_weight(tenant_id, weight)

    def _shed_for(self, tenant_id: str, held: Mapping[str, int]) -> bool:
        """In a full queue of which tenants hold so much, end the newest request that waits of the tenant that has most,
        if that one has at least two more than `tenant_id`: nobody can fill the queue against the others. False if there
        is none."""
        waiting = [s for s in self._answers.live.values() if s.first_scheduled is None]
        victim = max(waiting, key=lambda s: (held[s.request.tenant_id], s.order), default=None)
        if victim is None or held[victim.request.tenant_id] < held.get(tenant_id, 0) + 2:
            return False
        message = (
            f"{self._config.max_waiting} requests are waiting, and most of them are yours; try again later"
        )
        error = EngineError("server_overloaded", message, is_own=True)
        self._answers.end(victim, "error", error=error)
        return True

    def _expire(self, now: float) -> None:
        while self._deadlines and self._deadlines[0][0] <= now:
            _, _, seq = heapq.heappop(self._deadlines)
            if seq.state is not SequenceState.FINISHED:
                self._answers.error(
                    seq, "deadline_exceeded", f"not finished within {seq.request.deadline:g} s"
                )
        if len(self._deadlines) > 2 * len(self._answers.live) + 64:
            # Requests with long deadlines end long before them: don't keep every one of them until then.
            self._deadlines = [d for d in self._deadlines if d[2].state is not SequenceState.FINISHED]
            heapq.heapify(self._deadlines)

    def _fail_unavailable(self) -> None:
        failed, self._scheduler.failed = self._scheduler.failed, []
        for seq, message in failed:
            self._answers.error(seq, "adapter_unavailable", message)

    # What others may know.

    @property
    def has_work(self) -> bool:
        """Some request has not ended, a step is in flight, or events wait to be returned."""
        return bool(self._answers.live or self._flights or self._answers.has_events)

    @property
    def num_waiting_for_adapter(self) -> int:
        return self._scheduler.num_waiting_for_adapter

    def idle_s(self) -> float | None:
        """0 if a step can do something at once; else the seconds until the next deadline or time-out; None if
        there is none, and only a new request, an abort or a finished load can change anything."""
        scheduler, now = self._scheduler, self._clock()
        pause_s = self._step_size.pause_s(now)
        if self._answers.has_events or self._flights:
            return 0.0
        if pause_s <= 0 and (
            scheduler.running
            or scheduler.queue.num_ready
            or (scheduler.num_waiting_for_adapter and not self._at_rest)
        ):
            return 0.0
        while self._deadlines and self._deadlines[0][2].state is SequenceState.FINISHED:
            heapq.heappop(self._deadlines)
        times = [self._deadlines[0][0] - now] if self._deadlines else []
        if pause_s > 0 and self._answers.live:
            times.append(pause_s)
        if (timeout := self._cache.next_timeout_s()) is not None:
            times.append(timeout)
        return max(0.0, min(times)) if times else None

    def stats(self) -> EngineStats:
        """Gauges of this moment and counters since the start."""
        return replace(
            gauges(self._scheduler, self._cache, self._answers.live.values()),
            num_steps=self._flights.num_steps,
            steps_by_tokens=self._flights.step_tokens.steps,
            num_step_tokens=self._flights.step_tokens.total,
            num_out_of_memory=self._step_size.num_ran_out,
            prompt_tokens=self._answers.prompt_tokens,
            generation_tokens=self._answers.generation_tokens,
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
        self._scheduler.check_integrity(self._answers.live.values())
        assert len(self._flights) <= self._config.lookahead, "a step was left uncollected"
        leases = self._flights.leases
        leases += [lease for lease in self._scheduler.running.values() if lease is not None]
        held = {id(lease) for lease in leases}
        assert len(held) == len(leases) == self._cache.usage().num_leases, "a lease is lost or held twice"
        self._cache.check_integrity()
