"""Batched LoRA on a CPU: both products of a few rows of one adapter in one go, compiled by numba.

    h[t, :]       = x[t] · A_{a,i}ᵀ                        float32, for the rows of a tile and one site
    y[t, cols_i] += h[t, :] · B_{a,i}                      and g, c where a site has them

A tile is up to ROWS adjacent rows of one adapter, each weight is read once for all of them. A panel is some tiles, one
behind the other, for which a site's weights stay in a core's cache. Pairs of a panel and a site are units of work.
Threads take the next unit one ahead of the one that they compute, and prefetch its weights from memory. No thread adds
to another's output, and every sum has one order. So a row's result is bit-identical for any
threads and any other rows. Where tiles lie is read from the adapters' tables as they are: a step prepares nothing but
its list of panels.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from loraplex.kernels.lora.numba_lora_tiles import ROWS, expand, shrink
from loraplex.kernels.lora.site_groups import SiteGroup
from loraplex.kernels.lora.types import CHUNK, GRANULE_BYTES, LoraWeights, Scratch, Segment
from loraplex.kernels.numba_runtime.recording import StepValue
from loraplex.kernels.numba_runtime.thread_team import Kernel, num_threads, take_unit
from loraplex.kernels.numba_runtime.vectors import LIKE, jit, read_int32, read_int64, size_of

_ROWS, _CHUNK, _GRANULE_BYTES = ROWS, CHUNK, GRANULE_BYTES
_PANEL_ROWS = 8 * ROWS
"""Rows of a panel, at most."""


@dataclass(frozen=True, slots=True)
class _Group:
    """`active` [layers]: whether an adapter of the step has a site there. `bounds` [sites + 1] int64: where each
    site's columns of y begin."""

    x_shape: tuple[int, int]
    y_shape: tuple[int, int]
    active: list[bool]
    bounds: NDArray[np.int64]
    sites: tuple[int, int, int]
    """The first one, how many, and the address of `bounds`."""


