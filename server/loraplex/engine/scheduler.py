"""Which tokens are computed next. A function of its state, of the events told to it and of the time passed in:
no clock of its own, no thread, no torch.

There are no phases. A sequence has tokens, and some of them are computed; every plan lets the computed ones catch
up. A prompt that comes in chunks, one whose start is found in the prefix cache, a sequence that decodes and one
that starts over after a preemption differ only in how far behind they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from math import inf
from typing import Any

from loraplex.adapters.cache import AdapterCache, Lease, Residency
from loraplex.engine import prefix
from loraplex.engine.adapter_wait import AdapterWait, Line
from loraplex.engine.blocks import BlockManager
from loraplex.engine.config import BLOCK_SIZE, SchedulerConfig
from loraplex.engine.fairness import FairQueue, WaitingQueue
from loraplex.engine.types import ScheduledSequence, Sequence, SequenceState, StepPlan

_GROWTH = 1
"""Blocks that are kept for each running sequence to grow into before another one starts."""
MAX_ASKED = 8
"""Adapters that one step sends for anew."""
MAX_STUCK = 16
"""While so many adapters lie in host memory and wait for room on the device, no other is sent for."""
MAX_STUCK_OF_TENANT = 2
"""While one tenant has so many, no other of its is."""


def blocks_for(num_tokens: int) -> int:
    """How many blocks hold `num_tokens` positions."""
    return -(-num_tokens // BLOCK_SIZE)


@dataclass(slots=True)
class _Draft:
    """A plan in the making."""

    now: float
    budget: int  # tokens that still fit into the step
    score_budget: int  # positions whose logits may still be kept
    max_running: int
    scheduled: dict[Sequence, ScheduledSequence] = field(default_factory=dict)
    preempted: list[str] = field(default_factory=list)
    loading: dict[str, None] = field(default_factory=dict)  # digests that are on their way
    failed: dict[str, str] = field(default_factory=dict)  # those that can't come, and why


class Scheduler:
    """Owns the queue, the running sequences, the KV blocks and the sequences' leases.

    The core tells it what happens (`add`, `finish`, `computed`, `delivered`) and asks it for the next step
    (`plan`). A sequence that was added is in exactly one place, running or queued, until `finish`; `parked` knows
    which of the queued ones wait for their adapter. Who goes
    next is the `queue`'s to say; without one it is weighted fair queueing.
    """

    def __init__(
        self, config: SchedulerConfig, cache: AdapterCache[Any], *, queue: WaitingQueue | None = None
    ) -> None:
        self._cache = cache
        self._max_tokens = config.max_num_batched_tokens
        # Every running sequence must get a token into every step, or decodes could crowd each other out.
        self._max_running = min(config.max_num_seqs, config.max_num_batched_tokens)
        self._max_scored = config.max_scored_tokens
        self.blocks = BlockManager(config.num_blocks)
        self._charges = config.charges
        quantum = config.rules.quantum
        self._quantum = quantum = config.residency_quantum if quantum is None else quantum
        # Tenants that are less apart are level.
        self._slack = config.max_num_batched_tokens * config.charges.prefill
        self._put_off = False  # somebody, by the last plan
        self._rules = config.rules
        if queue is None:
            capacity = config.num_blocks * BLOCK_SIZE
            queue = FairQueue(
                config.charges, quantum=quantum, capacity=capacity, foresight=config.rules.foresight
            )
        self.queue = queue
        self.parked = AdapterWait(config.adapter_wait_aging_s, quantum)
        self.running: dict[Sequence, Lease | None] = {}  # in the order of admission
        self._kept_out: Sequence | None = None  # first in the queue, and the last plan had no room for it
        self.failed: list[tuple[Sequence, str]] = []
        self.num_preemptions = 0
        self.prefix_queries = 0
        self.prefix_hits = 0
        self._loading: dict[str, None] = {}  # by the last plan
        self._drained_for: Line | None = None
        self._draining: set[str] = set()
        self._lendable: frozenset[str] = frozenset()
        self._step_id = 0

    @property
    def num_waiting(self) -> int:
        """Sequences that have not started, or were preempted."""
        return len(self.queue)

    @property
    def num_ready(self) -> int:
        """Those of them that don't wait for an adapter."""
        return len(self.queue) - len(self.parked)

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
            self.queue.remove(seq)
        self.parked.discard(seq)
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
        self.queue.charge(seq, num_tokens * self._charges.decode * self._price(seq))

    def plan(self, now: float, max_tokens: int | None = None) -> StepPlan:
        """The next step, of at most `max_tokens` (None: as configured); its `scheduled` is empty if nothing can be
        computed now. Sequences whose adapter turned out not to be available are put into `failed` for the caller to
        end."""
        budget = self._max_tokens if max_tokens is None else max_tokens
        draft = _Draft(now, budget, min(self._max_scored, budget), min(self._max_running, budget))
        self._cache.begin_pass()
        self._keep_to(draft)
        self._make_way(draft)
        yielded = len(draft.preempted)
        decoding: list[Sequence] = []
        others: list[Sequence] = []
        for seq in self.running:
            lag = len(seq.token_ids) + seq.num_pending - seq.num_computed
            if lag == 1:
                decoding.append(seq)
            elif lag > 1:
                others.append(seq)
        self._catch_up(draft, decoding)
        if self._rules.prefill_by_rank and others:
            others.sort(key=lambda seq: self.queue.rank(seq.request.tenant_id))
            head = self.queue.head()
            if head is not None and not head.num_pending:
                rank = self.queue.rank(head.request.tenant_id)
                if rank < self.queue.rank(others[0].request.tenant_id):
                    self._lend(self._lendable & self._cache.on_device, now)
                    self._admit(draft, others[0])
        self._catch_up(draft, others)
        if not self._lendable <= self._cache.on_device:  # what was deleted is to be sent for again
            self._lend(self._lendable & self._cache.on_device, now)
        kept = self._send_for(draft)
        for digest, message in draft.failed.items():
            self.failed += [(seq, message) for seq in self.parked.of(digest)]
        self._lend(self._cache.on_device - kept, now)
        if len(draft.preempted) == yielded:  # else the newcomers would take the blocks that were just won
            self._admit(draft)
        loads = tuple(digest for digest in draft.loading if digest not in self._loading)
        self._loading = draft.loading
        self._step_id += 1
        return StepPlan(self._step_id, tuple(draft.scheduled.values()), tuple(draft.preempted), loads)

    # Running sequences.

    def _keep_to(self, draft: _Draft) -> None:
        """Fewer may run since steps have become smaller: preempt those who are too many."""
        excess = len(self.running) - draft.max_running
        if excess > 0:
            victims = [seq for seq in self.running if not _all_sampled(seq)]
            for seq in self._most_expendable(victims)[:excess]:
                self._preempt(draft, seq)

    def _make_way(self, draft: _Draft) -> None:
        """Preempt for the first in the queue, if the last plan had no room for it, those who must give way to its
        tenant; nobody if that would not be enough."""
        head, self._kept_out = self._kept_out, None
        if head is None or self.queue.head() is not head:
            return
        if self._rules.places and self._take_places(draft, head):
            return
        if self._rules.make_way == "none":
            return
        victims = [seq for seq in self.queue.giving_way(head, self.running) if not _all_sampled(seq)]
        if not victims:
            return
        missing = self._blocks_short(head, self._promised(), self._found(head))
        places = len(self.running) + 1 - draft.max_running
        if missing <= 0 and places <= 0:
            return  # others have ended since, and it has room
        victims = self._most_expendable(victims)
        given_up: Counter[int] = Counter()
        for count, victim in enumerate(victims, 1):
            missing -= self.blocks.num_freed(victim.block_ids, given_up) + self._to_come(victim)
            if missing <= 0 and count >= places:
                for chosen in victims[:count]:
                    self._preempt(draft, chosen)
                return

    def _take_places(self, draft: _Draft, head: Sequence) -> bool:
        """Preempt for the first in the queue sequences of the tenants that hold the most places or blocks by weight, as
        long as each is left with at least as much as its tenant has then. False if that is not enough."""
        missing = self._blocks_short(head, self._promised(), self._found(head))
        places = len(self.running) + 1 - draft.max_running
        if missing <= 0 and places <= 0:
            return True
        pool, seats = self.blocks.num_blocks, draft.max_running
        held: dict[str, list[float]] = {}  # of each tenant: sequences, blocks, weight
        of: dict[str, list[Sequence]] = {}
        for seq in self.running:
            tenant = held.setdefault(seq.request.tenant_id, [0, 0, seq.request.weight])
            tenant[0] += 1
            tenant[1] += len(seq.block_ids)
            if not _all_sampled(seq):
                of.setdefault(seq.request.tenant_id, []).append(seq)
        own = held.pop(head.request.tenant_id, [0, 0, 0])
        of.pop(head.request.tenant_id, None)
        taken = max((own[0] + 1) / seats, (own[1] + blocks_for(head.num_tokens)) / pool) / head.request.weight
        for seqs in of.values():
            seqs.sort(key=lambda seq: (-seq.request.priority, seq.order))
        chosen: list[Sequence] = []
        given_up: Counter[int] = Counter()
        while missing > 0 or places > 0:
            best, best_share = None, 0.0
            for tenant_id, seqs in of.items():
                if not seqs:
                    continue
                num, held_blocks, weight = held[tenant_id]
                left = max((num - 1) / seats, (held_blocks - len(seqs[-1].block_ids)) / pool) / weight
                share = max(num / seats, held_blocks / pool) / weight
                if left >= taken and share > best_share:
                    best, best_share = tenant_id, share
            if best is None:
                return False
            victim = of[best].pop()
            held[best][0] -= 1
            held[best][1] -= len(victim.block_ids)
            missing -= self.blocks.num_freed(victim.block_ids, given_up) + self._to_come(victim)
            places -= 1
            chosen.append(victim)
        for victim in chosen:
            self._preempt(draft, victim)
        return True

    def _catch_up(self, draft: _Draft, behind: list[Sequence]) -> None:
        free = self.blocks.num_free
        if free < len(behind) and free < sum(self._blocks_missing(seq) for seq in behind):
            # Blocks run short, and what is scheduled can't be a victim any more: those to be spared go first.
            behind = self._most_expendable(behind)[::-1]
        for seq in behind:
            if draft.budget == 0:
                return
            if seq.state is SequenceState.RUNNING and not _all_sampled(seq):
                self._schedule(draft, seq)

    def _schedule(self, draft: _Draft, seq: Sequence) -> None:
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

    def _make_room(self, draft: _Draft, seq: Sequence, missing: int) -> bool:
        """Preempt until `missing` blocks are free. False if `seq` itself had to go, or has to sit this step out.

        No order of victims can livelock: blocks run short only because some sequence decoded 16 tokens more, tokens are
        never lost, and there are only so many to be drawn.
        """
        while missing > self.blocks.num_free:
            victims = [s for s in self.running if s not in draft.scheduled and not _all_sampled(s)]
            victim = self._most_expendable(victims)[0]
            if victim is seq and len(victims) + len(draft.scheduled) < len(self.running):
                return False  # someone's last token is in flight: its blocks come free when it is collected
            if victim is seq and self._most_expendable([seq, *draft.scheduled])[0] is not seq:
                return False  # it would be someone else's turn to go, who goes when one that decodes needs a block
            self._preempt(draft, victim)
            if victim is seq:
                return False
        return True

    def _most_expendable(self, seqs: list[Sequence]) -> list[Sequence]:
        """In the order in which they are to be preempted: those of the tenant that got, and is about to get, the most.
        That is what who comes next is chosen by; by anything else those who just came would go again. Tenants within a
        step's tokens (over the smaller weight) of the first are level: then that goes whose newest is newest, as it has
        least to lose and, soon resumed, finds its KV. Of a tenant's the least urgent go first, then the latest."""
        if self._rules.victims == "share":
            share = self._shares()
            return sorted(
                seqs,
                key=lambda seq: (share[seq.request.tenant_id], -seq.request.priority, seq.order),
                reverse=True,
            )
        newest: dict[str, Sequence] = {}
        for seq in seqs:
            tenant = seq.request.tenant_id
            if tenant not in newest or seq.order > newest[tenant].order:
                newest[tenant] = seq
        ranks = {tenant: self.queue.rank(tenant) for tenant in newest}
        weights = {tenant: seq.request.weight for tenant, seq in newest.items()}
        first = max(ranks, key=ranks.__getitem__, default="")
        place: dict[str, tuple[float, int]] = {}
        for tenant, rank in ranks.items():
            level = self._rules.level and ranks[first] - rank <= self._slack / min(
                weights[first], weights[tenant]
            )
            place[tenant] = (inf if level else rank, newest[tenant].order)
        return sorted(
            seqs,
            key=lambda seq: (*place[seq.request.tenant_id], -seq.request.priority, seq.order),
            reverse=True,
        )

    def _shares(self) -> dict[str, float]:
        """Of each tenant, the larger of its parts of the places and of the blocks, over its weight."""
        held: dict[str, list[float]] = {}
        for seq in self.running:
            tenant = held.setdefault(seq.request.tenant_id, [0, 0, seq.request.weight])
            tenant[0] += 1
            tenant[1] += len(seq.block_ids)
        pool, seats = self.blocks.num_blocks, self._max_running
        return {
            name: max(num / seats, blocks / pool) / weight for name, (num, blocks, weight) in held.items()
        }

    def _preempt(self, draft: _Draft, seq: Sequence) -> None:
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
        self.queue.push(seq)
        self.parked.add(seq, now, self.queue.counter(seq.request.tenant_id))

    def _stop(self, seq: Sequence) -> None:
        lease = self.running.pop(seq)
        self.blocks.release(seq.block_ids)
        seq.block_ids = ()
        seq.slot = -1
        if lease is not None:
            self._cache.release(lease)

    # Waiting sequences.

    def _send_for(self, draft: _Draft) -> Collection[str]:
        """Go on with the adapters that are waited for. Returns those that may not be lent: while one that has
        precedence waits for room on the device, some must leave it, and no other is sent for.

        The cache evicts nothing that was asked for in the same pass. So what has precedence is asked for first; that
        also keeps its adapter there while its request waits for a place in the batch.
        """
        first = self.parked.precedence(draft.now, self.queue.counter)
        if first is not None:
            residency = self._ask(draft, first, _always)
            if residency is Residency.NO_ROOM and self._cache.state(first.ref.digest) == "warm":
                return self._drain(first)
        self._drained_for = None
        stuck: Counter[str] = Counter()
        for line in sorted(self.parked.coming(), key=lambda line: self.queue.counter(line.tenant_id)):
            stuck[line.tenant_id] += self._ask(draft, line, self._may_evict(line)) is Residency.NO_ROOM
        asked, begun = 0, True
        while begun and asked < MAX_ASKED and stuck.total() < MAX_STUCK:
            begun = False
            for line in self.parked.unasked(MAX_ASKED - asked):
                asked += 1
                if stuck[line.tenant_id] < MAX_STUCK_OF_TENANT:
                    residency = self._ask(draft, line, self._may_evict(line))
                    stuck[line.tenant_id] += residency is Residency.NO_ROOM
                    begun |= residency is Residency.LOADING
        return ()

    def _drain(self, line: Line) -> Collection[str]:
        """Adapters that nobody may begin to use, so that the one that this line waits for finds room: one at a time,
        that whose running requests can end the soonest. The others are lent on, and the batch stays full. What is
        pinned would not leave for it anyway."""
        if line is not self._drained_for:
            self._drained_for, self._draining = line, set()
        left: dict[str, int] = {}  # of those in use, the most tokens that one of its requests may draw yet
        for seq, lease in self.running.items():
            ref = seq.request.adapter
            if lease is not None and ref is not None and not self._cache.is_held(ref.digest):
                most = seq.request.sampling.max_tokens - seq.num_outputs
                left[ref.digest] = max(most, left.get(ref.digest, 0))
        if not left:
            return {digest for digest in self._cache.on_device if not self._cache.is_held(digest)}
        if self._draining.isdisjoint(left):
            self._draining.add(min(left, key=lambda digest: (left[digest], digest)))
        return self._draining

    def _ask(self, draft: _Draft, line: Line, may_evict: Callable[[str], bool]) -> Residency:
        """Ask for the adapter that a line waits for."""
        ref = line.ref
        residency = self._cache.request(ref, may_evict)
        if residency is Residency.FAILED:
            draft.failed[ref.digest] = self._cache.failure(ref.digest)
        elif residency is Residency.LOADING:
            draft.loading[ref.digest] = None
        sent_for = residency is Residency.LOADING or (
            residency is Residency.NO_ROOM and self._cache.state(ref.digest) == "warm"
        )
        if sent_for and self.parked.send_for(line):
            self.queue.charge(next(iter(line.seqs)), self._charges.load_per_rank * ref.rank)
        return residency

    def _may_evict(self, line: Line) -> Callable[[str], bool]:
        """What may leave the device for this line's adapter: nothing that somebody waits for whose tenant has not been
        served by more than a quantum beyond this one. So adapters are swapped once a quantum, not once a turn."""
        counter, quantum = self.queue.counter, self._quantum
        own = counter(line.tenant_id)

        def may_evict(digest: str) -> bool:
            return all(
                own - other.level > quantum
                if other.tenant_id == line.tenant_id
                else counter(other.tenant_id) - own > quantum
                for other in self.parked.lines(digest)
            )

        return may_evict

    def _lend(self, digests: Collection[str], now: float) -> None:
        """These adapters and no others may be lent out from now on."""
        if digests != self._lendable:
            before, self._lendable = self._lendable, frozenset(digests)
            self.parked.set_open(self._lendable, now, self.queue.counter)
            # Sorted: what follows from an order of sets would differ from one process to the next.
            for digest in sorted(before - self._lendable):
                self.queue.close(digest)
            for digest in sorted(self._lendable - before):
                self.queue.open(digest)

    def _admit(self, draft: _Draft, until: Sequence | None = None) -> None:
        """Start waiting sequences in the order of fairness, while there is room of every kind.

        One that waits for its adapter is passed by. One that only waits for blocks is not: smaller ones behind it
        would starve it.

        Who starts first need not wait for the prompts of tenants that got more by a step's tokens (over the smaller
        weight): those come with the next step, which takes everybody.
        """
        promised = -1
        first: Sequence | None = None
        may_put_off, self._put_off = self._rules.put_off and not self._put_off, False
        while draft.budget:
            seq = self.queue.head()
            if seq is None or seq.num_pending:
                return  # a token of who was just preempted is in flight: it resumes when it has been collected
            if until is not None and self.queue.rank(until.request.tenant_id) <= self.queue.rank(
                seq.request.tenant_id
            ):
                return
            if first is None:
                first, least = seq, self.queue.rank(seq.request.tenant_id)
            elif may_put_off and seq.request.tenant_id != first.request.tenant_id:
                slack = self._slack / min(first.request.weight, seq.request.weight)
                if self.queue.rank(seq.request.tenant_id) - least > slack:
                    self._put_off = True
                    return
            if promised < 0 and len(self.running) < draft.max_running:
                promised = self._promised()
            if len(self.running) == draft.max_running or not self._start(draft, seq, promised):
                self._kept_out = seq
                return
            promised += self._to_come(seq)

    def _start(self, draft: _Draft, seq: Sequence, promised: int) -> bool:
        """Give a waiting sequence its lease, the blocks that hold its prefix already, and its first slice. False
        if its tokens do not all fit beside the `promised` blocks that others need for theirs."""
        assert seq.num_pending == 0, f"request {seq.request_id} resumes while a token of it is in flight"
        found = self._found(seq)
        if self._blocks_short(seq, promised, found) > 0:
            return False
        self.queue.start(seq)
        self.parked.discard(seq, started=True)
        lease = None
        if (ref := seq.request.adapter) is not None:
            self._cache.request(
                ref
            )  # it is there; its use counts from now, and a deletion since was of an old name
            lease = self._cache.acquire(ref.digest)
        self.running[seq] = lease
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

    def _promised(self) -> int:
        """Blocks that the running sequences need, and those that they are about to need."""
        return sum(self._to_come(seq) for seq in self.running)

    def _to_come(self, seq: Sequence) -> int:
        """Blocks that a running sequence still needs for the tokens that it has, and one more if it may outgrow them:
        who is let in where the others are about to grow is preempted some steps later, its work done in vain."""
        # Asked of every running sequence in every step that might let one in.
        missing, room = 0, len(seq.block_ids) * BLOCK_SIZE
        if room < len(seq.token_ids) + seq.num_pending:
            missing = self._blocks_missing(seq)
            room += missing * BLOCK_SIZE
        return missing + self._rules.growth if seq.most_computed > room else missing

    def _charge_prompt(self, seq: Sequence, end: int, cost: float) -> None:
        """Charge the prompt's positions up to `end` that were never charged before."""
        end = min(end, seq.num_prompt)
        if end > seq.num_charged:
            count, seq.num_charged = end - seq.num_charged, end
            self.queue.charge(seq, count * cost * self._price(seq))

    def _price(self, seq: Sequence) -> float:
        adapter = seq.request.adapter
        return 1.0 if adapter is None else self._charges.price(adapter.rank)

    def _blocks_missing(self, seq: Sequence) -> int:
        """Blocks that a running sequence still needs for the tokens that it has."""
        return max(0, blocks_for(seq.num_tokens) - len(seq.block_ids))

    def check_integrity(self, live: Iterable[Sequence]) -> None:
        """Raise AssertionError unless the `live` sequences, and they alone, are here, each in one place and with
        what belongs there."""
        queued: set[Sequence] = set()
        alive: dict[str, int] = {}
        for seq in live:
            tenant = seq.request.tenant_id
            alive[tenant] = alive.get(tenant, 0) + 1
            places = (seq in self.running) + (seq in self.queue)
            assert places == 1, f"{seq.request_id} is in {places} places"
            if seq in self.running:
                assert seq.state is SequenceState.RUNNING, f"{seq.request_id} runs as {seq.state}"
                assert blocks_for(seq.num_computed) <= len(seq.block_ids), f"{seq.request_id} lacks blocks"
                assert seq.num_computed <= seq.num_tokens, f"{seq.request_id} is ahead of its tokens"
                lease = self.running[seq]
                assert (lease is None) == (seq.request.adapter is None), (
                    f"{seq.request_id} has the wrong lease"
                )
                assert seq.slot == (-1 if lease is None else lease.slot), (
                    f"{seq.request_id} has the wrong slot"
                )
            else:
                assert seq.state is SequenceState.WAITING, f"{seq.request_id} waits as {seq.state}"
                assert not seq.block_ids, f"{seq.request_id} waits, and holds blocks"
                assert seq.slot == -1, f"{seq.request_id} waits, and has a slot"
                queued.add(seq)
        places = len(self.running) + self.num_waiting
        assert places == sum(alive.values()), "a request that ended has kept its place"
        self.queue.check_integrity(alive, queued)
        self.parked.check_integrity(queued)
        self.blocks.check_integrity([seq.block_ids for seq in self.running])


def _always(digest: str) -> bool:
    return True


def _all_sampled(seq: Sequence) -> bool:
    """Its last token is drawn already, or is being drawn by a step in flight."""
    return 0 < seq.request.sampling.max_tokens <= seq.num_outputs + seq.num_pending
