"""Pooling on the device: hidden states in, parts of embeddings out (see `loraplex.engine.pooling`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from loraplex.engine.host_to_device import HostToDevice
from loraplex.engine.pooling import MAX_HIDDEN, PooledPart, fraction_bits
from loraplex.engine.types import ScheduledSequence

_BLOCK = 4 << 20
"""Numbers that are added at a time: 32 MB of int64."""


@dataclass(frozen=True, slots=True)
class PooledSlice:
    """`index` in `plan.scheduled`; its rows are `first` … `first`+`count`-1 of those whose hidden states are computed.
    `wanted` says whether they are pooled, or watched alone: KV that is not finite shows in them. `group`: its place
    among the means; None for the last token."""

    index: int
    first: int
    count: int
    wanted: bool
    group: int | None


@dataclass(frozen=True, slots=True)
class PooledRows:
    """The pooled slices of a step. `rows` [P] int64: the step's rows whose hidden states are wanted. Of means,
    `mean_rows` [M] int64 are those among them, `groups` [M] int64 the slice of each, `scales` [M] float32 their
    powers of two; of last tokens, `last_rows` [L] int64. None where there are none."""

    rows: torch.Tensor
    slices: tuple[PooledSlice, ...]
    mean_rows: torch.Tensor | None
    groups: torch.Tensor | None
    scales: torch.Tensor | None
    last_rows: torch.Tensor | None

    @property
    def num_means(self) -> int:
        return sum(found.group is not None for found in self.slices)


@dataclass(frozen=True, slots=True)
class Pooled:
    """sums [G, C] int64 of the means, last [L, C] float32, ok [P] bool: finite, and below `MAX_HIDDEN`."""

    sums: torch.Tensor | None
    last: torch.Tensor | None
    ok: torch.Tensor


class PooledRowsBuilder:
    """Collects the pooled slices of a step, in the order of its rows."""

    def __init__(self) -> None:
        self._rows: list[int] = []
        self._slices: list[PooledSlice] = []
        self._mean: list[tuple[int, int, float]] = []
        self._last: list[int] = []
        self._num_means = 0

    def add(self, index: int, item: ScheduledSequence, first_row: int) -> None:
        """A slice whose rows begin at `first_row` of the step."""
        assert item.pool_start is not None
        wanted = item.start + item.num_tokens - item.pool_start
        count = max(1, wanted)
        first = len(self._rows)
        end = first_row + item.num_tokens
        self._rows += range(end - count, end)
        group: int | None = None
        if wanted and item.request.pooling == "mean":
            group, self._num_means = self._num_means, self._num_means + 1
            scale = 2.0 ** fraction_bits(item.num_prompt)
            self._mean += [(row, group, scale) for row in range(first, first + count)]
        elif wanted:
            self._last.append(first)
        self._slices.append(PooledSlice(index, first, count, wanted > 0, group))

    def build(self, inputs: HostToDevice) -> PooledRows | None:
        if not self._slices:
            return None
        rows, groups, scales = zip(*self._mean, strict=True) if self._mean else ((), (), ())
        return PooledRows(
            inputs.ints(self._rows),
            tuple(self._slices),
            inputs.ints(rows) if rows else None,
            inputs.ints(groups) if rows else None,
            inputs.floats(scales) if rows else None,
            inputs.ints(self._last) if self._last else None,
        )


def pool(hidden: torch.Tensor, asked: PooledRows) -> Pooled:
    """hidden: [P, C], of `asked.rows`."""
    ok = hidden.abs().amax(-1) < MAX_HIDDEN  # no NaN is
    sums = last = None
    if asked.mean_rows is not None and asked.groups is not None and asked.scales is not None:
        sums = torch.zeros(asked.num_means, hidden.shape[1], dtype=torch.int64, device=hidden.device)
        step = max(1, _BLOCK // hidden.shape[1])
        for start in range(0, asked.mean_rows.shape[0], step):
            block = slice(start, start + step)
            values = hidden.index_select(0, asked.mean_rows[block]).float()
            # Exact until the rounding: the scales are powers of two.
            values.mul_(asked.scales[block, None]).round_()
            sums.index_add_(0, asked.groups[block], values.to(torch.int64))
    if asked.last_rows is not None:
        last = hidden.index_select(0, asked.last_rows).float()
    return Pooled(sums, last, ok)


def pooled_parts(slices: Sequence[PooledSlice], pooled: Pooled) -> Iterator[tuple[int, PooledPart | None]]:
    """(index, its part) of each slice; None where its hidden states are not finite. What `pooled` holds has arrived on
    the host."""
    ok = pooled.ok.tolist()
    sums = None if pooled.sums is None else pooled.sums.numpy()
    last = None if pooled.last is None else pooled.last.numpy()
    num_last = 0
    for found in slices:
        values = b""
        if found.group is not None and sums is not None:
            values = sums[found.group].astype("<i8", copy=False).tobytes()
        elif found.wanted and last is not None:
            values = last[num_last].astype("<f4", copy=False).tobytes()
            num_last += 1
        good = all(ok[found.first : found.first + found.count])
        yield found.index, PooledPart(found.count * found.wanted, values) if good else None
