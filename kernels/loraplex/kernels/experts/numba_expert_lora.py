"""LoRA on routed experts on a CPU, compiled by numba: `loraplex.kernels.experts.torch_expert_lora`.

Runs of adjacent places with one adapter and one expert are found by the kernel, from where the experts' places begin,
each place's row and each row's slot: so a recorded call serves any routes and any adapters. A run and a site are a unit
of work. Threads take the next unit one ahead of the one that they compute, and prefetch what it begins with. No thread
adds to another's output, and every sum has one order, so a row's result is bit-identical for any threads and any other
rows.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from loraplex.kernels.experts.lora_types import (
    ExpertLoraWeights,
    ExpertSiteGroup,
    check_operands,
    slots_of_rows,
)
from loraplex.kernels.experts.numba_expert_tiles import expand, prefetch_a, prefetch_b, shrink
from loraplex.kernels.experts.types import ExpertRows
from loraplex.kernels.lora.numba_lora_tiles import ROWS
from loraplex.kernels.lora.types import CHUNK, GRANULE_BYTES, Segment
from loraplex.kernels.numba_runtime.recording import StepValue
from loraplex.kernels.numba_runtime.thread_team import Kernel, take_unit
from loraplex.kernels.numba_runtime.vectors import LIKE, jit, read_int32, read_int64, size_of

_ROWS, _CHUNK, _GRANULE_BYTES = ROWS, CHUNK, GRANULE_BYTES
_RUN_ROWS = 8 * ROWS
"""Places of a run, at most: more would keep other threads waiting."""


@dataclass(frozen=True, slots=True)
class _Group:
    """`active` [layers]: whether an adapter of the step has a site there. `bounds` [sites, 2] int64: `columns` of
    `layout`. `sites`: the first one, how many, and the address of `bounds`."""

    layout: ExpertSiteGroup
    active: list[bool]
    bounds: NDArray[np.int64]
    sites: tuple[int, int, int]


class NumbaExpertLoraPass:
    """See `loraplex.kernels.experts.lora_types.ExpertLoraPass`. The weights are of a dtype of
    `numba_runtime.vectors.LIKE`; the tables are contiguous, or ValueError is raised."""

    def __init__(
        self,
        weights: ExpertLoraWeights,
        by_slot: Mapping[int, Sequence[Segment]],
        num_rows: int,
    ) -> None:
        if not (weights.tables.flags.c_contiguous and weights.heights.flags.c_contiguous):
            raise ValueError("the tables of an arena are contiguous")
        self._weights = weights
        self._like = LIKE[weights.storage.dtype]
        self._num_rows = num_rows
        self._slots = slots_of_rows(by_slot, num_rows)
        _, layers, sites, experts, chunks, _ = weights.tables.shape
        self._arena: tuple[int, ...] = (
            weights.storage.data_ptr(),
            weights.tables.ctypes.data,
            weights.heights.ctypes.data,
            self._slots.ctypes.data,
            layers,
            sites,
            experts,
            chunks,
        )
        # [layers, sites]
        active: NDArray[np.bool_] = np.logical_or.reduce(weights.heights[list(by_slot)] > 0, axis=0)
        self._groups: dict[str, _Group] = {}
        first = 0
        for group in weights.groups:
            count = len(group.sites)
            bounds = np.array(group.columns, np.int64)
            self._groups[group.key] = _Group(
                group,
                np.logical_or.reduce(active[:, first : first + count], axis=1).tolist(),
                bounds,
                (first, count, bounds.ctypes.data),
            )
            first += count

    def apply(self, layer: int, group: str, x: torch.Tensor, y: torch.Tensor, rows: ExpertRows) -> None:
        """See `ExpertLoraPass.apply`. Raises ValueError where the shapes are not the group's, or columns lie apart,
        KeyError for no group."""
        found = self._groups[group]
        if not found.active[layer]:
            return
        check_operands(found.layout, self._num_rows, x, y, rows)
        if x.stride(1) != 1 or y.stride(1) != 1:
            raise ValueError(f"group '{group}' got x or y whose columns lie apart")
        _units.run(
            (LIKE[x.dtype], LIKE[y.dtype], self._like),
            x.data_ptr(),
            x.stride(0) * x.element_size(),
            x.shape[1],
            y.data_ptr(),
            y.stride(0) * y.element_size(),
            rows.starts.data_ptr(),
            rows.row_of.data_ptr(),
            len(x),
            layer,
            *found.sites,
            *self._arena,
        )

    @property
    def weights(self) -> ExpertLoraWeights:
        return self._weights

    def to_record(self) -> NumbaExpertLoraPass:
        """A pass for recording a step of as many rows: its calls take `step_values` of any pass over these weights,
        and it applies every group of every layer that has it. Where a pass has nothing to add they find no tiles."""
        made = copy.copy(self)
        made._arena = tuple(StepValue(name) for name in self.step_values())
        layers = range(self._weights.tables.shape[1])
        made._groups = {
            key: replace(group, active=[layer in group.layout.layers for layer in layers])
            for key, group in self._groups.items()
        }
        return made

    def step_values(self) -> dict[object, int]:
        """The arguments of calls that differ between passes, by name."""
        return {("adapters on experts", number): value for number, value in enumerate(self._arena)}


def warm_up(weights: torch.dtype, activations: torch.dtype) -> None:
    """Compile, or take from the disk what was compiled before, for storage and for inputs and outputs of these dtypes.
    Without it the first step does, which takes seconds."""
    site = ExpertSiteGroup("one", ("one",), 1, ((0, 1),), 1, (0,))
    tables = np.zeros((1, 1, 1, 1, 2, 2), np.int32)
    tables[0, 0, 0, 0, 0] = 1
    storage = torch.zeros(2 * GRANULE_BYTES // weights.itemsize, dtype=weights)
    arena = ExpertLoraWeights(storage, (site,), np.zeros(1, np.int32), tables, np.ones((1, 1, 1), np.int32))
    x, y = torch.zeros(1, 1, dtype=activations), torch.zeros(1, 1, dtype=activations)
    rows = ExpertRows(torch.tensor([0, 1]), torch.tensor([0]), torch.tensor([[0]]))
    NumbaExpertLoraPass(arena, {0: [(0, 0, 1)]}, 1).apply(0, "one", x, y, rows)


@jit
def _find_runs(starts, row_of, slots, experts, runs):
    """The first place, the number of places, the slot and the expert of all runs of adapters. Returns how many."""
    count = 0
    for expert in range(experts):
        place, end = read_int64(starts + expert * 8), read_int64(starts + expert * 8 + 8)
        while place < end:
            first, slot = place, read_int32(slots + read_int64(row_of + place * 8) * 4)
            last = min(end, first + _RUN_ROWS)
            place += 1
            while place < last and read_int32(slots + read_int64(row_of + place * 8) * 4) == slot:
                place += 1
            if slot >= 0:
                runs[count, 0], runs[count, 1], runs[count, 2], runs[count, 3] = (
                    first,
                    place - first,
                    slot,
                    expert,
                )
                count += 1
    return count


@jit
def _look_up(entry, chunks, height, storage, a_step, b_step, a_rows, b_rows):
    """The address of each rank's row of A and of B, `a_step` and `b_step` bytes long, of one adapter's site and expert.
    Returns how many there are."""
    ranks = 0
    for chunk in range(chunks if height else 0):
        tiles = entry + chunk * 8
        if read_int32(tiles) == 0:
            break
        for rank in range(height):
            a_rows[ranks] = storage + read_int32(tiles) * _GRANULE_BYTES + rank * a_step
            b_rows[ranks] = storage + read_int32(tiles + 4) * _GRANULE_BYTES + rank * b_step
            ranks += 1
    return ranks


def _take_units(team, arguments, x_like, y_like, like):
    """`arguments` as `NumbaExpertLoraPass.apply` gives them."""
    x, x_row, columns = read_int64(arguments), read_int64(arguments + 8), read_int64(arguments + 16)
    y, y_row, starts = read_int64(arguments + 24), read_int64(arguments + 32), read_int64(arguments + 40)
    row_of, places = read_int64(arguments + 48), read_int64(arguments + 56)
    layer, first_site = read_int64(arguments + 64), read_int64(arguments + 72)
    num_sites, bounds = read_int64(arguments + 80), read_int64(arguments + 88)
    storage, tables = read_int64(arguments + 96), read_int64(arguments + 104)
    heights, slots = read_int64(arguments + 112), read_int64(arguments + 120)
    layers, all_sites = read_int64(arguments + 128), read_int64(arguments + 136)
    experts, chunks = read_int64(arguments + 144), read_int64(arguments + 152)
    size = size_of(like)
    runs = np.empty((places, 4), np.int64)
    num_units = _find_runs(starts, row_of, slots, experts, runs) * num_sites
    most = chunks * _CHUNK
    hidden = np.empty((_ROWS, most), np.float32)
    # Of two units: weights come from memory, so what the next one begins with is brought near before it.
    a_rows, b_rows = np.empty((2, most), np.int64), np.empty((2, most), np.int64)
    now, unit, ranks = 0, num_units, 0
    is_first = True
    while is_first or ranks:
        following, ahead, next_ranks = num_units, 1 - now, 0
        while next_ranks == 0:
            following = take_unit(team, num_units)
            if following >= num_units:
                break
            run, site = following // num_sites, following % num_sites
            place = (runs[run, 2] * layers + layer) * all_sites + first_site + site
            width = read_int64(bounds + site * 16 + 8) - read_int64(bounds + site * 16)
            next_ranks = _look_up(
                tables + (place * experts + runs[run, 3]) * chunks * 8,
                chunks,
                read_int32(heights + place * 4),
                storage,
                columns * size,
                width * size,
                a_rows[ahead],
                b_rows[ahead],
            )
        if ranks:
            run, site = unit // num_sites, unit % num_sites
            begin, end = read_int64(bounds + site * 16), read_int64(bounds + site * 16 + 8)
            first, count = runs[run, 0], runs[run, 1]
            prefetch_b(b_rows[now], ranks, (end - begin) * size)
            for row in range(0, count, _ROWS):
                height = min(_ROWS, count - row)
                shrink(
                    height,
                    x + (first + row) * x_row,
                    x_row,
                    columns,
                    ranks,
                    a_rows[now],
                    hidden,
                    x_like,
                    like,
                )
                prefetch_a(a_rows[ahead], next_ranks, columns * size)
                target = y + (first + row) * y_row + begin * size_of(y_like)
                expand(height, hidden, ranks, b_rows[now], end - begin, target, y_row, y_like, like)
        is_first = False
        now, unit, ranks = ahead, following, next_ranks


_units = Kernel(_take_units, "q" * 20)
