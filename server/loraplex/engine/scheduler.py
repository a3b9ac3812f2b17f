"""Which tokens are computed next. A function of its state, of the events told to it and of the time passed in:
no clock of its own, no thread, no torch.

There are no phases. A sequence has tokens, and some of them are computed; every plan lets the computed ones catch
up. A prompt that comes in chunks, one whose start is found in the prefix cache, a sequence that decodes and one
that starts over after a preemption differ only in how far behind they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from math import inf
from typing import Any

from loraplex.adapters.cache import AdapterCache, Lease
from loraplex.engine import prefix
from loraplex.engine.adapter_scheduling import AdapterScheduler
from loraplex.engine.block_needs import blocks_for, blocks_missing, blocks_to_come
from loraplex.engine.blocks import BlockManager
from loraplex.engine.config import BLOCK_SIZE, SchedulerConfig
from loraplex.engine.draft import Draft
from loraplex.engine.fairness import FairQueue
from loraplex.engine.integrity import check_places
from loraplex.engine.preemption import Shares, claim, most_expendable
from loraplex.engine.types import ScheduledSequence, Sequence, SequenceState, StepPlan


class Scheduler:
    """Owns the queue, the running sequences, the KV blocks and the sequences' leases.

    The core tells it what happens (`add`, `finish`, `computed`, `delivered`) and asks it for the next step
    (`plan`). A sequence that was added is in exactly one place, running or queued, until `finish`. The `queue` says who
    goes next, `adapters` which adapters come, and `preemption` who must go.
    """

    def __init__(self, config: SchedulerConfig, cache: AdapterCache[Any]) -> None:
        self._cache = cache
        self._max_tokens = config.max_num_batched_tokens
        # Every running sequence must get a token into every step, or decodes could crowd each other out.
        self._max_running = min(config.max_num_seqs, config.max_num_batched_tokens)
        self._max_scored = config.max_scored_tokens
        self._charges = config.charges
        self.blocks = BlockManager(config.num_blocks)
        self.queue = FairQueue()
        self.adapters = AdapterScheduler(
            cache,
            self.queue,
            aging_s=config.adapter_wait_aging_s,
            load_charge=config.charges.load_per_rank,
        )
        self.running: dict[Sequence, Lease | None] = {}  # in the order of admission
        self.failed: list[tuple[Sequence, str]] = []
        self.num_preemptions = 0
        self.prefix_queries = 0
        self.prefix_hits = 0
        self._loading: dict[str, None] = {}  # by the last plan
        self._step_id = 0
        self._in_vain: tuple[Sequence | None, int, int] = (None, 0, 0)  # see _claimed_in_vain
        self._num_changes = 0  # of who runs

    @property
    def num_waiting(self) -> int:
        """Sequences that have not started, or were preempted."""
        return len(self.queue)

    @property
    def num_waiting_for_adapter(self) -> int:
        """Those of them whose adapter can't be lent to them now."""
        return len(self.queue) - self.queue.num_ready

    def add(self, seq: Sequence) -> None:
        self.queue.enter(seq)
        self._wait(seq, seq.arrival)

    def finish(self, seq: Sequence, *, spoilt: bool = False) -> None:
        """Take a sequence out, wherever it is, with all that it holds. If its KV may be `spoilt`, none of it is found
        again, whenever it was computed.

        Its blocks may be given out again while a step that uses them is in flight. Steps run one after the other
        in the order of submission: that step has read and written them before any later one gets them. What it
        wrote can't be found under a wrong name either: a block is registered only for the steps that were
        collected while its sequence held it, and the position that is still in flight lies behind those.
        """
        if spoilt:
            self.blocks.disown(seq.block_keys)
        if seq in self.running:
            self._stop(seq)
        elif seq in self.queue:
            self.adapters.left(self.queue.remove(seq))
        seq.state = SequenceState.FINISHED
        self.queue.leave(seq)

    def computed(self, scheduled: ScheduledSequence) -> None:
        """A slice has been computed and collected: the blocks that it filled may now be found by others.

        Not so if the sequence was preempted since. The blocks are somebody else's by then, and a later plan may
        count on their new content.
        """
        seq = scheduled.seq
        if seq.state is not SequenceState.RUNNING or scheduled.epoch != seq.epoch:
            return
        first, end = scheduled.start // BLOCK_SIZE, (scheduled.start + scheduled.num_tokens) // BLOCK_SIZE
        if first < end:
            keys = prefix.extend_keys(seq)
            for index in range(first, end):
                self.blocks.register(scheduled.block_ids[index], keys[index])

    def roll_back(self, rows: Iterable[ScheduledSequence]) -> None:
        """These slices, the newest of their sequences, were not computed. They are planned again, in the same blocks;
        tokens that they should have drawn will be the same."""
        for row in rows:
            seq = row.seq
            seq.num_pending = 0
            if seq.state is SequenceState.RUNNING and seq.epoch == row.epoch:
                seq.num_computed = min(seq.num_computed, row.start)

    def delivered(self, seq: Sequence, num_tokens: int) -> None:
        """Output tokens have been drawn: charge them."""
        self._charge(seq, num_tokens * self._charges.decode)

    def plan(self, now: float, max_tokens: int | None = None) -> StepPlan:
        """The next step, of at most `max_tokens` (None: as configured); its `scheduled` is empty if nothing can be
        computed now. Sequences whose adapter turned out not to be available are put into `failed` for the caller to
        end."""
        budget = self._max_tokens if max_tokens is None else max_tokens
        draft = Draft(now, budget, min(self._max_scored, budget), min(self._max_running, budget))
        self._cache.begin_pass()
        self._keep_to(draft)
        decoding: list[Sequence] = []
        prefilling: list[Sequence] = []
        for seq in self.running:
            lag = len(seq.token_ids) + seq.num_pending - seq.num_computed
            if lag == 1:
                decoding.append(seq)
            elif lag > 1:
                prefilling.append(seq)
        self._make_way(draft, decoding, prefilling)
        yielded = len(draft.preempted)
        self._catch_up(draft, decoding)
        coming = self.adapters.step(now, self.running)
        for digest, message in coming.failed.items():
            self.failed += [(seq, message) for line in self.queue.lines(digest) for seq in line.sequences()]
        # Prompts are computed in the order of counters, whether they were begun before or not.
        for seq in sorted(prefilling, key=self._counter):
            if len(draft.preempted) == yielded:
                self._admit(draft, before=self._counter(seq))
            self._catch_up(draft, [seq])
        if len(draft.preempted) == yielded:  # else the newcomers would take the blocks that were just won
            self._admit(draft)
        loads = tuple(digest for digest in coming.loading if digest not in self._loading)
        self._loading = coming.loading
        self._step_id += 1
        return StepPlan(self._step_id, tuple(draft.scheduled.values()), tuple(draft.preempted), loads)

    def _counter(self, seq: Sequence) -> float:
        return self.queue.counter(seq.request.tenant_id)

    def _keep_to(self, draft: Draft) -> None:
        """Fewer may run since steps have become smaller: preempt those who are too many."""
        excess = len(self.running) - draft.max_running
        if excess > 0:
            victims = [seq for seq in self.running if not seq.all_sampled]
            for seq in most_expendable(victims, self._shares())[:excess]:
                self._preempt(draft, seq)

    def _make_way(self, draft: Draft, decoding: list[Sequence], prefilling: list[Sequence]) -> None:
        """Preempt for the first in the queue, if there is no room for it, sequences of tenants that hold more than its
        tenant; nobody if that would not be enough, or if those who go before it use up the step."""
        head = self.queue.head()
        if head is None or head.num_pending or self._claimed_in_vain(head):
            return
        level = self._counter(head)
        before = sum(seq.num_tokens - seq.num_computed for seq in prefilling if self._counter(seq) <= level)
        if len(decoding) + before >= draft.budget:
            return
        missing = self._blocks_short(head, sum(map(blocks_to_come, self.running)), self._found(head))
        places = len(self.running) + 1 - draft.max_running
        if missing <= 0 and places <= 0:
            return
        given_up: Counter[int] = Counter()

        def is_enough(victim: Sequence) -> bool:
            nonlocal missing, places
            missing -= self.blocks.num_freed(victim.block_ids, given_up) + blocks_to_come(victim)
            places -= 1
            return missing <= 0 and places <= 0

        # Of a tenant that got less, and has others waiting, it would be the first in the queue again. One that has none
        # is lifted to the head's level.
        others = [seq for seq in self.running if not seq.all_sampled]
        victims = [
            seq
            for seq in others
            if self._counter(seq) >= level or not self.queue.is_backlogged(seq.request.tenant_id)
        ]
        chosen = claim(head, blocks_for(head.num_tokens), victims, self._shares(), is_enough)
        if not chosen and len(victims) == len(others):
            self._in_vain = (head, self._num_changes, self._step_id)
        for victim in chosen:
            self._preempt(draft, victim)

    def _claimed_in_vain(self, head: Sequence) -> bool:
        """A claim for it has failed, nobody has come or gone since, and nobody has outgrown a block."""
        failed, starts, step_id = self._in_vain
        return failed is head and starts == self._num_changes and self._step_id - step_id < BLOCK_SIZE

    def _shares(self) -> Shares:
        return Shares(self.running, self._max_running, self.blocks.num_blocks, self.queue.weight)

    def _catch_up(self, draft: Draft, behind: list[Sequence]) -> None:
        behind = [seq for seq in behind if seq.state is SequenceState.RUNNING]
        free = self.blocks.num_free
        if free < len(behind) and free < sum(blocks_missing(seq) for seq in behind):
            # Blocks run short, and what is scheduled can't be a victim any more: those to be spared go first.
            behind = most_expendable(behind, self._shares())[::-1]
        for seq in behind:
            if draft.budget == 0:
                return
            if seq.state is SequenceState.RUNNING and not seq.all_sampled:  # not preempted for another since
                self._schedule(draft, seq)

    def _schedule(self, draft: Draft, seq: Sequence) -> None:
        # Runs for every sequence of every step: what a decoding one has no use for is passed by.
        request, token_ids, start = seq.request, seq.token_ids, seq.num_computed
        num_prompt, num_known = len(request.prompt_ids), len(token_ids)
        num_tokens = num_known + seq.num_pending
        scores = request.sampling.prompt_logprobs is not None and seq.num_scored < seq.num_to_score
        count = min(num_tokens - start, draft.budget)
        if scores:
            # One at least, so that whoever is scheduled moves on.
            count = min(count, max(1, draft.score_budget))
        end = start + count
        if end > len(seq.block_ids) * BLOCK_SIZE:
            missing = blocks_for(end) - len(seq.block_ids)
            if missing > self.blocks.num_free and not self._make_room(draft, seq, missing):
                return
            seq.block_ids += tuple(self.blocks.allocate(missing))
        pending = end > num_known
        assert not pending or count == 1, "only a sequence's newest token can be missing on the host"
        samples = end == num_tokens and request.sampling.max_tokens > 0
        score_start = start
        targets: tuple[int, ...] = ()
        if scores:
            # Recomputed after a preemption, a position has been scored already.
            score_start = max(start, seq.num_scored)
            targets = tuple(token_ids[score_start + 1 : min(end, seq.num_to_score) + 1])
            draft.score_budget -= len(targets)
        draft.budget -= count
        draft.scheduled[seq] = ScheduledSequence(
            seq,
            seq.epoch,
            start,
            count,
            (0,) if pending else (token_ids[start],) if count == 1 else tuple(token_ids[start:end]),
            seq.block_ids,
            seq.slot,
            samples,
            pending,
            num_tokens - num_prompt,
            score_start,
            targets,
        )
        if seq.first_scheduled is None:
            seq.first_scheduled = draft.now
        if seq.num_charged < num_prompt:
            self._charge_prompt(seq, end, self._charges.prefill)
        seq.num_computed = end
        seq.num_pending += samples

    def _make_room(self, draft: Draft, seq: Sequence, missing: int) -> bool:
        """Preempt until `missing` blocks are free. False if `seq` itself had to go, or has to sit this step out.

        No order of victims can livelock: blocks run short only because some sequence decoded 16 tokens more, tokens are
        never lost, and there are only so many to be drawn.
        """
        while missing > self.blocks.num_free:
            victims = [s for s in self.running if s not in draft.scheduled and not s.all_sampled]
            shares = self._shares()
            victim = most_expendable(victims, shares)[0]
            if victim is seq and len(victims) + len(draft.scheduled) < len(self.running):
                return False  # someone's last token is in flight: its blocks come free when it is collected
            if victim is seq and most_expendable([seq, *draft.scheduled], shares)[0] is not seq:
                return False  # it would be someone else's turn to go, who goes when one that decodes needs a block
            self._preempt(draft, victim)
            if victim is seq:
                return False
        return True

    def _preempt(self, draft: Draft, seq: Sequence) -> None:
        """Back to the queue, before its tenant's others, to be computed anew.

        A token that a step in flight is drawing for it stays good: that step was submitted while the blocks and
        the adapter's slot were the sequence's own, and nothing later can reach back into it. It is collected
        before the next plan is made, so that the sequence never resumes with a token missing.
        """
        self._stop(seq)
        seq.state = SequenceState.WAITING
        seq.num_computed = 0
        seq.epoch += 1
        self._wait(seq, draft.now)
        self.num_preemptions += 1
        draft.preempted.append(seq.request_id)

    def _wait(self, seq: Sequence, now: float) -> None:
        self.adapters.joined(self.queue.push(seq), now)

    def _stop(self, seq: Sequence) -> None:
        lease = self.running.pop(seq)
        self._num_changes += 1
        self.blocks.release(seq.block_ids)
        seq.block_ids = ()
        seq.slot = -1
        if lease is not None:
            self._cache.release(lease)

    def _admit(self, draft: Draft, before: float = inf) -> None:
        """Start waiting sequences in the order of fairness, of tenants with a counter below `before`, while there is
        room of every kind.

        One that waits for its adapter is passed by. One that only waits for blocks is not: smaller ones behind it
        would starve it.
        """
        promised = -1
        while draft.budget:
            seq = self.queue.head()
            if seq is None or self._counter(seq) >= before:
                return
            if seq.num_pending or seq.request_id in draft.preempted:
                return  # what is in flight of it is collected before it resumes
            if promised < 0 and len(self.running) < draft.max_running:
                promised = sum(map(blocks_to_come, self.running))
            if len(self.running) == draft.max_running or not self._start(draft, seq, promised):
                return
            promised += blocks_to_come(seq)

    def _start(self, draft: Draft, seq: Sequence, promised: int) -> bool:
        """Give a waiting sequence its lease, the blocks that hold its prefix already, and its first slice. False
        if its tokens do not all fit beside the `promised` blocks that others need for theirs."""
        assert seq.num_pending == 0, f"request {seq.request_id} resumes while a token of it is in flight"
        found = self._found(seq)
        if self._blocks_short(seq, promised, found) > 0:
            return False
        self.adapters.left(self.queue.remove(seq), started=True)
        lease = None
        if (ref := seq.request.adapter) is not None:
            # It is there; its use counts from now, and a deletion since was of an old name.
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
            seq.num_cached = seq.num_computed
            self.prefix_queries += seq.num_prompt
            self.prefix_hits += seq.num_cached
        self._charge_prompt(seq, seq.num_computed, self._charges.cached)
        self._schedule(draft, seq)
        return True

    def _found(self, seq: Sequence) -> list[int]:
        """Blocks that hold the beginning of a waiting sequence already."""
        # The last token is always computed, found or not: its logits are needed, and they are not kept.
        findable = (seq.num_tokens - 1) // BLOCK_SIZE
        if seq.num_scored < seq.num_to_score:
            # Nor are those of a prefix: what is yet to be scored is computed anew.
            findable = seq.num_scored // BLOCK_SIZE
        return self.blocks.lookup(prefix.extend_keys(seq)[:findable])

    def _blocks_short(self, seq: Sequence, promised: int, found: list[int]) -> int:
        """How many blocks are missing, above 0, for a waiting sequence to start beside what others need."""
        room = self.blocks.num_free - self.blocks.num_idle(found) - promised
        return blocks_for(seq.num_tokens) - len(found) - room

    def _charge_prompt(self, seq: Sequence, end: int, cost: float) -> None:
        """Charge the prompt's positions up to `end` that were never charged before."""
        end = min(end, seq.num_prompt)
        if end > seq.num_charged:
            count, seq.num_charged = end - seq.num_charged, end
            self._charge(seq, count * cost)

    def _charge(self, seq: Sequence, units: float) -> None:
        """Charge what it would cost on the base model, by the price of its adapter."""
        adapter = seq.request.adapter
        self.queue.charge(seq, units if adapter is None else units * self._charges.price(adapter.rank))

    def check_integrity(self, live: Iterable[Sequence]) -> None:
        """Raise AssertionError unless the `live` sequences, and they alone, are here, each in one place and with
        what belongs there."""
        queued = check_places(live, self.running, self.queue)
        self.adapters.check_integrity(self.queue.line(seq) for seq in queued)
        self.blocks.check_integrity([seq.block_ids for seq in self.running])
