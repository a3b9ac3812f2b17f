"""A step plan as the flat tensors of a forward pass."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from loraplex.engine.execution.inputs import StepInputs
from loraplex.engine.execution.pooling import PooledRows, PooledRowsBuilder
from loraplex.engine.types import ScheduledSequence, StepPlan
from loraplex.kernels.attention import BLOCK_SIZE


@dataclass(frozen=True, slots=True)
class PromptRows:
    """The prompt positions that a step scores. `rows` [P] int64 says which of the logits' rows are of prompts,
    `targets` [P] int64 the token behind each. `slices` are (index in `plan.scheduled`, number of its rows, most likely
    tokens wanted for each), in the order of `rows`. `ranked`: the indices of those whose ranks are wanted."""

    rows: torch.Tensor
    targets: torch.Tensor
    slices: tuple[tuple[int, int, int], ...]
    ranked: frozenset[int] = frozenset()

    @property
    def num_top(self) -> int:
        return max(num_top for _, _, num_top in self.slices)


@dataclass(frozen=True, slots=True)
class WatchedRows:
    """Slices that nothing is sampled or scored of. Their last rows' logits are computed too: `rows` [W] int64 says
    which those are, `slices` the indices in `plan.scheduled`. KV that is not finite shows there, before it could be
    found as a prefix."""

    rows: torch.Tensor
    slices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FlatStep:
    """A plan, flattened. Sequences are ordered by adapter slot, base rows first, so that each adapter's rows are
    adjacent.

    `pooled` are the slices that are pooled; nothing else is wanted of them.
    `logits_rows` are those whose logits are wanted: `sampled_rows`, and those of `prompt_rows` and of `watched` where
    they are not None. Then `sampled_logits` [S] int64 says which of them are sampled; where it is None all are.
    `sampled[s]` is the index in `plan.scheduled` that sampled row s belongs to; the rows of a slice with drafts are
    adjacent, in order. `pending` pairs a row with the id of
    the request whose token the previous step samples. `segments` are (slot, first_row, num_rows), `logits_segments` the
    same over the rows of `logits_rows`. `failed` maps an index in `plan.scheduled` to what is wrong with its input; its
    rows hold harmless tokens.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    attention: Any
    fresh_blocks: torch.Tensor
    logits_rows: torch.Tensor
    sampled_rows: torch.Tensor
    sampled_logits: torch.Tensor | None
    prompt_rows: PromptRows | None
    watched: WatchedRows | None
    pooled: PooledRows | None
    sampled: tuple[int, ...]
    pending: tuple[tuple[int, str], ...]
    segments: tuple[tuple[int, int, int], ...]
    logits_segments: tuple[tuple[int, int, int], ...]
    failed: dict[int, str]
    num_rows: int


def flatten(plan: StepPlan, *, vocab_size: int, inputs: StepInputs) -> FlatStep:
    """`inputs` takes the step's numbers to the device."""
    scheduled = plan.scheduled
    order = sorted(range(len(scheduled)), key=lambda index: scheduled[index].slot)
    rows = _Rows(vocab_size)
    for index in order:
        rows.add(index, scheduled[index])
    return rows.send(inputs, [scheduled[index] for index in order])


