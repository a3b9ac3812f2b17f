"""A step plan as the flat tensors of a forward pass. Everything a step needs of its sequences is copied here, on
the thread that planned it: they may change while the step runs."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import Any

import torch

from loraplex.engine.config import BLOCK_SIZE
from loraplex.engine.execution.inputs import StepInputs
from loraplex.engine.execution.pooling import PooledRows, PooledRowsBuilder
from loraplex.engine.execution.site_probe import MeasuredSlice, measured_slices
from loraplex.engine.types import ScheduledSequence, StepPlan


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

    `pooled` are the slices that are pooled; nothing else is wanted of them. Those of `measured` are rows of the base.
    `logits_rows` are those whose logits are wanted: `sampled_rows`, and those of `prompt_rows` and of `watched` where
    they are not None. Then `sampled_logits` [S] int64 says which of them are sampled; where it is None all are.
    `sampled[s]` is the index in `plan.scheduled` that sampled row s belongs to. `pending` pairs a row with the id of
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
    measured: tuple[MeasuredSlice, ...]
    sampled: tuple[int, ...]
    pending: tuple[tuple[int, str], ...]
    segments: tuple[tuple[int, int, int], ...]
    logits_segments: tuple[tuple[int, int, int], ...]
    failed: dict[int, str]
    num_rows: int


def flatten(plan: StepPlan, *, vocab_size: int, inputs: StepInputs) -> FlatStep:
    """`inputs` takes the step's numbers to the device."""
    scheduled = plan.scheduled
    # A request that is measured is a row of the base's here: its adapter's numbers may be infinite.
    slots = [-1 if item.seq.request.measured else item.slot for item in scheduled]
    order = sorted(range(len(scheduled)), key=slots.__getitem__)
    token_ids: list[int] = []
    positions: list[int] = []
    fresh: list[int] = []
    logits_rows: list[int] = []
    sampled_logits: list[int] = []  # which of them are sampled
    scored: list[int] = []  # which are of prompts
    watched: list[int] = []  # and which are neither
    unseen: list[int] = []
    targets: list[int] = []
    slices: list[tuple[int, int, int]] = []
    ranked: set[int] = set()
    sampled: list[int] = []
    pending: list[tuple[int, str]] = []
    segments: list[tuple[int, int, int]] = []
    failed: dict[int, str] = {}
    pooled = PooledRowsBuilder()
    for index in order:
        item = scheduled[index]
        first, count = len(token_ids), item.num_tokens
        tokens = item.token_ids
        if item.pending_input:
            pending.append((first, item.seq.request_id))
        elif min((*tokens, *item.targets)) < 0 or max((*tokens, *item.targets)) >= vocab_size:
            # On a GPU a lookup beyond the embedding would end the whole process.
            failed[index] = f"a token id is not below the model's vocabulary size {vocab_size}"
            tokens = (0,) * count
        token_ids += tokens
        positions += range(item.start, item.start + count)
        fresh += _fresh_blocks(item)
        if item.targets:
            num_scored = len(item.targets)
            scored += range(len(logits_rows), len(logits_rows) + num_scored)
            start = first + item.score_start - item.start
            logits_rows += range(start, start + num_scored)
            targets += (0,) * num_scored if index in failed else item.targets
            slices.append((index, num_scored, item.seq.request.sampling.prompt_logprobs or 0))
            if item.seq.request.sampling.prompt_ranks:
                ranked.add(index)
        if item.samples:
            named = item.seq.request.sampling.logprob_token_ids
            if named and max(named) >= vocab_size:
                failed.setdefault(index, f"a token id in logprob_token_ids is not below {vocab_size}")
            sampled_logits.append(len(logits_rows))
            logits_rows.append(first + count - 1)
            sampled.append(index)
        elif item.pool_start is not None:
            pooled.add(index, item, first)
        elif not item.targets or item.score_start + len(item.targets) < item.start + count:
            watched.append(len(logits_rows))
            logits_rows.append(first + count - 1)
            unseen.append(index)
        if slots[index] >= 0:
            if segments and segments[-1][0] == slots[index]:
                slot, start, length = segments[-1]
                segments[-1] = (slot, start, length + count)
            else:
                segments.append((slots[index], first, count))
    attention = inputs.attention(
        [scheduled[i].num_tokens for i in order],
        [scheduled[i].start + scheduled[i].num_tokens for i in order],
        [scheduled[i].block_ids for i in order],
    )
    all_rows = inputs.logits_rows(logits_rows)
    all_sampled = len(sampled_logits) == len(logits_rows)
    return FlatStep(
        token_ids=inputs.rows("token_ids", token_ids),
        positions=inputs.rows("positions", positions),
        attention=attention,
        fresh_blocks=inputs.ints(fresh),
        logits_rows=all_rows,
        sampled_rows=all_rows if all_sampled else inputs.ints([logits_rows[row] for row in sampled_logits]),
        sampled_logits=None if all_sampled else inputs.ints(sampled_logits),
        prompt_rows=PromptRows(inputs.ints(scored), inputs.ints(targets), tuple(slices), frozenset(ranked))
        if slices
        else None,
        watched=WatchedRows(inputs.ints(watched), tuple(unseen)) if watched else None,
        pooled=pooled.build(inputs),
        measured=measured_slices(plan),
        sampled=tuple(sampled),
        pending=tuple(pending),
        segments=tuple(segments),
        logits_segments=_segments_among(segments, logits_rows),
        failed=failed,
        num_rows=len(token_ids),
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
