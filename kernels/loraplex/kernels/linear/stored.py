"""Weights of linears as checkpoints store them, in arrays of numpy or in tensors: it imports neither library's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

_PIECE_VALUES = 1 << 20
"""Weights that are widened at a time: their float32 stays in a processor's cache."""


@dataclass(frozen=True, slots=True)
class GroupedWeight:
    """Codes in groups: w[n, k] = scales[n, k // group] · codes[n, k] + offsets[n, k // group]. `codes` [N, K] int8,
    `scales` and `offsets` [N, K / group] float32; offsets None: all are 0."""

    codes: Any
    scales: Any
    offsets: Any | None
    group: int

    def __post_init__(self) -> None:
        (rows, inputs), groups = self.codes.shape, self.scales.shape[1]
        shapes = {tuple(part.shape) for part in (self.scales, self.offsets) if part is not None}
        if self.group * groups != inputs or shapes != {(rows, groups)}:
            raise ValueError(
                f"{groups} groups of {self.group} do not make the codes {list(self.codes.shape)}"
            )

    @property
    def shape(self) -> tuple[int, int]:
        rows, inputs = self.codes.shape
        return rows, inputs

    def map(self, change: Callable[[Any], Any]) -> GroupedWeight:
        """The same with every array changed, by `torch.from_numpy` for example."""
        offsets = None if self.offsets is None else change(self.offsets)
        return GroupedWeight(change(self.codes), change(self.scales), offsets, self.group)

    def rows(self, first: int, last: int) -> GroupedWeight:
        """The outputs first … last-1, as views."""
        offsets = None if self.offsets is None else self.offsets[first:last]
        return GroupedWeight(self.codes[first:last], self.scales[first:last], offsets, self.group)

    def dense(self) -> Any:
        """[N, K] float32: a product and a sum, each rounded to float32."""
        rows, inputs = self.shape
        grouped = self.codes.reshape(rows, -1, self.group) * self.scales[:, :, None]
        if self.offsets is not None:
            grouped += self.offsets[:, :, None]
        return grouped.reshape(rows, inputs)

    def dense_rows(self) -> Iterator[Any]:
        """`dense`, some rows at a time."""
        rows, inputs = self.shape
        step = max(1, _PIECE_VALUES // max(1, inputs))
        for first in range(0, rows, step):
            yield self.rows(first, first + step).dense()


@dataclass(frozen=True, slots=True)
class FloatWeight:
    """8-bit floats: w[n, k] = values[n, k] · scales[n, k // group], with `values` [N, K] float8_e4m3fn and `scales`
    [N, G] float32, for G groups of K / G inputs. `activations`: the checkpoint is made for activations that are rounded
    to e4m3 too, with a scale for each row."""

    values: Any
    scales: Any
    activations: bool

    @property
    def shape(self) -> tuple[int, int]:
        rows, inputs = self.values.shape
        return rows, inputs

    @property
    def group(self) -> int:
        return self.shape[1] // int(self.scales.shape[1])

    def map(self, change: Callable[[Any], Any]) -> FloatWeight:
        """See `GroupedWeight.map`."""
        return replace(self, values=change(self.values), scales=change(self.scales))
