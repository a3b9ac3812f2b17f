"""A step plan as the flat tensors of a forward pass."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from loraplex.engine.execution.inputs import (
    HeadSource,
    Segments,
    StepAdapters,
    StepInputs,
    begin_adapters,
)
from loraplex.engine.execution.riders.arrivals import ArrivalSource, ArrivingAdapters
from loraplex.engine.execution.riders.finite import FiniteChecks
from loraplex.engine.execution.riders.pooling import PooledSlices
from loraplex.engine.execution.riders.prompt_scores import PromptScores
from loraplex.engine.execution.riders.rider import Rider
from loraplex.engine.execution.riders.tokens import Tokens
from loraplex.engine.execution.step_results import RowFailure, RowResult
from loraplex.engine.kv.layers import blocks_for
from loraplex.engine.kv.prefix_blocks import GIVEN_BACK
from loraplex.engine.types import ScheduledSequence, StepPlan
from loraplex.kernels.recurrent.types import RecurrentRows, RecurrentUnit


@dataclass(frozen=True, slots=True)
class FlatStep:
    """A plan, flattened, on the device."""

    token_ids: torch.Tensor
    """[rows] int64, and the padding of a recorded pass behind them."""
    positions: torch.Tensor
    attention: tuple[Any, ...]
    """The batch as the model's attention takes it, for each group of layers."""
    fresh_blocks: torch.Tensor
    """The KV blocks whose first position is written."""
    logits_rows: torch.Tensor
    """The rows whose logits are wanted."""
    hidden_rows: torch.Tensor | None
    """The rows whose hidden states are wanted."""
    recurrent: RecurrentRows | None
    """The sequences, for layers that keep a state."""
    adapters: StepAdapters
    tokens: Tokens
    riders: tuple[Rider, ...]
    """All that is wanted beside the tokens, in the order in which it is computed, before them."""
    enter_layer: Callable[[int], None] | None
    """A call before each layer, where adapters are still arriving."""


