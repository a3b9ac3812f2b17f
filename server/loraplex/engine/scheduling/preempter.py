"""Preemption in a step in the making: for the head of the queue, and for blocks that running sequences need."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from math import inf

from loraplex.engine.kv.sequence_blocks import SequenceBlocks, holds_blocks
from loraplex.engine.scheduling.fair_queue import FairQueue
from loraplex.engine.scheduling.preemption import TenantShares, choose_victims, preemption_order
from loraplex.engine.scheduling.step_draft import StepDraft
from loraplex.engine.types import Sequence
from loraplex.kernels.attention import BLOCK_SIZE


class Preempter:
    """Chooses which of the `running` sequences yield, and has `preempt` put them back. `num_changes` counts those that
    have started or stopped; the scheduler counts each."""

    def __init__(
        self,
        running: Collection[Sequence],
        queue: FairQueue,
        blocks: SequenceBlocks,
        max_running: int,
        preempt: Callable[[StepDraft, Sequence], None],
    ) -> None:
        self._running = running
        self._queue = queue
        self._blocks = blocks
        self._max_running = max_running
        self._preempt = preempt
        self._num_steps = 0
        self._failed_claim: tuple[Sequence | None, int, int] = (None, 0, 0)  # see _would_fail_again
        self.num_changes = 0

    def shares(self) -> TenantShares:
        return TenantShares(self._running, self._max_running, self._blocks.num_blocks, self._queue.weight)

    def begin_step(self, draft: StepDraft) -> None:
        """Where steps have become smaller, and fewer sequences may run, preempt the excess."""
        self._num_steps += 1
        excess = len(self._running) - draft.max_running
        if excess > 0:
            victims = [seq for seq in self._running if not seq.all_sampled]
            for seq in preemption_order(victims, self.shares())[:excess]:
                self._preempt(draft, seq)

    def positions_before_head(self, prefilling: list[Sequence]) -> int:
        """Positions of these prompts that come before the head of the queue."""
        level = inf if (head := self._queue.head()) is None else self._queue.counter(head.request.tenant_id)
        before = [seq for seq in prefilling if self._queue.counter(seq.request.tenant_id) <= level]
        return sum(seq.num_tokens - seq.num_computed for seq in before)

    def make_room(
        self, draft: StepDraft, num_decoding: int, before: int, cached: Callable[[Sequence], list[int]]
    ) -> None:
        """Preempt sequences of tenants with a larger share, if the head of the queue lacks a place or blocks. Preempt
        none if that would not be enough, or if sequences before the head use up the step: those that decode, and
        `before` positions of prompts. `cached` finds the blocks that hold its beginning."""
        head = self._queue.head()
        if head is None or head.num_pending or self._would_fail_again(head):
            return
        if num_decoding + before >= draft.budget:
            return
        reserved = sum(map(self._blocks.reserved, self._running))
        missing = self._blocks.short(head, reserved, cached(head))
        places = len(self._running) + 1 - draft.max_running
        if missing <= 0 and places <= 0:
            return
        given_up: Counter[int] = Counter()

        def is_enough(victim: Sequence) -> bool:
            nonlocal missing, places
            missing -= self._blocks.num_freed(self._blocks.held(victim.block_ids), given_up)
            missing -= self._blocks.reserved(victim)
            places -= 1
            return missing <= 0 and places <= 0

        # A victim of a less served tenant with a backlog would be the head again. A tenant without one is lifted to the
        # head's level.
        level = self._queue.counter(head.request.tenant_id)
        others = [seq for seq in self._running if not seq.all_sampled]
        victims = [
            seq
            for seq in others
            if self._queue.counter(seq.request.tenant_id) >= level
            or not self._queue.is_backlogged(seq.request.tenant_id)
        ]
        chosen = choose_victims(
            head, self._blocks.needs.of(head.num_tokens), victims, self.shares(), is_enough
        )
        if not chosen and len(victims) == len(others):
            self._failed_claim = (head, self.num_changes, self._num_steps)
        for victim in chosen:
            self._preempt(draft, victim)

    def _would_fail_again(self, head: Sequence) -> bool:
        """Preemption for this head has failed, and since then no sequence has started, stopped or outgrown a block."""
        failed, changes, step = self._failed_claim
        return failed is head and changes == self.num_changes and self._num_steps - step < BLOCK_SIZE

    def free_blocks(self, draft: StepDraft, seq: Sequence, missing: int) -> bool:
        """Preempt until `missing` blocks are free. False if `seq` itself was preempted, or must skip this step.

        No order of victims can livelock: blocks run short only because a sequence decoded 16 more tokens, tokens are
        never lost, and their number is bounded.
        """
        while missing > self._blocks.num_free:
            victims = [s for s in self._running if s not in draft.scheduled and holds_blocks(s)]
            shares = self.shares()
            victim = preemption_order(victims, shares)[0]
            if victim is seq and len(victims) + len(draft.scheduled) < len(self._running):
                # Another's last token is in flight: its blocks become free when it is collected; or is measured.
                return False
            if victim is seq and preemption_order([seq, *draft.scheduled], shares)[0] is not seq:
                return False  # a scheduled sequence is before it, and is preempted when a decoding one needs blocks
            self._preempt(draft, victim)
            if victim is seq:
                return False
        return True
