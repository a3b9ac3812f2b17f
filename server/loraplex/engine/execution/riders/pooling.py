"""Pooling on the device: hidden states in, parts of embeddings out (see `loraplex.engine.pooling`)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from loraplex.engine.execution.riders.rider import Copy, Forward, Rider
from loraplex.engine.execution.step_results import StepResult
from loraplex.engine.host_to_device import HostToDevice
from loraplex.engine.pooling import MAX_HIDDEN, PooledPart, fraction_bits
from loraplex.engine.types import ScheduledSequence

_BLOCK = 4 << 20
"""Numbers that are added at a time: 32 MB of int64."""


@dataclass(frozen=True, slots=True)
class _Slice:
    """`index` in `plan.scheduled`; its rows are `first` … `first`+`count`-1 of those whose hidden states are computed.
    `wanted` says whether they are pooled, or watched alone: KV that is not finite shows in them. `place`: of its mean
    among the means, or of its one row among those of one token."""

    index: int
    first: int
    count: int
    wanted: bool
    is_mean: bool
    place: int


class PooledSlices(Rider):
    """The pooled slices of a step; nothing else is wanted of them. `rows` [P] int64: the step's rows whose hidden
    states are wanted."""

    prevents_replay = True

    def __init__(self) -> None:
        self.rows: torch.Tensor
        self._rows: list[int] = []
        self._slices: list[_Slice] = []
        self._mean: list[tuple[int, int, float]] = []
        """A row of a mean each: its number in `_rows`, the place of the mean, and a power of two."""
        self._num_means = 0
        self._one: list[int] = []
        """The first row of each slice that gives one token's hidden state."""
        self._mean_rows: torch.Tensor
        self._groups: torch.Tensor
        self._scales: torch.Tensor
        self._one_rows: torch.Tensor
        self._sums: torch.Tensor | None = None
        self._values: torch.Tensor | None = None
        self._ok: torch.Tensor

    def want(self, index: int, item: ScheduledSequence, first_row: int) -> None:
        """Pool the slice with this index in the plan, whose rows begin at `first_row` of the step."""
        assert item.pool_start is not None
        wanted = item.start + item.num_tokens - item.pool_start
        count = max(1, wanted)
        first = len(self._rows)
        end = first_row + item.num_tokens
        self._rows += range(end - count, end)
        is_mean = wanted > 0 and item.request.pooling == "mean"
        place = self._num_means if is_mean else len(self._one)
        if is_mean:
            self._num_means += 1
            scale = 2.0 ** fraction_bits(item.num_prompt)
            self._mean += [(row, place, scale) for row in range(first, first + count)]
        elif wanted:
            self._one.append(first)
        self._slices.append(_Slice(index, first, count, wanted > 0, is_mean, place))

    def send(self, inputs: HostToDevice) -> None:
        self.rows = inputs.ints(self._rows)
        if self._mean:
            rows, groups, scales = zip(*self._mean, strict=True)
            self._mean_rows, self._groups = inputs.ints(rows), inputs.ints(groups)
            self._scales = inputs.floats(scales)
        if self._one:
            self._one_rows = inputs.ints(self._one)

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
            self._sums = sums
        if self._one:
            self._values = hidden.index_select(0, self._one_rows).float()

    def to_host(self, copy: Copy) -> None:
        self._sums = None if self._sums is None else copy(self._sums)
        self._values = None if self._values is None else copy(self._values)
        self._ok = copy(self._ok)

    def collect(self, result: StepResult) -> None:
        ok = self._ok.tolist()
        sums = None if self._sums is None else self._sums.numpy()
        one = None if self._values is None else self._values.numpy()
        for found in self._slices:
            row, values = result.rows[found.index], b""
            if not all(ok[found.first : found.first + found.count]):
                row.fail("what was computed of its prompt is not finite")
            elif row.failed is None:
                if found.is_mean and sums is not None:
                    values = sums[found.place].astype("<i8", copy=False).tobytes()
                elif found.wanted and one is not None:
                    values = one[found.place].astype("<f4", copy=False).tobytes()
                row.pooled = PooledPart(found.count * found.wanted, values)