class StepRows:
    """The rows of a step on the host. Slices are ordered by adapter slot, base rows first, so that each adapter's rows
    are adjacent."""

    def __init__(
        self,
        plan: StepPlan,
        vocab_size: int,
        num_groups: int = 1,
        heads: HeadSource | None = None,
        adapters: ArrivalSource | None = None,
    ) -> None:
        """`num_groups`: of the model's layers, by their blocks. `adapters`: None where all are there."""
        scheduled = plan.scheduled
        order = sorted(range(len(scheduled)), key=lambda index: scheduled[index].slot)
        self.tokens = Tokens()
        self.segments: list[tuple[int, int, int]] = []
        """(slot, first row, rows) of each adapter."""
        self.results = [RowResult() for _ in scheduled]
        """In the order of the plan. Where a slice's input is wrong this says so, and its rows hold harmless tokens."""
        self._vocab_size = vocab_size
        self._num_groups = num_groups
        self._heads = heads
        self._items = [scheduled[index] for index in order]
        self._token_ids: list[int] = []
        self._positions: list[int] = []
        self._fresh: list[int] = []
        self._logits_rows: list[int] = []
        self._scores: PromptScores | None = None
        self._pooled: PooledSlices | None = None
        self._checks: FiniteChecks | None = None
        for index, item in zip(order, self._items, strict=True):
            self._add(index, item)
        self._arriving = None if adapters is None else _arriving(adapters, scheduled, self.segments)
        riders: tuple[Rider | None, ...] = (self._arriving, self._scores, self._pooled, self._checks)
        self.riders = tuple(rider for rider in riders if rider is not None)

    @property
    def num_rows(self) -> int:
        return len(self._token_ids)

    @property
    def num_slices(self) -> int:
        return len(self._items)

    @property
    def decodes(self) -> bool:
        """Whether every slice is one row, and sampled."""
        return len(self._token_ids) == len(self._items) == len(self.tokens.rows)

    @property
    def prevents_replay(self) -> bool:
        return self.tokens.prevents_replay or any(rider.prevents_replay for rider in self.riders)

    def _add(self, index: int, item: ScheduledSequence) -> None:
        """The slice with this index in the plan."""
        slot, vocab_size, first, count = item.slot, self._vocab_size, len(self._token_ids), item.num_tokens
        tokens = item.token_ids
        if item.pending_input:
            self.tokens.want_input(first, item.request_id)
        elif min((*tokens, *item.targets)) < 0 or max((*tokens, *item.targets)) >= vocab_size:
            # On a GPU a lookup beyond the embedding would end the whole process.
            reason = f"a token id is not below the model's vocabulary size {vocab_size}"
            self.results[index].failed = RowFailure(reason, "input")
            tokens = (0,) * count
        self._token_ids += tokens
        self._positions += range(item.start, item.start + count)
        self._fresh += _fresh_blocks(item, self._num_groups)
        if item.targets:
            self._score(index, item, first)
        self._want(index, item, first)
        if slot >= 0:
            if self.segments and self.segments[-1][0] == slot:
                _, start, length = self.segments[-1]
                self.segments[-1] = (slot, start, length + count)
            else:
                self.segments.append((slot, first, count))

    def _score(self, index: int, item: ScheduledSequence, first: int) -> None:
        """Want the log probabilities of a prompt's tokens. `first`: the slice's first row."""
        self._scores = self._scores or PromptScores()
        self._scores.want(index, item, len(self._logits_rows), failed=self.results[index].failed is not None)
        start = first + item.score_start - item.start
        self._logits_rows += range(start, start + len(item.targets))

    def _want(self, index: int, item: ScheduledSequence, first: int) -> None:
        """Want what comes of the slice's last row: a token, hidden states, or only whether its numbers are finite. A
        slice with drafts samples before each of them too."""
        end, row = first + item.num_tokens, len(self._logits_rows)
        if item.samples:
            named = item.request.sampling.logprob_token_ids
            if named and max(named) >= self._vocab_size:
                reason = f"a token id in logprob_token_ids is not below {self._vocab_size}"
                self.results[index].failed = self.results[index].failed or RowFailure(reason, "input")
            self.tokens.want(index, item, row, failed=self.results[index].failed is not None)
            self._logits_rows += range(end - 1 - len(item.drafted), end)
        elif item.pool_start is not None:
            self._pooled = self._pooled or PooledSlices(self._heads)
            self._pooled.want(index, item, first)
        elif not item.targets or item.score_start + len(item.targets) < item.start + item.num_tokens:
            self._checks = self._checks or FiniteChecks()
            self._checks.want(index, row)
            self._logits_rows.append(end - 1)

    def send(self, inputs: StepInputs) -> FlatStep:
        """`inputs` takes the step's numbers to the device."""
        items = self._items
        attention = inputs.attention(
            [item.num_tokens for item in items],
            [item.start + item.num_tokens for item in items],
            [
                [_table(item.block_ids[group :: self._num_groups]) for item in items]
                for group in range(self._num_groups)
            ],
        )
        token_ids = inputs.rows("token_ids", self._token_ids)
        logits_rows = inputs.logits_rows(self._logits_rows)
        self.tokens.place(inputs, token_ids, self._logits_rows, logits_rows)
        for rider in self.riders:
            rider.send(inputs)
        return FlatStep(
            token_ids=token_ids,
            positions=inputs.rows("positions", self._positions),
            attention=attention,
            fresh_blocks=inputs.ints(self._fresh),
            logits_rows=logits_rows,
            hidden_rows=None if self._pooled is None else self._pooled.rows,
            recurrent=self._send_recurrent(inputs) if self._items[0].state >= 0 else None,
            adapters=begin_adapters(
                inputs,
                self.segments,
                self.num_rows,
                _segments_among(self.segments, self._logits_rows),
                len(self._logits_rows),
            ),
            tokens=self.tokens,
            riders=self.riders,
            enter_layer=None if self._arriving is None else self._arriving.enter_layer,
        )

    def _send_recurrent(self, inputs: StepInputs) -> RecurrentRows:
        """A sequence with two slices, first of the base and then of its adapter, is one unit."""
        units: list[RecurrentUnit] = []
        going_on: dict[tuple[str, int], int] = {}  # by request and next position
        first = 0
        for item in self._items:
            rows = [*range(first, first + item.num_tokens)]
            first += item.num_tokens
            unit = RecurrentUnit(rows, item.start, item.window_slot, item.state, item.state_targets)
            if (index := going_on.get((item.request_id, item.start))) is not None:
                before = units[index]
                targets = (*before.targets, *item.state_targets)
                units[index] = before._replace(rows=(*before.rows, *rows), targets=targets)
                continue
            going_on[item.request_id, item.start + item.num_tokens] = len(units)
            units.append(unit)
        return inputs.recurrent(units)


def _arriving(
    adapters: ArrivalSource, scheduled: Sequence[ScheduledSequence], segments: Segments
) -> ArrivingAdapters | None:
    found = {slot: adapters.arrival(slot) for slot, _, _ in segments}
    arrivals = {slot: arrival for slot, arrival in found.items() if arrival is not None}
    slots = {index: item.slot for index, item in enumerate(scheduled) if item.slot in arrivals}
    return ArrivingAdapters(arrivals, slots) if arrivals else None


def _segments_among(segments: Segments, rows: Sequence[int]) -> Segments:
    """The segments of these rows of the step, which are in order, numbered as they stand there."""
    found = []
    for slot, first, count in segments:
        start, end = bisect_left(rows, first), bisect_left(rows, first + count)
        if end > start:
            found.append((slot, start, end - start))
    return found


def _table(block_ids: tuple[int, ...]) -> tuple[int, ...]:
    """The table of one group of layers. A block that was given back is not read; where a kernel loads it all the same,
    it finds one of the sequence's own."""
    if block_ids[0] != GIVEN_BACK:
        return block_ids
    given = block_ids.count(GIVEN_BACK)
    return (block_ids[given],) * given + block_ids[given:]


def _fresh_blocks(item: ScheduledSequence, num_groups: int) -> tuple[int, ...]:
    """The blocks whose first position this slice writes."""
    first, end = blocks_for(item.start), blocks_for(item.start + item.num_tokens)
    return item.block_ids[first * num_groups : end * num_groups]
