"""Pooling on the device: hidden states in, parts of embeddings and logits out (see `loraplex.engine.pooling`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from loraplex.engine.execution.inputs import HeadSource
from loraplex.engine.execution.riders.rider import Copy, Forward, Rider
from loraplex.engine.execution.step_results import RowFailure, StepResult
from loraplex.engine.host_to_device import HostToDevice
from loraplex.engine.pooling import HEAD_TASKS, MAX_HIDDEN, PooledPart, fraction_bits
from loraplex.engine.types import ScheduledSequence

_BLOCK = 4 << 20
"""Numbers that are added at a time: 32 MB of int64."""


@dataclass(frozen=True, slots=True)
class _Slice:
    """A slice that is pooled, or watched alone: KV that is not finite shows in its hidden states."""

    index: int
    """In `plan.scheduled`."""
    first: int
    count: int
    """The slice's rows are `first` … `first`+`count`-1 of those whose hidden states are computed."""
    part: Literal["sums", "vectors", "logits"] | None
    """The kind of numbers that it gives; None: it is watched."""
    place: slice
    """Its numbers among those of its kind."""


class PooledSlices(Rider):
    """The pooled slices of a step; nothing else is wanted of them. `rows` [P] int64: the step's rows whose hidden
    states are wanted."""

    prevents_replay = True

    def __init__(self, heads: HeadSource | None = None) -> None:
        self.rows: torch.Tensor
        self._heads = heads
        self._rows: list[int] = []
        self._slices: list[_Slice] = []
        self._headless: list[int] = []
        """Slices for a head that is not there, by their index in the plan."""
        self._mean: list[tuple[int, int, float]] = []
        """A row of a mean each: its number in `_rows`, the place of the mean, and a power of two."""
        self._num_means = 0
        self._one: list[int] = []
        """The first row of each slice that gives one token's hidden state."""
        self._pairs: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []
        """The logits of each slice with a head: numbers in `_rows`, and the places of the labels' weights."""
        self._num_logits = 0
        self._mean_rows: torch.Tensor
        self._groups: torch.Tensor
        self._scales: torch.Tensor
        self._one_rows: torch.Tensor
        self._logit_rows: torch.Tensor
        self._labels: torch.Tensor
        self._found: dict[str, torch.Tensor] = {}
        """The computed numbers by kind."""
        self._ok: torch.Tensor

    def want(self, index: int, item: ScheduledSequence, first_row: int) -> None:
        """Pool the slice with this index in the plan, whose rows begin at `first_row` of the step."""
        assert item.pool_start is not None
        wanted = item.start + item.num_tokens - item.pool_start
        count = max(1, wanted)
        first = len(self._rows)
        end = first_row + item.num_tokens
        self._rows += range(end - count, end)
        if not wanted:
            self._slices.append(_Slice(index, first, count, None, slice(0, 0)))
        elif item.request.pooling == "mean":
            place, scale = self._num_means, 2.0 ** fraction_bits(item.num_prompt)
            self._num_means += 1
            self._mean += [(row, place, scale) for row in range(first, first + count)]
            self._slices.append(_Slice(index, first, count, "sums", slice(place, place + 1)))
        elif item.request.pooling in HEAD_TASKS:
            self._want_logits(index, item.slot, first, count)
        else:
            self._slices.append(
                _Slice(index, first, count, "vectors", slice(len(self._one), len(self._one) + 1))
            )
            self._one.append(first)

    def _want_logits(self, index: int, slot: int, first: int, count: int) -> None:
        labels = None if self._heads is None else self._heads.head_rows(slot)
        if labels is None:
            self._headless.append(index)
            return
        rows = np.arange(first, first + count, dtype=np.int64)
        self._pairs.append((np.repeat(rows, len(labels)), np.tile(labels, count)))
        place = slice(self._num_logits, self._num_logits + count * len(labels))
        self._num_logits = place.stop
        self._slices.append(_Slice(index, first, count, "logits", place))

    def send(self, inputs: HostToDevice) -> None:
        self.rows = inputs.ints(self._rows)
        if self._mean:
            rows, groups, scales = zip(*self._mean, strict=True)
            self._mean_rows, self._groups = inputs.ints(rows), inputs.ints(groups)
            self._scales = inputs.floats(scales)
        if self._one:
            self._one_rows = inputs.ints(self._one)
        if self._pairs:
            rows_of, labels = (np.concatenate(each) for each in zip(*self._pairs, strict=True))
            self._logit_rows, self._labels = inputs.ints(rows_of), inputs.ints(labels)

    def compute(self, forward: Forward) -> None:
        hidden, forward.hidden = forward.hidden, None
        assert hidden is not None
        self._ok = hidden.abs().amax(-1) < MAX_HIDDEN  # no NaN is
        if self._mean:
            sums = torch.zeros(self._num_means, hidden.shape[1], dtype=torch.int64, device=hidden.device)
            step = max(1, _BLOCK // hidden.shape[1])
            for start in range(0, len(self._mean), step):
                block = slice(start, start + step)
                values = hidden.index_select(0, self._mean_rows[block]).float()
                # Exact until the rounding: the scales are powers of two.
                values.mul_(self._scales[block, None]).round_()
                sums.index_add_(0, self._groups[block], values.to(torch.int64))
            self._found["sums"] = sums
        if self._one:
            self._found["vectors"] = hidden.index_select(0, self._one_rows).float()
        if self._pairs:
            assert self._heads is not None
            self._found["logits"] = self._heads.head_logits(self._labels, hidden, self._logit_rows)

    def to_host(self, copy: Copy) -> None:
        self._found = {kind: copy(found) for kind, found in self._found.items()}
        self._ok = copy(self._ok)

    def collect(self, result: StepResult) -> None:
        ok = self._ok.tolist()
        numbers: dict[str, NDArray[Any]] = {kind: found.numpy() for kind, found in self._found.items()}
        for index in self._headless:
            result.rows[index].failed = RowFailure("the version that it names has no head")
        for found in self._slices:
            row, values = result.rows[found.index], b""
            if found.part is not None:
                given = numbers[found.part][found.place]
                values = given.astype(given.dtype.newbyteorder("<"), copy=False).tobytes()
            if not all(ok[found.first : found.first + found.count]) or (
                found.part == "logits" and not np.isfinite(given).all()
            ):
                row.fail("what was computed of its prompt is not finite")
            elif row.failed is None:
                row.pooled = PooledPart(found.count if found.part else 0, values)