class NumbaLoraPass:
    """See `loraplex.kernels.lora.dispatch.LoraPass`. The weights are of a dtype of `numba_runtime.vectors.LIKE`; the
    tables are contiguous, or ValueError is raised."""

    def __init__(
        self,
        weights: LoraWeights,
        scratch: Scratch,
        by_slot: Mapping[int, Sequence[Segment]],
        num_rows: int,
    ) -> None:
        if not (weights.tables.flags.c_contiguous and weights.vectors.flags.c_contiguous):
            raise ValueError("the tables of an arena are contiguous")
        self._weights = weights
        self._scratch = scratch
        self._like = LIKE[weights.storage.dtype]
        self._panels = _panels(by_slot)
        _, chunks, layers, sites, _ = weights.tables.shape
        self._arena: tuple[int, ...] = (
            weights.storage.data_ptr(),
            weights.tables.ctypes.data,
            weights.vectors.ctypes.data,
            self._panels.ctypes.data,
            len(self._panels),
            chunks - 1,
            layers,
            sites,
        )
        # [layers, sites]
        active: NDArray[np.bool_] = np.logical_or.reduce(weights.present[list(by_slot)], axis=0)
        self._groups: dict[str, _Group] = {}
        first = 0
        for group in weights.groups:
            bounds = np.cumsum((0, *group.out_features), dtype=np.int64)
            self._groups[group.key] = _Group(
                (num_rows, group.in_features),
                (num_rows, int(bounds[-1])),
                np.logical_or.reduce(active[:, first : first + len(group.sites)], axis=1).tolist(),
                bounds,
                (first, len(group.sites), bounds.ctypes.data),
            )
            first += len(group.sites)

    def apply(self, layer: int, group: str, x: torch.Tensor, y: torch.Tensor) -> None:
        """See `LoraPass.apply`. Raises ValueError where the shapes are not the group's, KeyError for no group."""
        found = self._groups[group]
        if not found.active[layer]:
            return
        if x.shape != found.x_shape or y.shape != found.y_shape:
            raise ValueError(
                f"group '{group}' of a pass over {found.x_shape[0]} rows got x {tuple(x.shape)}, "
                f"y {tuple(y.shape)}"
            )
        if x.stride(1) != 1 or x.dtype not in LIKE:
            x = self._copy("x", x)
        out = y
        if y.stride(1) != 1 or y.dtype not in LIKE:
            out = self._copy("y", y)
        _units.run(
            (LIKE[x.dtype], LIKE[out.dtype], self._like),
            x.data_ptr(),
            x.stride(0) * x.element_size(),
            found.x_shape[1],
            out.data_ptr(),
            out.stride(0) * out.element_size(),
            layer,
            *found.sites,
            *self._arena,
        )
        if out is not y:
            y.copy_(out)

    @property
    def weights(self) -> LoraWeights:
        return self._weights

    def to_record(self) -> NumbaLoraPass:
        """A pass for recording a step of as many rows: its calls take `step_values` of any pass over these weights,
        and it applies every group of every layer. Where a pass has nothing to add they find no tiles."""
        made = copy.copy(self)
        made._arena = tuple(StepValue(name) for name in self.step_values())
        made._groups = {
            key: replace(group, active=[True] * len(group.active)) for key, group in self._groups.items()
        }
        return made

    def step_values(self) -> dict[object, int]:
        """The arguments of calls that differ between passes, by name."""
        return {("adapters", number): value for number, value in enumerate(self._arena)}

    def _copy(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        dtype = tensor.dtype if tensor.dtype in LIKE else torch.float32
        return self._scratch.buffer(name, tuple(tensor.shape), dtype).copy_(tensor)


def warm_up(weights: torch.dtype, activations: torch.dtype) -> None:
    """Compile, or take from the disk what was compiled before, for storage and for inputs and outputs of these dtypes.
    Without it the first step does, which takes seconds."""
    site = SiteGroup("one", ("one",), 1, (1,))
    storage = torch.zeros(2 * GRANULE_BYTES // weights.itemsize * CHUNK, dtype=weights)
    tables = np.zeros((1, 2, 1, 1, 2), np.int32)
    tables[0, 0] = 1
    one = np.ones(1, np.int32)
    arena = LoraWeights(
        storage, (site,), tables, one, np.ones((1, 1, 1), np.bool_), np.zeros((1, 1, 1), np.int32)
    )
    x, y = torch.zeros(1, 1, dtype=activations), torch.zeros(1, 1, dtype=activations)
    NumbaLoraPass(arena, Scratch(x.device), {0: [(0, 0, 1)]}, 1).apply(0, "one", x, y)


def _panels(by_slot: Mapping[int, Sequence[Segment]]) -> NDArray[np.int64]:
    """[n, 3]: first row, rows, slot. Few rows of an adapter are as many panels as there are threads."""
    found: list[tuple[int, int, int]] = []
    for slot, segments in by_slot.items():
        for _, first, count in segments:
            tiles = -(-count // (ROWS * num_threads()))
            height = min(_PANEL_ROWS, tiles * ROWS)
            end = first + count
            found += [(row, min(height, end - row), slot) for row in range(first, end, height)]
    return np.array(found, np.int64).reshape(-1, 3)


@jit
def _look_up(entry, step, most, storage, a_tiles, b_tiles):
    """The addresses of the A and of the B tiles of one adapter's site, whose chunks' table entries lie `step` bytes
    apart. Returns how many there are."""
    chunks = 0
    while chunks < most and read_int32(entry):
        a_tiles[chunks] = storage + read_int32(entry) * _GRANULE_BYTES
        b_tiles[chunks] = storage + read_int32(entry + 4) * _GRANULE_BYTES
        chunks += 1
        entry += step
    return chunks


def _take_units(team, arguments, x_like, y_like, like):
    """`arguments` as `NumbaLoraPass.apply` gives them."""
    x, x_row, columns = read_int64(arguments), read_int64(arguments + 8), read_int64(arguments + 16)
    y, y_row, layer = read_int64(arguments + 24), read_int64(arguments + 32), read_int64(arguments + 40)
    first_site, num_sites = read_int64(arguments + 48), read_int64(arguments + 56)
    bounds, storage = read_int64(arguments + 64), read_int64(arguments + 72)
    tables, vectors, panels = (
        read_int64(arguments + 80),
        read_int64(arguments + 88),
        read_int64(arguments + 96),
    )
    num_panels, max_chunks = read_int64(arguments + 104), read_int64(arguments + 112)
    num_layers, all_sites = read_int64(arguments + 120), read_int64(arguments + 128)
    sites = num_layers * all_sites
    hidden = np.empty((_PANEL_ROWS, max_chunks * _CHUNK), np.float32)
    # Of two units: weights come from memory, so the next one's are brought near while this one is computed.
    a_tiles, b_tiles = np.empty((2, max_chunks), np.int64), np.empty((2, max_chunks), np.int64)
    # Panel by panel: a thread's share of the units is rows that it has in its core's cache.
    num_units = num_panels * num_sites
    now, unit, chunks = 0, num_units, 0
    following = take_unit(team, num_units)
    while unit < num_units or following < num_units:
        ahead, next_chunks = 1 - now, 0
        if following < num_units:
            slot = read_int64(panels + following // num_sites * 24 + 16)
            place = layer * all_sites + first_site + following % num_sites
            entry = tables + (slot * (max_chunks + 1) * sites + place) * 8
            next_chunks = _look_up(entry, sites * 8, max_chunks, storage, a_tiles[ahead], b_tiles[ahead])
        for chunk in range(next_chunks, chunks):
            # There is no next: what is near already is looked at again.
            a_tiles[ahead, chunk], b_tiles[ahead, chunk] = a_tiles[now, chunk], b_tiles[now, chunk]
        if chunks:
            site, panel = unit % num_sites, panels + unit // num_sites * 24
            first, rows, slot = read_int64(panel), read_int64(panel + 8), read_int64(panel + 16)
            for chunk in range(chunks):
                near = a_tiles[ahead, chunk]
                for row in range(0, rows, _ROWS):
                    shrink(
                        min(_ROWS, rows - row),
                        x + (first + row) * x_row,
                        x_row,
                        columns,
                        a_tiles[now, chunk],
                        near,
                        hidden[row:],
                        chunk * _CHUNK,
                        x_like,
                        like,
                    )
                    near = a_tiles[now, chunk]
            begin, end = read_int64(bounds + site * 8), read_int64(bounds + site * 8 + 8)
            place = layer * all_sites + first_site + site
            moved = read_int32(vectors + (slot * sites + place) * 4) * _GRANULE_BYTES
            for row in range(0, rows, _ROWS):
                expand(
                    min(_ROWS, rows - row),
                    hidden[row:],
                    b_tiles[now],
                    b_tiles[ahead] if row == 0 else b_tiles[now],
                    chunks,
                    end - begin,
                    storage + moved if moved else 0,
                    y + (first + row) * y_row + begin * size_of(y_like),
                    y_row,
                    y_like,
                    like,
                )
        now, unit, chunks = ahead, following, next_chunks
        if following < num_units:
            following = take_unit(team, num_units)


_units = Kernel(_take_units, "q" * 17)
