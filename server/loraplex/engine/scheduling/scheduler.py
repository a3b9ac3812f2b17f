"""Which tokens are computed next. A function of its state, of the reported events and of the time
passed in: no clock of its own, no thread, no torch.

There are no phases. A sequence has tokens, and some of them are computed; every plan computes more of the rest. A
chunked prompt, a prompt with a cached prefix, a decoding sequence and one that restarts after a preemption differ only
in the number of tokens that are not computed yet.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count
from math import inf
from typing import Any

from loraplex.adapters.cache.adapter_cache import AdapterCache, Lease
from loraplex.engine.config import SchedulerConfig
from loraplex.engine.kv.disk_tier import DiskTier
from loraplex.engine.kv.sequence_blocks import SequenceBlocks
from loraplex.engine.scheduling import step_draft
from loraplex.engine.scheduling.adapter_scheduling import AdapterScheduler
from loraplex.engine.scheduling.background import BackgroundSequences
from loraplex.engine.scheduling.background_turns import BackgroundTurns
from loraplex.engine.scheduling.batch_lines import BatchLines
from loraplex.engine.scheduling.charging import SequenceCharges
from loraplex.engine.scheduling.fair_queue import FairQueue
from loraplex.engine.scheduling.preempter import Preempter
from loraplex.engine.scheduling.preemption import preemption_order
from loraplex.engine.scheduling.speculation import Speculation
from loraplex.engine.scheduling.step_draft import StepDraft
from loraplex.engine.scheduling.timing.copy_lead import CopyLead
from loraplex.engine.scheduling.timing.step_bound import LEAST_CHUNK, PromptTime, StepBound, prompts_behind
from loraplex.engine.scheduling.timing.step_times import StepLoad
from loraplex.engine.types import (
    MEASURE_STEPS,
    MeasuredPart,
    ScheduledSequence,
    Sequence,
    SequenceState,
    StepPlan,
)


class Scheduler:
    """Owns the queue, the running sequences, the KV blocks and the sequences' leases.

    The core reports events (`add_sequence`, `finish`, `computed`, `delivered`) and asks for the next step (`plan`). An
    added sequence is either held, running or queued until `finish`, or among the `background`. The `queue` chooses the
    next request, `adapters` the adapters to load, and `preemption` the sequences to preempt.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cache: AdapterCache[Any],
        speculation: Speculation | None = None,
        bound: StepBound | None = None,
        lead: CopyLead | None = None,
        disk: DiskTier | None = None,
    ) -> None:
        """`bound`: of the steps' times; None: a step is bounded by its positions alone. `lead`: None: no step begins
        before the copies of its adapters are done. `disk`: of blocks behind host memory."""
        self._cache = cache
        self.speculation = speculation
        self._bound = bound
        self._max_tokens = config.max_num_batched_tokens
        # Every running sequence must get a token into every step, or decodes could crowd each other out.
        # A place takes a window, where there are any.
        places = config.num_windows or config.max_num_seqs
        self._max_running = min(config.max_num_seqs, config.max_num_batched_tokens, places)
        self._max_scored = config.max_scored_tokens
        self.blocks = SequenceBlocks(
            config.num_blocks, config.block_needs, config.num_states, config.num_windows,
            config.num_host_blocks, config.most_restored_blocks, disk, config.state_slots,
        )  # fmt: skip
        cache.watch_residency(self.blocks.set_resident)
        self.queue = FairQueue()
        turns = BackgroundTurns(self.queue.weight)
        self._charge = SequenceCharges(self.queue, turns, config.charges)
        self.background = BackgroundSequences(self.blocks, cache, turns, self._charge)
        self.adapters = AdapterScheduler(
            cache, self.queue, aging_s=config.adapter_wait_aging_s, load_charge=config.charges.load_per_rank,
            lead_s=lambda seq: 0.0 if lead is None else lead.seconds(self.blocks, seq),
        )  # fmt: skip
        self.running: dict[Sequence, Lease | None] = {}  # in the order of admission
        self.batch_lines = BatchLines(self.background, self.queue, self.adapters, self.running, cache)
        self.held: set[Sequence] = set()
        self.failed: list[tuple[Sequence, str]] = []
        self.num_preemptions = 0
        self.prefix_use = self._charge.prefix_use
        self._loading: dict[str, None] = {}  # by the last plan
        self.step_ids = count(1)
        self._preempter = Preempter(self.running, self.queue, self.blocks, self._max_running, self._preempt)

    @property
    def num_waiting(self) -> int:
        """Sequences that have not started, or were preempted; no lines of batches."""
        return 0 if self.batch_lines.is_on else len(self.queue) + len(self.held)

    @property
    def num_waiting_for_adapter(self) -> int:
        """Waiting sequences whose adapter is not schedulable now."""
        return len(self.queue) - self.queue.num_ready

    @property
    def is_waiting_for_adapters(self) -> bool:
        """Whether a sequence waits for its adapter, or an adapter is expected."""
        return self.num_waiting_for_adapter > 0 or len(self.adapters.expected) > 0

    def add_sequence(self, seq: Sequence, *, hold: bool = False) -> None:
        """With `hold`, it waits outside of the queue until `release`, and is no backlog of its tenant."""
        if seq.request.background:
            self.background.add(seq, hold=hold)
            return
        self.batch_lines.make_way()
        self.queue.enter(seq)
        if self._bound is not None:
            self._bound.joined(seq.request.tenant_id)
        if hold:
            self.held.add(seq)
        else:
            self._enqueue(seq, seq.arrival)

    def release(self, seq: Sequence, now: float) -> None:
        """A held sequence may be scheduled from now on."""
        if seq.request.background:
            self.background.release(seq)
            return
        self.held.remove(seq)
        self._enqueue(seq, now)

    def finish(self, seq: Sequence, *, spoilt: bool = False) -> None:
        """Remove a sequence and release its blocks and lease. With `spoilt`, none of its KV is found in the prefix
        cache again.

        Its blocks may be allocated again while a step that uses them is in flight. Steps run in the order of
        submission: that step has read and written them before a later one uses them. Its writes cannot be found under a
        wrong key either: a block is registered only for steps that were collected while its sequence held it, and the
        position in flight is after those.
        """
        if self.speculation is not None:
            self.speculation.closed(seq)
        if spoilt:
            self.blocks.spoil(seq)
        if seq.request.background:
            self.background.end(seq)
        if seq.aside:
            seq.state = SequenceState.FINISHED
            return
        if seq in self.running:
            self._stop(seq)
        elif seq in self.queue:
            self.adapters.request_left(self.queue.remove(seq))
        else:
            self.held.discard(seq)
        seq.state = SequenceState.FINISHED
        self.queue.leave(seq)
        if self._bound is not None and not seq.request.background:
            self._bound.left(seq.request.tenant_id)

    def took(self, plan: StepPlan, seconds: float) -> None:
        """A step was computed in this time."""
        if self._bound is not None and plan.is_of_slices:
            self._bound.times.took(StepLoad.of(plan.scheduled), seconds)

    def computed(self, seq: Sequence, scheduled: ScheduledSequence) -> None:
        """A sequence's slice was computed and collected: see `SequenceBlocks.computed`.

        Not if the sequence was preempted since: its blocks may belong to another sequence by then, and hold other
        content.
        """
        if seq.state is SequenceState.RUNNING and scheduled.epoch == seq.epoch:
            end = scheduled.start + scheduled.num_tokens - len(scheduled.drafted)
            self.blocks.computed(seq, scheduled, scheduled.start, end)

    def verified(self, seq: Sequence, scheduled: ScheduledSequence, num_accepted: int) -> None:
        """The tokens of a computed slice with drafts are known to `seq`: `num_accepted` of these were right. The
        others, and those behind the end of the answer, are charged as a prompt's."""
        assert self.speculation is not None
        num_drafted = len(scheduled.drafted)
        self.speculation.verified(seq, num_drafted, num_accepted)
        start = scheduled.start + scheduled.num_tokens - num_drafted
        num_kept = min(num_accepted, len(seq.token_ids) - start)
        self._charge.work(seq, (num_drafted - num_kept) * self._charge.prices.prefill)
        if seq.state is SequenceState.RUNNING and scheduled.epoch == seq.epoch:
            seq.num_computed = start + num_kept
            end = min(seq.num_computed, len(seq.token_ids) - 1)  # nothing behind a token that ends the answer
            self.blocks.computed(seq, scheduled, start, end)

    def roll_back(self, rows: Iterable[tuple[Sequence, ScheduledSequence | MeasuredPart]]) -> None:
        """These slices, the newest of their sequences, were not computed. They are planned again, in the same blocks
        unless a state was written over, and sample the same tokens."""
        for seq, row in rows:
            seq.num_pending = 0
            if seq.state is SequenceState.RUNNING and seq.epoch == row.epoch:
                self.blocks.begin_again(seq, row.start)

    def delivered(self, seq: Sequence, num_tokens: int) -> None:
        """Output tokens have been sampled: charge them."""
        self._charge.work(seq, num_tokens * self._charge.prices.decode)

    def answered(self, seq: Sequence) -> None:
        """A sequence has come to its proper end, and is about to `finish`."""
        if self.speculation is not None and seq.num_outputs:
            self.speculation.answered(seq)

    def plan(self, now: float, max_tokens: int | None = None) -> StepPlan:
        """The next step, of at most `max_tokens` (None: as configured); it has no `parts` and no `copies` if nothing
        can be done now. Sequences whose adapter cannot be loaded are put into `failed`; the caller ends them."""
        budget = self._max_tokens if max_tokens is None else max_tokens
        draft = StepDraft(now, budget, min(self._max_scored, budget), min(self._max_running, budget))
        others = bool(self.running or self.queue.requests or self.held) and not self.batch_lines.is_on
        self.batch_lines.begin_step(now, others=others)
        self.background.make_room(self.running, self.queue.requests)
        self._cache.begin_pass()
        self._preempter.begin_step(draft)
        decoding, forced, prefilling, measuring = step_draft.sort_running(self.running, self.blocks.restoring)
        time = None
        if self._bound is not None:
            lines = self.batch_lines.is_on
            time = self._bound.begin(now, decoding + forced, self.queue.weight, lines=lines)
        if time is not None:
            decoding, forced = time.in_turn(decoding), time.in_turn(forced)
        before = self._preempter.positions_before_head(prefilling)
        if time is None or not before or time.fits(before):
            self._preempter.make_room(draft, len(decoding) + len(forced), before, self.blocks.find)
        yielded = len(draft.preempted)
        if forced and self.blocks.lacks(decoding + forced):
            decoding, forced = decoding + forced, []
        self._schedule_running(draft, decoding, most=1)
        draft.prompt_time = time
        if forced:
            self._schedule_forced(draft, forced, prefilling)
        self._measure(draft, measuring)
        pending = self.adapters.step(now, self.running)
        self.failed += pending.unservable(self.queue)
        on_way = sorted(self.blocks.restoring, key=self._counter)
        prefilling += [seq for seq in on_way if self._restore(draft, seq)]
        if draft.prompt_time is not None and len(draft.preempted) == yielded:
            self._share_prompts(draft, draft.prompt_time, prefilling, claimed=yielded > 0)
        # Prompts are computed in the order of counters, new ones and those begun before alike.
        for seq in sorted(prefilling, key=self._counter):
            if len(draft.preempted) == yielded:
                self._admit(draft, before=self._counter(seq))
            self._schedule_running(draft, [seq])
        if len(draft.preempted) == yielded:  # else new requests would take the blocks that were just freed
            self._admit(draft)
        self._go_on_activated(draft)
        if self.speculation is not None:
            self.speculation.extend(draft, self.blocks, self._counter)
        if not (len(self.queue) or self.blocks.restoring):
            if self._bound is not None and draft.prompt_time is None:
                draft.prompt_time = self._bound.open(StepLoad.of(draft.scheduled.values()))
            self.background.plan(draft, draft.max_running - len(self.running), self._schedule)
        loads = tuple(digest for digest in pending.loading if digest not in self._loading)
        self._loading = pending.loading
        return draft.plan(next(self.step_ids), loads, self.blocks.take_copies())

    def _counter(self, seq: Sequence) -> float:
        return self.queue.counter(seq.request.tenant_id)

    def _schedule_running(self, draft: StepDraft, behind: list[Sequence], *, most: int | None = None) -> None:
        behind = [seq for seq in behind if seq.state is SequenceState.RUNNING]
        if self.blocks.lacks(behind):
            # Blocks run short, and a scheduled sequence is no victim: the last in the preemption order goes first.
            behind = preemption_order(behind, self._preempter.shares())[::-1]
        for seq in behind:
            if draft.budget == 0:
                return
            # It may have been preempted for another, or have its slice.
            if seq.state is SequenceState.RUNNING and not seq.all_sampled and seq not in draft.scheduled:
                self._schedule(draft, seq, most=most)

    def _schedule_forced(self, draft: StepDraft, forced: list[Sequence], prefilling: list[Sequence]) -> None:
        """Give each sequence with forced tokens a position, and of what is left, or of half of it where there are
        prompts, the least served tenant's more."""
        share = 0.5 if prefilling or self.queue.num_ready else 1.0
        room = int(share * (draft.budget - len(forced)))
        if (time := draft.prompt_time) is not None:
            time.share_forced(share)
        for seq in sorted(forced, key=self._counter):
            before = draft.budget
            if before and seq.state is SequenceState.RUNNING and not seq.all_sampled:
                if time is not None:
                    time.take_row(seq)
                self._schedule(draft, seq, most=1 + max(0, room), least=1)
                room -= max(0, before - draft.budget - 1)
        if time is not None:
            time.begin_prompts()

    def _schedule(self, draft: StepDraft, seq: Sequence, *, most: int | None = None, least: int = 0) -> None:
        """Give a sequence its slice, if it fits: of at most `most` positions, and `least` where time allows fewer."""
        # Runs for every sequence of every step: work that decoding does not need is skipped.
        request, start, slot = seq.request, seq.num_computed, seq.slot
        scores = request.sampling.prompt_logprobs is not None and seq.num_scored < seq.num_to_score
        count = min(len(seq.token_ids) + seq.num_pending - start, draft.budget)
        if start < request.adapter_from:
            # The rows of a slice have one slot, and these have none.
            count, slot = min(count, request.adapter_from - start), -1
        if scores:
            # One at least, so that every scheduled sequence advances.
            count = min(count, max(1, draft.score_budget + max(0, seq.num_scored - start)))
        if most is not None:
            count = min(count, most)
        time = draft.prompt_time
        if time is not None and (count > 1 or scores):
            count = time.most(seq, start, count, least=least, scores=scores)
            if count == 0:
                return
        end = start + count
        if missing := self.blocks.missing_to(seq, end):
            if missing > self.blocks.num_free and not self._preempter.free_blocks(draft, seq, missing):
                return
            self.blocks.extend(seq, missing)
        states = self.blocks.states
        source = -1 if states is None else seq.states[-1][1]
        targets = () if states is None else states.advance(seq, end)
        if targets is None:
            return
        part = step_draft.make_slice(seq, start, count, slot, scores, source, targets)
        draft.budget -= count
        draft.score_budget -= len(part.targets)
        draft.scheduled[seq] = part
        if time is not None:
            time.load.add_slice(part)
        if seq.first_scheduled is None:
            seq.first_scheduled = draft.now
        if seq.num_charged < len(request.prompt_ids):
            self._charge.prompt(seq, end, self._charge.prices.prefill)
        if slot != seq.slot and end == request.adapter_from:
            draft.activated.append(seq)
        seq.num_computed = end
        seq.num_pending += part.samples

    def _go_on_activated(self, draft: StepDraft) -> None:
        """Give sequences whose slice ends where their adapter begins to act another slice of this step, as far as there
        is room: what follows is short as a rule, and a step of its own would delay the first token. Each layer writes
        the KV of all rows before it reads any."""
        for seq in draft.activated:
            has_room = draft.has_room and draft.score_budget > 0 and draft.num_slices < draft.max_running
            has_room &= self.blocks.states is None or self.blocks.states.can_advance(seq)
            if has_room and self.blocks.missing(seq) <= self.blocks.num_free:
                draft.of_base.append(draft.scheduled.pop(seq))
                self._schedule(draft, seq)

    def _measure(self, draft: StepDraft, measuring: list[Sequence]) -> None:
        seq = step_draft.draft_part(draft, measuring, self._cache.is_arriving)
        if seq is not None and seq.first_scheduled is None:
            seq.first_scheduled = draft.now
            self._charge.work(seq, MEASURE_STEPS * self._charge.prices.prefill)

    def _preempt(self, draft: StepDraft, seq: Sequence) -> None:
        """Put a running sequence back into the queue, before its tenant's others, to be computed again.

        A token that a step in flight samples for it stays valid: that step was submitted while the blocks and the
        adapter's slot belonged to the sequence, and no later step affects it. It is collected before the next plan, so
        that the sequence never resumes with a token missing.
        """
        self._stop(seq)
        seq.state = SequenceState.WAITING
        seq.lost_until = max(seq.lost_until, seq.num_computed)
        seq.num_computed = 0
        seq.epoch += 1
        self._enqueue(seq, draft.now)
        self.num_preemptions += 1
        draft.preempted.append(seq.request_id)

    def _enqueue(self, seq: Sequence, now: float) -> None:
        self.adapters.request_joined(self.queue.push(seq), now)

    def _stop(self, seq: Sequence) -> None:
        lease = self.running.pop(seq)
        self._preempter.num_changes += 1
        self.blocks.drop(seq)
        seq.slot = -1
        if lease is not None:
            self._cache.release(lease)

    def _admit(self, draft: StepDraft, before: float = inf) -> None:
        """Start waiting sequences in fair order, of tenants with a counter below `before`, while budget, places and
        blocks last. One that waits for its adapter is skipped. One that waits for blocks is not: smaller ones behind it
        would starve it."""
        reserved = -1
        while draft.has_room:
            seq = self.queue.head()
            if seq is None or self._counter(seq) >= before:
                return
            if seq.num_pending or seq.request_id in draft.preempted:
                return  # its tokens in flight are collected before it resumes
            if reserved < 0 and len(self.running) < draft.max_running:
                reserved = sum(map(self.blocks.reserved, self.running))
            if len(self.running) == draft.max_running or not self._start(draft, seq, reserved):
                return
            reserved += self.blocks.reserved(seq)

    def _share_prompts(
        self, draft: StepDraft, time: PromptTime, prefilling: list[Sequence], *, claimed: bool
    ) -> None:
        """Give tenants behind the first one in the order of prompts a share, and nothing that the head needs."""
        for seq, part, most in prompts_behind(self.queue, prefilling, claimed=claimed):
            time.share(part)
            self._share(draft, seq, min(most, int(part * draft.budget)))  # something is left to the first one
        time.begin_prompts()

    def _share(self, draft: StepDraft, seq: Sequence, most: int) -> None:
        """Give a prompt at most `most` positions before those that are before it in order."""
        if not most or draft.prompt_time is None or draft.prompt_time.is_full:
            return
        if seq in self.running:
            self._schedule(draft, seq, most=most)
        elif not seq.num_pending and seq.request_id not in draft.preempted:
            head = None if (first := self.queue.head()) is seq else first
            reserved = sum(map(self.blocks.reserved, self.running))
            reserved += self.blocks.needs.of(head.num_tokens) if head else 0
            if len(self.running) + (head is not None) < draft.max_running:
                self._start(draft, seq, reserved, most)

    def _start(self, draft: StepDraft, seq: Sequence, reserved: int, most: int | None = None) -> bool:
        """Give a waiting sequence its lease, the blocks of its cached prefix, and its first slice of at most `most`
        positions. False if its tokens do not all fit beside the `reserved` blocks of running sequences."""
        assert seq.num_pending == 0, f"request {seq.request_id} resumes while a token of it is in flight"
        found = self.blocks.find(seq)
        if self.blocks.lacks_room(seq, reserved, found):
            return False
        lane = self.queue.remove(seq)
        self.adapters.request_left(lane, started=True)
        lease = None
        if (ref := seq.request.adapter) is not None:
            # It is on the device; this marks its use, and revokes a deletion of an older name.
            self._cache.request(ref)
            lease = self._cache.acquire(ref.digest, counts=not seq.request.background)
        self.running[seq] = lease
        self._preempter.num_changes += 1
        seq.state = SequenceState.RUNNING
        seq.slot = -1 if lease is None else lease.slot
        self.blocks.begin(seq, found)
        if seq.epoch == 0:
            seq.adapter_opened = lane.opened
        self._charge.begun(seq)
        if seq.measured is not None:
            self._measure(draft, [seq])
        elif seq not in self.blocks.restoring or self._restore(draft, seq):
            self._schedule(draft, seq, most=most, least=LEAST_CHUNK)
        return True

    def _restore(self, draft: StepDraft, seq: Sequence) -> bool:
        is_here = self.blocks.restore(seq, draft.now)
        self._charge.found(seq)
        return is_here
