"""The seam of paged attention: what a decoder and a step's inputs need of an implementation.

The formula and the legend of the shapes are those of `loraplex.kernels.attention.torch_attention`. A batch is what
`AttentionKernel.lay_out` or `AttentionLayout.lay_out` returns. Its `slots` [T] say where each row's K and V go, block·P
+ offset; all else of it is for the kernel that made it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray

from loraplex.kernels.attention.triton_plan import AttentionCapacity
from loraplex.kernels.attention.triton_tiling import AttentionShape


@dataclass(frozen=True, slots=True)
class AttentionNeeds:
    """Properties of a model that decide which kernels can compute its attention: the sizes of its widest layer, the
    windows of its layers, each once, and whether scores have a softcap, and heads a sink."""

    shape: AttentionShape
    windows: tuple[int | None, ...] = (None,)
    has_softcap: bool = False
    has_sinks: bool = False
    groups: tuple[tuple[tuple[AttentionShape, int | None], ...], ...] = ()
    """The sizes and windows of the layers of each group that has blocks of its own; none: one group, of `shape`, with
    `windows`."""
    previous: tuple[int, ...] = ()
    """The most positions before a row whose places the layers of each group ask for (`TellsPrevious`)."""

    def windows_of(self, group: int | None) -> dict[AttentionShape, tuple[int | None, ...]]:
        """The windows of the layers of each size, each once, in one group of layers (None: in all of them)."""
        groups = self.groups or (tuple((self.shape, window) for window in self.windows),)
        found: dict[AttentionShape, dict[int | None, None]] = {}
        for shape, window in chain.from_iterable(groups) if group is None else groups[group]:
            found.setdefault(shape, {})[window] = None
        return {shape: tuple(windows) for shape, windows in found.items()}

    def previous_of(self, group: int | None) -> int:
        """`previous` of one group of layers (None: of all of them)."""
        return max(self.previous, default=0) if group is None or not self.previous else self.previous[group]


class AttentionKernel(Protocol):
    """One implementation, for one model on one device. It is chosen once, when the model is loaded."""

    @property
    def name(self) -> str: ...

    @property
    def reads_unwritten(self) -> bool:
        """Whether `run` reads positions of a block that its sequence has not written, so that a block must be cleared
        before it is begun."""
        ...

    @property
    def reads_codes(self) -> bool:
        """Whether caches may be int8 (`loraplex.kernels.attention.kv_codes`)."""
        ...

    def lay_out(
        self, num_rows: Sequence[int], seq_lens: Sequence[int], block_tables: Sequence[Sequence[int]]
    ) -> Any:
        """The batch of a step: sequence i has the next num_rows[i] rows of the flat batch, seq_lens[i] positions at its
        end (those rows included) and the blocks block_tables[i]. Raises ValueError where a table is too short."""
        ...

    def run(
        self,
        q: torch.Tensor,
        cache: torch.Tensor,
        batch: Any,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The formula, after this step's K and V were written. q: [T, Hq, D], last axis contiguous; cache: [N, P, 2,
        Hkv, D] of the same floating dtype, or [N, P, 2, Hkv, D + 2] of codes; sinks: [Hq] float32, contiguous, or None.
        Returns [T, Hq, D] in the dtype of q, contiguous."""
        ...


@runtime_checkable
class TellsPrevious(Protocol):
    """An `AttentionKernel` whose batches serve layers with short convolutions too."""

    def previous_slots(self, batch: Any, count: int) -> torch.Tensor:
        """[T, count]: see `loraplex.kernels.attention.previous`, with the rows of the step in Triton's."""
        ...


class AttentionLayout(Protocol):
    """Lays out steps of up to a capacity in one array of `num_ints` int32s, which travels with a step's other
    inputs."""

    @property
    def num_ints(self) -> int: ...

    def lay_out(
        self,
        host: NDArray[np.int32],
        device: torch.Tensor,
        num_rows: Sequence[int],
        seq_lens: Sequence[int],
        block_tables: Sequence[Sequence[int]],
        *,
        recorded: bool,
    ) -> tuple[Any, int]:
        """Write a step into `host` [num_ints]. Returns its batch over `device` [num_ints], which must hold the same
        before the batch is read, and the number of int32s that are used. `recorded`: rows up to the capacity's are
        padding; their output is 0, and their K and V are not written."""
        ...

    def recorded_batch(self, device: torch.Tensor) -> Any:
        """The batch to record a pass with: it computes whatever `lay_out` wrote into `device` for `recorded`."""
        ...


@runtime_checkable
class RecordableAttention(AttentionKernel, Protocol):
    """A kernel whose steps are laid out in one array at a fixed place, so that decoding steps can be recorded and
    replayed: on a GPU a step is hundreds of launches."""

    def layouts(
        self, capacities: Sequence[AttentionCapacity], groups: Sequence[int] | None = None
    ) -> Sequence[AttentionLayout]:
        """One for each capacity: for the layers of group groups[i], or None: for all layers. They share their scratch
        memory: only one step may run at a time."""
        ...
