"""Background sequences, which run in what all others leave: shadows, and lines of batches.

The others are planned first, as if there were no background sequences: these hold no place in the batch and no lease,
and their blocks are given up before each step that may need them. While any other sequence waits, for whatever reason,
none of them is computed. What is left of a step is theirs up to a small number of tokens, so that a request that
arrives meanwhile finds a short step in flight.

Shadows neither find KV in the prefix cache nor leave any there. The content of cached blocks is lost to them only where
no empty block is left, and they hold at most `BLOCKS_SHARE` of the pool.

Lines come behind them, as far as others hardly notice it (`line_share`), in the order of their tenants' service over
their weights, and find and leave KV. A tenant with no line that has begun takes the place of the latest one of the
tenant with most. While no other request is here, lines leave the background (`batch_lines`), and may hold more of the
pool when they come back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from typing import Any

from loraplex.adapters.cache.adapter_cache import AdapterCache
from loraplex.adapters.ref import AdapterRef
from loraplex.engine.kv import prefix_keys
from loraplex.engine.kv.sequence_blocks import SequenceBlocks
from loraplex.engine.scheduling.background_turns import BackgroundTurns
from loraplex.engine.scheduling.charging import SequenceCharges
from loraplex.engine.scheduling.line_share import LineShare
from loraplex.engine.scheduling.step_draft import SMALL_STEP, StepDraft
from loraplex.engine.types import Sequence, SequenceState

MAX_BACKGROUND = 256
"""Shadows in the engine, and lines of batches. More are refused."""
BLOCKS_SHARE = 4
"""All background sequences together hold at most one in this number of the pool's blocks; one alone may hold more."""
TOKENS_SHARE = 8
"""Beside other sequences a step has one token of shadows for this number of theirs, 1 at least."""
_MAX_PREFETCHED = 4
"""Adapters of waiting background sequences that are asked for at a time."""


_Schedule = Callable[[StepDraft, Sequence], None]


