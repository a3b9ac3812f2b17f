"""The sequences of a step, the sizes of a recurrent layer, and its memory, as its kernels are given them.

A sequence has a *state*, of the last multiple of 16 positions, and a *window*, of the up to 16 positions behind it. A
state is written at the end of a window only, and may be shared until then. So positions of a window may be written
again: rows of a draft that was refused leave nothing to undo. A window's last position must not be a draft's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from loraplex.kernels.recurrent import COLUMNS, HEADER_BYTES, UNIT_BYTES, WINDOW

_HEADER, _UNIT = HEADER_BYTES // 8, UNIT_BYTES // 8
_ALIGNMENT = 64


class RecurrentUnit(NamedTuple):
    """One sequence of a step."""

    rows: Sequence[int]
    """The sequence's rows of the flat batch, in the order of its positions."""
    start: int
    """The position of its first row. Below 16 the state counts as zeros, whatever lies there."""
    window: int
    """The place of its window."""
    state: int
    """The state of position ⌊start/16⌋·16. It is read, and written only where it is a target."""
    targets: Sequence[int]
    """The state that each end of a window writes, in order. No other unit may use one of them in the step."""


class MostUnits(NamedTuple):
    """The room that the launches of a step have: for its own units, or for any that a recorded step serves."""

    units: int
    chunks: int
    begins_windows: bool
    """Whether rows of one sequence may end a window and begin another."""


@dataclass(frozen=True)
class RecurrentRows:
    """The units of a step. `table` int64, on the device: the number of units, that of chunks, the place of their list,
    five unused; of each unit the place of its first row in the table, the number of rows, start, window, state, the
    place of its first target, the number of its first chunk, one unused; then rows and targets; then the unit of each
    chunk. A chunk is 16 rows of a unit, from its first row on; the last one has what is left."""

    units: tuple[RecurrentUnit, ...]
    """None where a step is recorded: what is read is the table of the step that it serves."""
    table: torch.Tensor
    most: MostUnits

    @cached_property
    def address(self) -> int:
        return self.table.data_ptr()


