"""Background sequences, which run in what all others leave.

The others are planned first, as if there were no background sequences: these hold no place in the batch and no lease,
and their blocks are given up before each step that may need them. While any other sequence waits, for whatever reason,
none of them is computed. What is left of a step is theirs up to a small number of tokens, so that a request that
arrives meanwhile finds a short step in flight.

They neither find KV in the prefix cache nor leave any there. The content of cached blocks is lost to them only where no
empty block is left, and they hold at most `BLOCKS_SHARE` of the pool.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain, islice
from typing import Any

from loraplex.adapters.cache.adapter_cache import AdapterCache
from loraplex.adapters.ref import AdapterRef
from loraplex.engine.kv.sequence_blocks import SequenceBlocks
from loraplex.engine.scheduling.step_draft import SMALL_STEP, StepDraft
from loraplex.engine.types import Sequence, SequenceState

MAX_BACKGROUND = 256
"""Background sequences in the engine. More are refused."""
BLOCKS_SHARE = 4
"""All background sequences together hold at most one in this number of the pool's blocks; one alone may hold more."""
TOKENS_SHARE = 8
"""Beside other sequences a step has one background token for this number of theirs; 1 at least."""
_MAX_PREFETCHED = 4
"""Adapters of waiting background sequences that are asked for at a time."""


class BackgroundSequences:
    """The waiting background sequences, and those that have `begun` and hold blocks. Both are in the order of
    arrival."""

    def __init__(self, blocks: SequenceBlocks, cache: AdapterCache[Any]) -> None:
        self._blocks = blocks
        self._cache = cache
        self._waiting: dict[Sequence, None] = {}
        self.begun: dict[Sequence, None] = {}

    def __len__(self) -> int:
        return len(self._waiting) + len(self.begun)

    @property
    def num_blocks(self) -> int:
        """KV blocks that they hold."""
        return sum(seq.num_held for seq in self.begun)

    @property
    def is_ready(self) -> bool:
        """Whether one could be computed if no other sequence waits or runs."""
        return any(self._has_adapter(seq) for seq in chain(self.begun, self._waiting))

    def add(self, seq: Sequence) -> None:
        self._waiting[seq] = None
        self._prefetch()

    def remove(self, seq: Sequence) -> None:
        """A sequence has ended: release its blocks."""
        self._blocks.drop(seq)
        seq.slot = -1
        self._waiting.pop(seq, None)
        self.begun.pop(seq, None)

    def make_room(self, running: Iterable[Sequence], queued: Iterable[Sequence]) -> None:
        """Give up blocks and state slots, the latest sequence's first, until as many are free as the other sequences
        may take in this step: those that run, and all that are queued."""
        if not self.begun:
            return
        wanted = [*map(self._blocks.wanted, queued)]
        needed, states = sum(map(self._blocks.reserved, running)) + sum(wanted), self._blocks.states
        while self.begun and (needed > self._blocks.num_free or states.lacks(len(wanted))):
            self._stop(next(reversed(self.begun)))

    def plan(self, draft: StepDraft, places: int, schedule: Callable[[StepDraft, Sequence], None]) -> None:
        """Add slices to a step in which all others have theirs, with `places` left in the batch. `schedule` adds one
        of at most the draft's budget. No other sequence may wait."""
        if not len(self):
            return
        others = draft.num_tokens
        left = min(draft.budget, SMALL_STEP if not others else max(1, others // TOKENS_SHARE))
        kept, draft.budget = draft.budget - left, left
        for seq in list(self.begun):
            if not self._has_adapter(seq):
                self._stop(seq)
        first = len(draft.scheduled)
        for seq in chain(list(self.begun), list(self._waiting)):
            if draft.budget == 0 or len(draft.scheduled) - first >= places:
                break
            if seq in self.begun or self._may_begin(seq):
                self._schedule(draft, seq, schedule)
        draft.budget += kept
        self._prefetch()

    def _schedule(
        self, draft: StepDraft, seq: Sequence, schedule: Callable[[StepDraft, Sequence], None]
    ) -> None:
        lag = seq.num_tokens - seq.num_computed
        end = seq.num_computed + min(lag, draft.budget)
        if lag == 0 or seq.all_sampled or self._blocks.missing_to(seq, end) > self._blocks.num_free:
            return
        if seq in self._waiting:
            del self._waiting[seq]
            self.begun[seq] = None
            seq.state = SequenceState.RUNNING
            self._blocks.begin(seq, [])
        ref = seq.request.adapter
        seq.slot = -1 if ref is None else self._cache.slot(ref.digest)
        schedule(draft, seq)

    def _may_begin(self, seq: Sequence) -> bool:
        """Whether a waiting sequence may hold blocks, up to its longest answer's, beside those that have begun."""
        if seq.num_pending or not self._has_adapter(seq) or self._blocks.states.lacks(1):
            return False  # its tokens in flight are collected before it resumes
        if not self.begun:
            return True
        wanted = sum(self._blocks.needs.of(other.most_computed) for other in (*self.begun, seq))
        return wanted <= self._blocks.num_blocks // BLOCKS_SHARE

    def _stop(self, seq: Sequence) -> None:
        """Put a sequence back among those that wait, to be computed again. See `Scheduler._preempt` for the tokens that
        a step in flight samples for it."""
        self._blocks.drop(seq)
        seq.slot = -1
        seq.state = SequenceState.WAITING
        seq.lost_until = max(seq.lost_until, seq.num_computed)
        seq.num_computed = 0
        seq.epoch += 1
        del self.begun[seq]
        self._waiting = {seq: None, **self._waiting}

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
