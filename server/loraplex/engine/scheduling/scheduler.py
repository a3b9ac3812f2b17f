"""Which tokens are computed next. A function of its state, of the reported events and of the time
passed in: no clock of its own, no thread, no torch.

There are no phases. A sequence has tokens, and some of them are computed; every plan computes more of the rest. A
chunked prompt, a prompt with a cached prefix, a decoding sequence and one that restarts after a preemption differ only
in the number of tokens that are not computed yet.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from math import inf
from typing import Any

from loraplex.adapters.cache.adapter_cache import AdapterCache, Lease
from loraplex.engine.config import SchedulerConfig
from loraplex.engine.scheduling import prefix_keys, step_draft
from loraplex.engine.scheduling.adapter_scheduling import AdapterScheduler
from loraplex.engine.scheduling.background import BackgroundSequences
from loraplex.engine.scheduling.block_needs import (
    blocks_for,
    blocks_missing,
    blocks_short,
    holds_blocks,
    reserved_blocks,
)
from loraplex.engine.scheduling.blocks import BlockManager
from loraplex.engine.scheduling.charging import SequenceCharges
from loraplex.engine.scheduling.fair_queue import FairQueue
from loraplex.engine.scheduling.integrity import check_places
from loraplex.engine.scheduling.preemption import TenantShares, choose_victims, preemption_order
from loraplex.engine.scheduling.speculation import Speculation
from loraplex.engine.scheduling.step_draft import StepDraft
from loraplex.engine.types import (
    MEASURE_STEPS,
    MeasuredPart,
    ScheduledSequence,
    Sequence,
    SequenceState,
    StepPlan,
)
from loraplex.kernels.attention import BLOCK_SIZE


class Scheduler:
    """Owns the queue, the running sequences, the KV blocks and the sequences' leases.

    The core reports events (`add_sequence`, `finish`, `computed`, `delivered`) and asks for the next step (`plan`). An
    added sequence is either held, running or queued until `finish`, or among the `background`. The `queue` chooses the
    next request, `adapters` the adapters to load, and `preemption` the sequences to preempt.
    """

    def __init__(
        self, config: SchedulerConfig, cache: AdapterCache[Any], speculation: Speculation | None = None
    ) -> None:
        self._cache = cache
        self.speculation = speculation
        self._max_tokens = config.max_num_batched_tokens
        # Every running sequence must get a token into every step, or decodes could crowd each other out.
        self._max_running = min(config.max_num_seqs, config.max_num_batched_tokens)
        self._max_scored = config.max_scored_tokens
        self.blocks = BlockManager(config.num_blocks)
        cache.watch_residency(self.blocks.set_resident)
        self.background = BackgroundSequences(self.blocks, cache)
        self.queue = FairQueue()
        self._charge = SequenceCharges(self.queue, config.charges)
        self.adapters = AdapterScheduler(
            cache,
            self.queue,
            aging_s=config.adapter_wait_aging_s,
            load_charge=config.charges.load_per_rank,
        )
        self.running: dict[Sequence, Lease | None] = {}  # in the order of admission
        self.held: set[Sequence] = set()
        self.failed: list[tuple[Sequence, str]] = []
        self.num_preemptions = 0
        self.prefix_queries = 0
        self.prefix_hits = 0
        self._loading: dict[str, None] = {}  # by the last plan
        self._step_id = 0
        self._failed_claim: tuple[Sequence | None, int, int] = (None, 0, 0)  # see _claim_would_fail_again
        self._num_changes = 0  # of the set of running sequences

    @property
    def num_waiting(self) -> int:
        """Sequences that have not started, or were preempted."""
        return len(self.queue) + len(self.held)

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
            self.background.add(seq)
            return
        self.queue.enter(seq)
        if hold:
            self.held.add(seq)
        else:
            self._enqueue(seq, seq.arrival)

    def release(self, seq: Sequence, now: float) -> None:
        """A held sequence may be scheduled from now on."""
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
        if seq.request.background:
            self.background.remove(seq)
            seq.state = SequenceState.FINISHED
            return
        if self.speculation is not None:
            self.speculation.closed(seq)
        if spoilt:
            self.blocks.disown(seq.block_keys)
        if seq in self.running:
            self._stop(seq)
        elif seq in self.queue:
            self.adapters.request_left(self.queue.remove(seq))
        else:
            self.held.discard(seq)
        seq.state = SequenceState.FINISHED
        self.queue.leave(seq)

    def computed(self, seq: Sequence, scheduled: ScheduledSequence) -> None:
        """A sequence's slice was computed and collected: register the blocks that it filled in the prefix cache.

        Not if the sequence was preempted since: its blocks may belong to another sequence by then, and hold other
        content.
        """
        if seq.state is SequenceState.RUNNING and scheduled.epoch == seq.epoch and not seq.request.background:
            end = scheduled.start + scheduled.num_tokens - len(scheduled.drafted)
            self.blocks.register_all(prefix_keys.filled(seq, scheduled, scheduled.start, end))

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
            self.blocks.register_all(prefix_keys.filled(seq, scheduled, start, end))

    def roll_back(self, rows: Iterable[tuple[Sequence, ScheduledSequence | MeasuredPart]]) -> None:
        """These slices, the newest of their sequences, were not computed. They are planned again, in the same blocks,
        and sample the same tokens."""
        for seq, row in rows:
            seq.num_pending = 0
            if seq.state is SequenceState.RUNNING and seq.epoch == row.epoch:
                seq.num_computed = min(seq.num_computed, row.start)

    def delivered(self, seq: Sequence, num_tokens: int) -> None:
        """Output tokens have been sampled: charge them."""
        self._charge.work(seq, num_tokens * self._charge.prices.decode)

    def answered(self, seq: Sequence) -> None:
        """A sequence has come to its proper end, and is about to `finish`."""
        if self.speculation is not None and seq.num_outputs:
            self.speculation.answered(seq)

    def plan(self, now: float, max_tokens: int | None = None) -> StepPlan:
        """The next step, of at most `max_tokens` (None: as configured); it has no `parts` if nothing can be
        computed now. Sequences whose adapter cannot be loaded are put into `failed`; the caller ends them."""
        budget = self._max_tokens if max_tokens is None else max_tokens
        draft = StepDraft(now, budget, min(self._max_scored, budget), min(self._max_running, budget))
        self.background.make_room(self.running, self.queue.requests)
        self._cache.begin_pass()
        self._shrink_batch(draft)
        draft.forced_budget = step_draft.forced_budget(draft, len(self.running), self.queue.num_ready)
        decoding, forced, prefilling, measuring = step_draft.sort_running(self.running)
        if forced:
            decoding += sorted(forced, key=self._counter)
        self._preempt_for_head(draft, decoding, prefilling)
        yielded = len(draft.preempted)
        self._schedule_running(draft, decoding)
        self._measure(draft, measuring)
        pending = self.adapters.step(now, self.running)
        self.failed += pending.unservable(self.queue)
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
        if not len(self.queue):
            self.background.plan(draft, draft.max_running - len(self.running), self._schedule)
        loads = tuple(digest for digest in pending.loading if digest not in self._loading)
        self._loading = pending.loading
        self._step_id += 1
        return draft.plan(self._step_id, loads)

    def _counter(self, seq: Sequence) -> float:
        return self.queue.counter(seq.request.tenant_id)

    def _shrink_batch(self, draft: StepDraft) -> None:
        """Steps have become smaller, and fewer sequences may run: preempt the excess."""
        excess = len(self.running) - draft.max_running
        if excess > 0:
            victims = [seq for seq in self.running if not seq.all_sampled]
            for seq in preemption_order(victims, self._shares())[:excess]:
                self._preempt(draft, seq)

    def _preempt_for_head(
        self, draft: StepDraft, decoding: list[Sequence], prefilling: list[Sequence]
    ) -> None:
        """Preempt sequences of tenants with a larger share, if the head of the queue lacks a place or blocks. Preempt
        none if that would not be enough, or if sequences before the head use up the step."""
        head = self.queue.head()
        if head is None or head.num_pending or self._claim_would_fail_again(head):
            return
        level = self._counter(head)
        before = sum(seq.num_tokens - seq.num_computed for seq in prefilling if self._counter(seq) <= level)
        if len(decoding) + before >= draft.budget:
            return
        reserved = sum(map(reserved_blocks, self.running))
        missing = blocks_short(self.blocks, head, reserved, self._cached_prefix(head))
        places = len(self.running) + 1 - draft.max_running
        if missing <= 0 and places <= 0:
            return
        given_up: Counter[int] = Counter()

        def is_enough(victim: Sequence) -> bool:
            nonlocal missing, places
            missing -= self.blocks.num_freed(victim.block_ids, given_up) + reserved_blocks(victim)
            places -= 1
            return missing <= 0 and places <= 0

        # A victim of a less served tenant with a backlog would be the head again. A tenant without one is lifted to the
        # head's level.
        others = [seq for seq in self.running if not seq.all_sampled]
        victims = [
            seq
            for seq in others
            if self._counter(seq) >= level or not self.queue.is_backlogged(seq.request.tenant_id)
        ]
        chosen = choose_victims(head, blocks_for(head.num_tokens), victims, self._shares(), is_enough)
        if not chosen and len(victims) == len(others):
            self._failed_claim = (head, self._num_changes, self._step_id)
        for victim in chosen:
            self._preempt(draft, victim)

    def _claim_would_fail_again(self, head: Sequence) -> bool:
        """Preemption for this head has failed, and since then no sequence has started, stopped or outgrown a block."""
        failed, starts, step_id = self._failed_claim
        return failed is head and starts == self._num_changes and self._step_id - step_id < BLOCK_SIZE

    def _shares(self) -> TenantShares:
        return TenantShares(self.running, self._max_running, self.blocks.num_blocks, self.queue.weight)

    def _schedule_running(self, draft: StepDraft, behind: list[Sequence]) -> None:
        behind, free = [s for s in behind if s.state is SequenceState.RUNNING], self.blocks.num_free
        if free < len(behind) and free < sum(blocks_missing(seq) for seq in behind):
            # Blocks run short, and a scheduled sequence cannot be a victim any more: schedule the last in the
            # preemption order first.
            behind = preemption_order(behind, self._shares())[::-1]
        for seq in behind:
            if draft.budget == 0:
                return
            # It may have been preempted for another.
            if seq.state is SequenceState.RUNNING and not seq.all_sampled:
                self._schedule(draft, seq)

    def _schedule(self, draft: StepDraft, seq: Sequence) -> None:
        # Runs for every sequence of every step: work that decoding does not need is skipped.
        request, start, slot = seq.request, seq.num_computed, seq.slot
        scores = request.sampling.prompt_logprobs is not None and seq.num_scored < seq.num_to_score
        count = min(len(seq.token_ids) + seq.num_pending - start, draft.budget)
        if start < request.adapter_from:
            # The rows of a slice have one slot, and these have none.
            count, slot = min(count, request.adapter_from - start), -1
        if scores:
            # One at least, so that every scheduled sequence advances.
            count = min(count, max(1, draft.score_budget))
        if count > 1 and step_draft.is_forced(seq):
            count = min(count, 1 + draft.forced_budget)
            draft.forced_budget -= count - 1
        end = start + count
        if end > len(seq.block_ids) * BLOCK_SIZE:
            missing = blocks_for(end) - len(seq.block_ids)
            if missing > self.blocks.num_free and not self._preempt_for_blocks(draft, seq, missing):
                return
            seq.block_ids += tuple(self.blocks.allocate(missing))
        part = step_draft.make_slice(seq, start, count, slot, scores)
        draft.budget -= count
        draft.score_budget -= len(part.targets)
        draft.scheduled[seq] = part
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
            has_room = draft.budget > 0 and draft.score_budget > 0 and draft.num_slices < draft.max_running
            if has_room and blocks_missing(seq) <= self.blocks.num_free:
                draft.of_base.append(draft.scheduled.pop(seq))
                self._schedule(draft, seq)

    def _measure(self, draft: StepDraft, measuring: list[Sequence]) -> None:
        seq = step_draft.draft_part(draft, measuring)
        if seq is not None and seq.first_scheduled is None:
            seq.first_scheduled = draft.now
            self._charge.work(seq, MEASURE_STEPS * self._charge.prices.prefill)

    def _preempt_for_blocks(self, draft: StepDraft, seq: Sequence, missing: int) -> bool:
        """Preempt until `missing` blocks are free. False if `seq` itself was preempted, or must skip this step.

        No order of victims can livelock: blocks run short only because a sequence decoded 16 more tokens, tokens are
        never lost, and their number is bounded.
        """
        while missing > self.blocks.num_free:
            victims = [s for s in self.running if s not in draft.scheduled and holds_blocks(s)]
            shares = self._shares()
            victim = preemption_order(victims, shares)[0]
            if victim is seq and len(victims) + len(draft.scheduled) < len(self.running):
                # Another's last token is in flight: its blocks become free when it is collected; or is measured.
                return False
            if victim is seq and preemption_order([seq, *draft.scheduled], shares)[0] is not seq:
                return False  # a scheduled sequence is before it, and is preempted when a decoding one needs blocks
            self._preempt(draft, victim)
            if victim is seq:
                return False
        return True

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
        self._num_changes += 1
        self.blocks.release(seq.block_ids)
        seq.block_ids = ()
        seq.slot = -1
        if lease is not None:
            self._cache.release(lease)

    def _admit(self, draft: StepDraft, before: float = inf) -> None:
        """Start waiting sequences in fair order, of tenants with a counter below `before`, while budget, places and
        blocks last.

        A sequence that waits for its adapter is skipped. One that waits for blocks is not: smaller ones behind it would
        starve it.
        """
        reserved = -1
        while draft.budget:
            seq = self.queue.head()
            if seq is None or self._counter(seq) >= before:
                return
            if seq.num_pending or seq.request_id in draft.preempted:
                return  # its tokens in flight are collected before it resumes
            if reserved < 0 and len(self.running) < draft.max_running:
                reserved = sum(map(reserved_blocks, self.running))
            if len(self.running) == draft.max_running or not self._start(draft, seq, reserved):
                return
            reserved += reserved_blocks(seq)

    def _start(self, draft: StepDraft, seq: Sequence, reserved: int) -> bool:
        """Give a waiting sequence its lease, the blocks of its cached prefix, and its first slice. False if its tokens
        do not all fit beside the `reserved` blocks of running sequences."""
        assert seq.num_pending == 0, f"request {seq.request_id} resumes while a token of it is in flight"
        found = self._cached_prefix(seq)
        if blocks_short(self.blocks, seq, reserved, found) > 0:
            return False
        lane = self.queue.remove(seq)
        self.adapters.request_left(lane, started=True)
        lease = None
        if (ref := seq.request.adapter) is not None:
            # It is on the device; this marks its use, and revokes a deletion of an older name.
            self._cache.request(ref)
            lease = self._cache.acquire(ref.digest)
        self.running[seq] = lease
        self._num_changes += 1
        seq.state = SequenceState.RUNNING
        seq.slot = -1 if lease is None else lease.slot
        self.blocks.share(found)
        seq.block_ids = tuple(found)
        seq.num_computed = len(found) * BLOCK_SIZE
        if seq.epoch == 0:
            seq.adapter_opened = lane.opened
            seq.num_cached = prefix_keys.cached_prompt_tokens(seq)
            self.prefix_queries += seq.num_prompt
            self.prefix_hits += seq.num_cached
            if seq.pooled is not None and seq.num_prompt < BLOCK_SIZE:
                # However short, it takes a place, a block and a vector.
                self._charge.work(seq, (BLOCK_SIZE - seq.num_prompt) * self._charge.prices.prefill)
        self._charge.prompt(seq, seq.num_computed, self._charge.prices.cached)
        self._schedule(draft, seq) if seq.measured is None else self._measure(draft, [seq])
        return True

    def _cached_prefix(self, seq: Sequence) -> list[int]:
        """Blocks of the prefix cache that hold the beginning of a waiting sequence."""
        return self.blocks.lookup(prefix_keys.extend_keys(seq)[: prefix_keys.findable_blocks(seq)])

    def check_integrity(self, live: Iterable[Sequence]) -> None:
        """Raise AssertionError unless exactly the `live` sequences are here, each either held, running, queued or in
        the background, with the blocks and lanes that this takes."""
        check_places(self.background.check_integrity(live), self.running, self.queue, self.held)
        self.adapters.check_integrity(self.queue.lanes_in_use)
        resident = self._cache.residency()
        tables = [seq.block_ids for seq in (*self.running, *self.background.begun)]
        self.blocks.check_integrity(tables, resident.__contains__)