def most_units(num_rows: int, num_sequences: int, *, prompts: bool) -> MostUnits:
    """The room for any step of up to this size; without `prompts`, each sequence has one row."""
    chunks = min(num_rows, num_rows // WINDOW + num_sequences)
    return MostUnits(num_sequences, chunks, prompts)


def table_size(num_rows: int, num_sequences: int) -> int:
    """The numbers of a table for any such step."""
    targets = num_rows // WINDOW + num_sequences
    return _HEADER + _UNIT * num_sequences + num_rows + 2 * targets


def lay_out_units(units: Sequence[RecurrentUnit], device: torch.device | None = None) -> RecurrentRows:
    """Raises ValueError for a unit without rows, or with another number of targets than its windows that end."""
    first = _HEADER + _UNIT * len(units)
    lists: list[int] = []
    table = np.zeros(first, np.int64)
    table[0] = len(units)
    chunks: list[int] = []
    begins_windows = False
    for number, unit in enumerate(units):
        count = len(unit.rows)
        ends = (unit.start + count) // WINDOW - unit.start // WINDOW
        if not count or ends != len(unit.targets):
            raise ValueError(
                f"unit {number}: {count} rows from position {unit.start} on end {ends} windows, "
                f"and {len(unit.targets)} targets are given"
            )
        at = _HEADER + number * _UNIT
        table[at : at + 4] = first + len(lists), count, unit.start, unit.window
        lists.extend(unit.rows)
        table[at + 4 : at + 6] = unit.state, first + len(lists)
        lists.extend(unit.targets)
        table[at + 6] = len(chunks)
        chunks.extend([number] * -(-count // WINDOW))
        begins_windows |= unit.start % WINDOW + count > WINDOW
    table[1:3] = len(chunks), first + len(lists)
    lists.extend(chunks)
    most = MostUnits(len(units), len(chunks), begins_windows)
    whole = torch.from_numpy(np.concatenate((table, np.array(lists, np.int64))))
    return RecurrentRows(tuple(units), whole if device is None else whole.to(device), most)


@dataclass(frozen=True, slots=True)
class RecurrentHeads:
    """The sizes of a layer. Key head h serves the value heads from h·value_heads/key_heads on."""

    key_heads: int
    value_heads: int
    key_dim: int
    """Dk, a multiple of 16."""
    value_dim: int
    """Dv, a multiple of 32."""
    width: int = 4
    """W: inputs of the convolution for each output, the row's own among them."""

    def __post_init__(self) -> None:
        if self.value_heads % self.key_heads or self.key_dim % 16 or self.value_dim % COLUMNS:
            raise ValueError(
                f"{self.value_heads} heads of {self.value_dim} for {self.key_heads} of {self.key_dim}: each key head "
                f"must serve as many, keys be a multiple of 16 and values of {COLUMNS}"
            )
        if not 2 <= self.width <= WINDOW:
            raise ValueError(f"a convolution of width {self.width} is not within 2 to {WINDOW}")

    @property
    def channels(self) -> int:
        """C, of the convolution: queries, keys and values of a row."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    def first_columns(self, *, delta: bool) -> tuple[int, int, int]:
        """Those of queries, keys and values in a row of the convolution: in this order for the delta rule, in the
        reverse one for Mamba-2."""
        keys, values = self.key_heads * self.key_dim, self.value_heads * self.value_dim
        return (0, keys, 2 * keys) if delta else (values + keys, values, 0)


def check_operands(
    x: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    skip: torch.Tensor | None,
    heads: RecurrentHeads,
) -> None:
    """Raises ValueError where the operands of a rule do not fit. `skip`: None for the delta rule."""
    per_head = (len(x), heads.value_heads)
    if (
        x.shape[1] != heads.channels
        or decay.shape != per_head
        or beta.shape != per_head
        or not (x.is_contiguous() and decay.is_contiguous() and beta.is_contiguous())
        or not decay.dtype is beta.dtype is torch.float32
        or not (skip is None or (skip.shape == per_head[1:] and skip.dtype is torch.float32))
    ):
        raise ValueError(
            f"rows {list(x.shape)}, decays {list(decay.shape)} {decay.dtype} and betas {list(beta.shape)} "
            f"{beta.dtype} do not fit {heads}"
        )


@dataclass(frozen=True, slots=True)
class RecurrentMemory:
    """The memory of one layer, of S states and P windows."""

    states: torch.Tensor
    """[S, Hv, Dv/32, Dk, 32] float32: 32 columns of a head's state lie together."""
    tails: torch.Tensor
    """[S, W - 1, C]: the last inputs of the convolution before the state's position."""
    keys: torch.Tensor
    """[P, Hk, 16, Dk] float32, by position % 16."""
    updates: torch.Tensor
    """[P, Hv, Dv/32, 16, 32] float32."""
    decays: torch.Tensor
    """[P, Hv, 16] float32."""
    inputs: torch.Tensor
    """[P, 16, C]: inputs of the convolution."""


def recurrent_bytes(heads: RecurrentHeads, dtype: torch.dtype) -> tuple[int, int]:
    """Bytes of a layer's state and of its window, multiples of 64, where a model computes in `dtype`."""
    return tuple(_spans(parts, 0)[-1] for parts in _parts(heads, dtype))  # type: ignore[return-value]


def recurrent_memory(
    heads: RecurrentHeads, dtype: torch.dtype, states: torch.Tensor, windows: torch.Tensor
) -> RecurrentMemory:
    """Views of uint8 memory: states [S, `recurrent_bytes`], windows [P, `recurrent_bytes`]. Rows may lie apart, by a
    multiple of 64 bytes, as where they hold other layers too."""
    views: list[torch.Tensor] = []
    for storage, parts in zip((states, windows), _parts(heads, dtype), strict=True):
        ends = _spans(parts, 0)
        if storage.shape[1] != ends[-1]:
            raise ValueError(f"memory of {storage.shape[1]} bytes a row is not the layer's {ends[-1]}")
        for (shape, kind), first in zip(parts, ends, strict=False):
            part = storage[:, first : first + _bytes(shape, kind)].view(kind)
            views.append(part.view(len(storage), *shape))
    return RecurrentMemory(*views)


_Part = tuple[tuple[int, ...], torch.dtype]


def _parts(heads: RecurrentHeads, dtype: torch.dtype) -> tuple[tuple[_Part, ...], tuple[_Part, ...]]:
    """The shapes of a state's parts, and of a window's, as `RecurrentMemory` has them."""
    strips, wide = heads.value_dim // COLUMNS, torch.float32
    return (
        ((heads.value_heads, strips, heads.key_dim, COLUMNS), wide),
        ((heads.width - 1, heads.channels), dtype),
    ), (
        ((heads.key_heads, WINDOW, heads.key_dim), wide),
        ((heads.value_heads, strips, WINDOW, COLUMNS), wide),
        ((heads.value_heads, WINDOW), wide),
        ((WINDOW, heads.channels), dtype),
    )


def _bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    return int(np.prod(shape)) * dtype.itemsize


def _spans(parts: Sequence[_Part], first: int) -> list[int]:
    """Where each part begins, and the last one ends."""
    places = [first]
    for shape, kind in parts:
        places.append(-(-(places[-1] + _bytes(shape, kind)) // _ALIGNMENT) * _ALIGNMENT)
    return places
