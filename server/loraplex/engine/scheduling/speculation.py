"""Drafts in a step: which sequences get rows for guessed tokens, and how many.

A step of few rows is bound by reading weights, so that a few more rows cost less than steps of their own. After all
else is planned, each decoding sequence may propose a draft. Tenants take turns, the least served one first, each with
the row that it is most likely to get a token from. Of the rows in this order the step takes as many as make the
expected tokens by time the most; that may be none.

Drafts take only what others left: tokens of the step's budget, and free blocks while each sequence could still take one
more. They preempt nothing.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import chain, zip_longest
from typing import ParamSpec, TypeVar

from loraplex.engine.kv.sequence_blocks import SequenceBlocks
from loraplex.engine.scheduling.drafting import MAX_DRAFT, Draft, Drafter, DraftSource
from loraplex.engine.scheduling.step_draft import SMALL_STEP, StepDraft
from loraplex.engine.scheduling.timing.step_costs import StepCosts
from loraplex.engine.types import ScheduledSequence, Sequence
from loraplex.kernels.attention import BLOCK_SIZE

_log = logging.getLogger(__name__)
_Given = ParamSpec("_Given")
_Told = TypeVar("_Told")

LEAST_GAIN = 1.05
"""A step takes drafts only if the expected tokens by time grow by this factor: costs are measured, not exact.
`python -m bench.speculation.replay` compares factors."""


class Speculation:
    """The drafts of an engine. `drafter` proposes them; `costs` are those of steps by their rows. Answers need no
    drafts: if the drafter raises anything, it is logged, and nothing is drafted from then on."""

    def __init__(self, drafter: Drafter, costs: StepCosts, *, least_gain: float = LEAST_GAIN) -> None:
        self.drafter = drafter
        self._costs = costs
        self._least_gain = least_gain
        self._sources: dict[Sequence, DraftSource] = {}  # of drafts in flight
        self._unkept: set[Sequence] = set()  # live ones of versions that are gone
        self._has_failed = False

    def extend(self, draft: StepDraft, blocks: SequenceBlocks, counter: Callable[[Sequence], float]) -> None:
        """Add drafts to slices of a step that is planned otherwise. `counter` gives the service of a sequence's tenant:
        less goes first."""
        rows = draft.num_tokens
        num_sampled = sum(part.samples for part in chain(draft.scheduled.values(), draft.of_base))
        room = min(SMALL_STEP - rows, draft.budget, draft.max_running - num_sampled)
        if room <= 0 or self._has_failed:
            return
        drafts: dict[Sequence, Draft] = {}
        for seq, part in draft.scheduled.items():
            most = min(MAX_DRAFT, room, seq.request.sampling.max_tokens - part.output_index - 1)
            if part.state >= 0:
                most = min(most, _most_in_window(part.start))
            if (
                most > 0
                and _may_draft(part)
                and (found := self._ask(self.drafter.propose, seq, most)) is not None
            ):
                drafts[seq] = found
        if drafts:
            chosen = self._choose(drafts, counter, rows, num_sampled, room)
            spare = blocks.num_free - len(draft.scheduled)
            for seq, count in Counter(chosen).items():
                spare -= self._extend(draft, blocks, seq, drafts[seq], count, spare)

    def _choose(
        self,
        drafts: dict[Sequence, Draft],
        counter: Callable[[Sequence], float],
        rows: int,
        num_sampled: int,
        room: int,
    ) -> list[Sequence]:
        """The sequences of the at most `room` rows that a step of `rows` rows takes beside, each as often as it gets
        one."""
        by_tenant: dict[str, list[tuple[float, Sequence]]] = {}
        for seq in sorted(drafts, key=counter):
            lane = by_tenant.setdefault(seq.request.tenant_id, [])
            lane += [(gain, seq) for gain in drafts[seq].gains]
        for lane in by_tenant.values():
            lane.sort(key=lambda entry: -entry[0])
        turns = [entry for turn in zip_longest(*by_tenant.values()) for entry in turn if entry is not None]
        expected = float(num_sampled)
        best, best_count = self._least_gain * expected / self._costs.cost(rows), 0
        for count, (gain, _) in enumerate(turns[:room], start=1):
            expected += gain
            if (rate := expected / self._costs.cost(rows + count)) > best:
                best, best_count = rate, count
        return [seq for _, seq in turns[:best_count]]

    def _extend(
        self, draft: StepDraft, blocks: SequenceBlocks, seq: Sequence, found: Draft, count: int, spare: int
    ) -> int:
        """Add `count` tokens of a draft to the slice of its sequence, or none if they need more than `spare` blocks.
        Returns the number of blocks taken."""
        part = draft.scheduled[seq]
        drafted = found.token_ids[:count]
        end = part.start + 1 + count
        missing = blocks.missing_to(seq, end)
        if missing > max(0, spare):
            return 0
        if missing:
            blocks.extend(seq, missing)
        draft.scheduled[seq] = replace(
            part,
            num_tokens=1 + count,
            token_ids=(*part.token_ids, *drafted),
            block_ids=seq.block_ids,
            drafted=drafted,
        )
        draft.budget -= count
        self._sources[seq] = found.source
        return missing

    def verified(self, seq: Sequence, num_drafted: int, num_accepted: int) -> None:
        """A slice with drafts was computed: `num_accepted` of its `num_drafted` guesses were right."""
        self._ask(self.drafter.verified, seq, self._sources.pop(seq), num_drafted, num_accepted)

    def answered(self, seq: Sequence) -> None:
        """The answer of a sequence is complete: later ones of its namespace may repeat it."""
        if seq.request.speculation and not seq.aside and seq not in self._unkept:
            self._ask(self.drafter.finished, seq)

    def closed(self, seq: Sequence) -> None:
        """A sequence has ended, in whatever way."""
        self._sources.pop(seq, None)
        self._unkept.discard(seq)
        self._ask(self.drafter.closed, seq)

    def forget(self, digest: str, live: Iterable[Sequence]) -> None:
        """A version is gone: drop what is known of its answers. Those of its sequences that are `live` will not be
        kept either."""
        self._unkept.update(
            seq for seq in live if (ref := seq.request.adapter) is not None and ref.digest == digest
        )
        self._ask(self.drafter.forget, digest)

    def _ask(
        self, call: Callable[_Given, _Told], *given: _Given.args, **named: _Given.kwargs
    ) -> _Told | None:
        """A call to the drafter; None if it fails, or has failed before."""
        if self._has_failed:
            return None
        try:
            return call(*given, **named)
        except Exception:
            self._has_failed = True
            self.drafter.drop_all()
            _log.exception("the drafter failed: no token is drafted any more")
            return None


def _most_in_window(start: int) -> int:
    """Drafts behind the certain row at `start` of a model with windows: none is a window's last row, which writes a
    state."""
    return (BLOCK_SIZE - 2 - start) % BLOCK_SIZE


def _may_draft(part: ScheduledSequence) -> bool:
    """Whether a slice is one decoding step whose input the host knows."""
    request = part.request
    return part.samples and part.num_tokens == 1 and not part.pending_input and request.speculation