class BackgroundSequences:
    """The waiting background sequences, and those that have `begun` and hold blocks. Both are in the order of
    arrival. `held` wait for their grammars, or for blocks from the disk. `turns` are those of the lines' tenants,
    wherever the lines are."""

    def __init__(
        self,
        blocks: SequenceBlocks,
        cache: AdapterCache[Any],
        turns: BackgroundTurns,
        charge: SequenceCharges,
    ) -> None:
        self._blocks = blocks
        self._charge = charge
        self._cache = cache
        self.turns = turns
        self.line_share = LineShare()
        self._waiting: dict[Sequence, None] = {}
        self.begun: dict[Sequence, None] = {}
        self.held: set[Sequence] = set()
        self._stopped: set[Sequence] = set()  # by the plan that is made
        self._num_live = {False: 0, True: 0}  # of shadows, of lines

    def num_live(self, *, batch: bool) -> int:
        """Shadows, or lines of a batch, that have not ended."""
        return self._num_live[batch]

    @property
    def has_lines(self) -> bool:
        """Whether lines wait here, for other things than their grammars, or have begun."""
        return self._num_live[True] > 0 and any(seq.request.batch for seq in self._here)

    @property
    def _here(self) -> Iterator[Sequence]:
        return chain(self.begun, self._waiting)

    @property
    def num_blocks(self) -> int:
        """KV blocks that they hold."""
        return sum(seq.num_held for seq in self.begun)

    def has_ready(self, *, batch: bool) -> bool:
        """Whether a shadow, or a line, could be computed if no other sequence waits or runs."""
        return self._num_live[batch] > 0 and any(
            seq.request.batch is batch and self._has_adapter(seq) for seq in self._here
        )

    def add(self, seq: Sequence, *, hold: bool = False) -> None:
        """With `hold`, it waits until `release`."""
        self._num_live[seq.request.batch] += 1
        if seq.request.batch:
            self.turns.enter(seq.request.tenant_id)
        seq.aside = True
        if hold:
            self.held.add(seq)
        else:
            self._waiting[seq] = None
            self._prefetch()

    def release(self, seq: Sequence) -> None:
        self.held.remove(seq)
        self._waiting[seq] = None

    def end(self, seq: Sequence) -> None:
        """A sequence has ended, here or elsewhere: release what it holds here."""
        self._num_live[seq.request.batch] -= 1
        if seq.request.batch:
            self.turns.leave(seq.request.tenant_id)
        if seq.aside:
            self._blocks.drop(seq, keeps=self._has_adapter(seq))
            seq.slot = -1
            self._waiting.pop(seq, None)
            self.begun.pop(seq, None)
            self.held.discard(seq)

    def take_lines(self) -> list[Sequence]:
        """All lines that wait or have begun leave the background; those that cannot go on wait."""
        for seq in [seq for seq in self.begun if seq.request.batch and not self._has_adapter(seq)]:
            self._stop(seq)
        lines = [seq for seq in self._here if seq.request.batch]
        for seq in lines:
            self.begun.pop(seq, None)
            self._waiting.pop(seq, None)
            seq.aside = False
        return lines

    def put_line(self, seq: Sequence) -> None:
        """A line comes back, with its blocks if it has begun."""
        seq.aside = True
        if seq in self._blocks.restoring:
            self._blocks.stop_restoring(seq)
            self._charge.found(seq)
        (self.begun if seq.state is SequenceState.RUNNING else self._waiting)[seq] = None

    def make_room(self, running: Iterable[Sequence], queued: Iterable[Sequence]) -> None:
        """Give up blocks and places, the latest sequence's first, until as many are free as the other sequences
        may take in this step: those that run, and all that are queued. Each plan begins with it."""
        self._stopped.clear()
        if not self.begun:
            return
        wanted = [*map(self._blocks.wanted, queued)]
        needed, places = sum(map(self._blocks.reserved, running)) + sum(wanted), self._blocks.places
        while self.begun and (needed > self._blocks.num_free or places.lacks(len(wanted))):
            self._stop(next(reversed(self.begun)))

    def plan(self, draft: StepDraft, places: int, schedule: _Schedule) -> None:
        """Add slices to a step in which all others have theirs, with `places` left in the batch. `schedule` adds one
        of at most the draft's budget. No other sequence may wait."""
        if not (self.begun or self._waiting):
            return
        others = draft.num_tokens
        for seq in list(self.begun):
            if not self._has_adapter(seq):
                self._stop(seq)
        places += len(draft.scheduled)
        with draft.within(SMALL_STEP if not others else max(1, others // TOKENS_SHARE)):
            for seq in [seq for seq in self._here if seq.request.is_shadow]:
                if draft.budget == 0 or len(draft.scheduled) >= places:
                    break
                if seq in self.begun or self._may_begin(seq):
                    self._schedule(draft, seq, schedule)
        if self._num_live[True] and (most := self.line_share.begin(draft, alone=not others)):
            with draft.within(most):
                self._plan_lines(draft, places, schedule)
            self.line_share.end(draft)
        self._prefetch()

    def _plan_lines(self, draft: StepDraft, places: int, schedule: _Schedule) -> None:
        """A line that waits for blocks is not passed by others that wait: smaller ones would starve it."""
        lines = [seq for seq in self._here if seq.request.batch]
        lines.sort(key=lambda line: self.turns.of(line.request.tenant_id))
        is_blocked = False
        for seq in lines:
            most = self.line_share.of_line(draft, seq)
            if most == 0 or len(draft.scheduled) >= places:
                return
            if seq not in self.begun:
                if is_blocked or self._is_in_flight(seq) or not self._has_adapter(seq):
                    continue
                if not self._takes_place(draft, seq):
                    is_blocked = True
                    continue
            with draft.within(most):
                self._schedule(draft, seq, schedule)

    def _takes_place(self, draft: StepDraft, seq: Sequence) -> bool:
        """Whether a waiting line may begin. The first one of its tenant may wherever it has blocks, if need be those of
        lines of a tenant that has two at least."""
        counts = Counter(other.request.tenant_id for other in self.begun if other.request.batch)
        if counts[seq.request.tenant_id]:
            return self._may_begin(seq)
        while self._blocks.wanted(seq) > self._blocks.num_free or self._blocks.lacks_place():
            most = max(counts.values(), default=0)
            victims = [
                other
                for other in self.begun
                if other.request.batch
                and counts[other.request.tenant_id] == most
                and other not in draft.scheduled
            ]
            if most < 2 or not victims:
                return False
            self._stop(victims[-1])
            counts[victims[-1].request.tenant_id] -= 1
        return True

    def _schedule(self, draft: StepDraft, seq: Sequence, schedule: _Schedule) -> None:
        if self._lacks(draft, seq):
            return
        if seq in self._waiting:
            self._begin(seq, draft.now)
            if self._lacks(draft, seq):
                return  # blocks of its prefix were free too
        ref = seq.request.adapter
        seq.slot = -1 if ref is None else self._cache.slot(ref.digest)
        schedule(draft, seq)

    def _lacks(self, draft: StepDraft, seq: Sequence) -> bool:
        """Whether a sequence has nothing to compute, or too few blocks for it."""
        end = min(seq.num_tokens, seq.num_computed + draft.budget)
        is_done = end == seq.num_computed or seq.all_sampled
        return is_done or self._blocks.missing_to(seq, end) > self._blocks.num_free

    def _begin(self, seq: Sequence, now: float) -> None:
        del self._waiting[seq]
        self.begun[seq] = None
        seq.state = SequenceState.RUNNING
        self._blocks.begin(seq, self._blocks.find(seq) if seq.request.batch else [])
        if seq in self._blocks.restoring:
            # It waits for no more of its prefix than what comes in this step.
            self._blocks.restore_at_once(seq, now)
        if seq.request.batch and seq.epoch == 0:
            seq.num_cached = prefix_keys.cached_prompt_tokens(seq)
        self._charge.prompt(seq, seq.num_computed, self._charge.prices.cached)

    def _may_begin(self, seq: Sequence) -> bool:
        """Whether a waiting sequence may hold blocks beside those that have begun."""
        if self._is_in_flight(seq) or not self._has_adapter(seq) or self._blocks.lacks_place():
            return False
        if not self.begun:
            return True
        return sum(map(self._most_blocks, (*self.begun, seq))) <= self._blocks.num_blocks // BLOCKS_SHARE

    def _most_blocks(self, seq: Sequence) -> int:
        """Blocks up to its longest answer's; of a line, which may be stopped for others, those that it needs now."""
        return self._blocks.wanted(seq) if seq.request.batch else self._blocks.needs.of(seq.most_computed)

    def _stop(self, seq: Sequence) -> None:
        """Put a sequence back among those that wait, to be computed again. See `Scheduler._preempt` for the tokens that
        a step in flight samples for it."""
        # Nothing gets a name of a version that may have been deleted.
        self._blocks.drop(seq, keeps=self._has_adapter(seq))
        seq.slot = -1
        seq.state = SequenceState.WAITING
        seq.lost_until = max(seq.lost_until, seq.num_computed)
        seq.num_computed = 0
        seq.epoch += 1
        del self.begun[seq]
        self._stopped.add(seq)
        self._waiting = {seq: None, **self._waiting}

    def _is_in_flight(self, seq: Sequence) -> bool:
        """Whether a step in flight may bring tokens, scores or hidden states of a waiting sequence. They are collected
        before it resumes, so that nothing is computed and told twice."""
        return seq.num_pending > 0 or seq in self._stopped

    def _has_adapter(self, seq: Sequence) -> bool:
        ref = seq.request.adapter
        return ref is None or ref.digest in self._cache.on_device

    def _prefetch(self) -> None:
        """Ask for adapters of waiting sequences, as far as there is free memory: nothing is evicted for them."""
        missing: dict[str, AdapterRef] = {}
        for seq in self._waiting:
            if (ref := seq.request.adapter) is not None and not self._has_adapter(seq):
                missing[ref.digest] = ref
        for ref in islice(missing.values(), _MAX_PREFETCHED):
            self._cache.prefetch(ref)