class _Rows:
    """The rows of a step while slices are added to it, sorted by slot."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._token_ids: list[int] = []
        self._positions: list[int] = []
        self._fresh: list[int] = []
        self._logits_rows: list[int] = []
        self._sampled_logits: list[int] = []  # which of them are sampled
        self._scored: list[int] = []  # which are of prompts
        self._watched: list[int] = []  # and which are neither
        self._unseen: list[int] = []
        self._targets: list[int] = []
        self._slices: list[tuple[int, int, int]] = []
        self._ranked: set[int] = set()
        self._sampled: list[int] = []
        self._pending: list[tuple[int, str]] = []
        self._segments: list[tuple[int, int, int]] = []
        self._failed: dict[int, str] = {}
        self._pooled = PooledRowsBuilder()

    def add(self, index: int, item: ScheduledSequence) -> None:
        """The slice with this index in the plan."""
        slot, vocab_size, first, count = item.slot, self._vocab_size, len(self._token_ids), item.num_tokens
        tokens = item.token_ids
        if item.pending_input:
            self._pending.append((first, item.request_id))
        elif min((*tokens, *item.targets)) < 0 or max((*tokens, *item.targets)) >= vocab_size:
            # On a GPU a lookup beyond the embedding would end the whole process.
            self._failed[index] = f"a token id is not below the model's vocabulary size {vocab_size}"
            tokens = (0,) * count
        self._token_ids += tokens
        self._positions += range(item.start, item.start + count)
        self._fresh += _fresh_blocks(item)
        if item.targets:
            self._score(index, item, first)
        self._want_logits(index, item, first)
        if slot >= 0:
            if self._segments and self._segments[-1][0] == slot:
                _, start, length = self._segments[-1]
                self._segments[-1] = (slot, start, length + count)
            else:
                self._segments.append((slot, first, count))

    def _score(self, index: int, item: ScheduledSequence, first: int) -> None:
        """Want the log probabilities of a prompt's tokens."""
        num_scored, sampling = len(item.targets), item.request.sampling
        self._scored += range(len(self._logits_rows), len(self._logits_rows) + num_scored)
        start = first + item.score_start - item.start
        self._logits_rows += range(start, start + num_scored)
        self._targets += (0,) * num_scored if index in self._failed else item.targets
        self._slices.append((index, num_scored, sampling.prompt_logprobs or 0))
        if sampling.prompt_ranks:
            self._ranked.add(index)

    def _want_logits(self, index: int, item: ScheduledSequence, first: int) -> None:
        """Want what comes of the slice's last row: a token, hidden states, or only whether its numbers are finite. A
        slice with drafts samples before each of them too."""
        end = first + item.num_tokens
        if item.samples:
            named = item.request.sampling.logprob_token_ids
            if named and max(named) >= self._vocab_size:
                self._failed.setdefault(
                    index, f"a token id in logprob_token_ids is not below {self._vocab_size}"
                )
            count = 1 + len(item.drafted)
            self._sampled_logits += range(len(self._logits_rows), len(self._logits_rows) + count)
            self._logits_rows += range(end - count, end)
            self._sampled += (index,) * count
        elif item.pool_start is not None:
            self._pooled.add(index, item, first)
        elif not item.targets or item.score_start + len(item.targets) < item.start + item.num_tokens:
            self._watched.append(len(self._logits_rows))
            self._logits_rows.append(end - 1)
            self._unseen.append(index)

    def send(self, inputs: StepInputs, items: Sequence[ScheduledSequence]) -> FlatStep:
        """`items`: the slices in the order of their rows."""
        attention = inputs.attention(
            [item.num_tokens for item in items],
            [item.start + item.num_tokens for item in items],
            [item.block_ids for item in items],
        )
        all_rows = inputs.logits_rows(self._logits_rows)
        all_sampled = len(self._sampled_logits) == len(self._logits_rows)
        return FlatStep(
            token_ids=inputs.rows("token_ids", self._token_ids),
            positions=inputs.rows("positions", self._positions),
            attention=attention,
            fresh_blocks=inputs.ints(self._fresh),
            logits_rows=all_rows,
            sampled_rows=all_rows
            if all_sampled
            else inputs.ints([self._logits_rows[row] for row in self._sampled_logits]),
            sampled_logits=None if all_sampled else inputs.ints(self._sampled_logits),
            prompt_rows=PromptRows(
                inputs.ints(self._scored),
                inputs.ints(self._targets),
                tuple(self._slices),
                frozenset(self._ranked),
            )
            if self._slices
            else None,
            watched=WatchedRows(inputs.ints(self._watched), tuple(self._unseen)) if self._watched else None,
            pooled=self._pooled.build(inputs),
            sampled=tuple(self._sampled),
            pending=tuple(self._pending),
            segments=tuple(self._segments),
            logits_segments=_segments_among(self._segments, self._logits_rows),
            failed=self._failed,
            num_rows=len(self._token_ids),
        )


def _segments_among(
    segments: list[tuple[int, int, int]], rows: list[int]
) -> tuple[tuple[int, int, int], ...]:
    """The segments of these rows of the step, which are in order, numbered as they stand there."""
    found = []
    for slot, first, count in segments:
        start, end = bisect_left(rows, first), bisect_left(rows, first + count)
        if end > start:
            found.append((slot, start, end - start))
    return tuple(found)


def _fresh_blocks(item: ScheduledSequence) -> tuple[int, ...]:
    """The blocks whose first position this slice writes."""
    first = -(-item.start // BLOCK_SIZE)
    return item.block_ids[first : -(-(item.start + item.num_tokens) // BLOCK_SIZE)]
