"""Paged attention in Triton as an `AttentionKernel`: decoding and prompts, recorded or not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from loraplex.kernels.attention.kernel import AttentionNeeds, RecordableAttention
from loraplex.kernels.attention.triton_attention import (
    AttentionScratch,
    TritonAttentionBatch,
    graph_batch,
    paged_attention,
)
from loraplex.kernels.attention.triton_plan import AttentionCapacity, AttentionPlan
from loraplex.kernels.attention.triton_tiling import AttentionShape, choose_tilings


@dataclass(frozen=True, slots=True)
class MixedBatch:
    """The batch of layers of several sizes: one for each, of the same sequences and blocks."""

    parts: dict[AttentionShape, TritonAttentionBatch]

    @property
    def slots(self) -> torch.Tensor:
        return next(iter(self.parts.values())).slots

    def previous(self, count: int) -> torch.Tensor:
        return next(iter(self.parts.values())).previous(count)

    def part(self, q: torch.Tensor, cache: torch.Tensor) -> TritonAttentionBatch:
        _, block_size, _, kv_heads, _ = cache.shape
        return self.parts[AttentionShape(q.shape[1], kv_heads, q.shape[2], block_size)]


@dataclass(frozen=True, slots=True)
class TritonLayout:
    """See `AttentionLayout`."""

    plan: AttentionPlan
    scratch: AttentionScratch

    @property
    def num_ints(self) -> int:
        return self.plan.num_ints

    def lay_out(
        self,
        host: NDArray[np.int32],
        device: torch.Tensor,
        num_rows: Sequence[int],
        seq_lens: Sequence[int],
        block_tables: Sequence[Sequence[int]],
        *,
        recorded: bool,
    ) -> tuple[TritonAttentionBatch, int]:
        padded_rows = self.plan.capacity.num_rows if recorded else None
        counts = self.plan.write(host, num_rows, seq_lens, block_tables, padded_rows=padded_rows)
        if recorded:
            return self.recorded_batch(device), counts.num_ints
        batch = TritonAttentionBatch(self.plan, device, self.scratch, counts.num_rows, counts.windows)
        return batch, counts.num_ints

    def recorded_batch(self, device: torch.Tensor) -> TritonAttentionBatch:
        return graph_batch(self.plan, device, self.scratch)


@dataclass(frozen=True, slots=True)
class MixedLayout:
    """See `AttentionLayout`. The layouts of layers of several sizes, one behind the other."""

    lists: tuple[TritonLayout, ...]

    @property
    def num_ints(self) -> int:
        return sum(each.num_ints for each in self.lists)

    def lay_out(
        self,
        host: NDArray[np.int32],
        device: torch.Tensor,
        num_rows: Sequence[int],
        seq_lens: Sequence[int],
        block_tables: Sequence[Sequence[int]],
        *,
        recorded: bool,
    ) -> tuple[MixedBatch, int]:
        batches: dict[AttentionShape, TritonAttentionBatch] = {}
        used = 0
        for lists, begin, end in self._places():
            batch, ints = lists.lay_out(
                host[begin:end], device[begin:end], num_rows, seq_lens, block_tables, recorded=recorded
            )
            batches[lists.plan.shape] = batch
            used = begin + ints
        return MixedBatch(batches), used

    def recorded_batch(self, device: torch.Tensor) -> MixedBatch:
        return MixedBatch(
            {
                lists.plan.shape: lists.recorded_batch(device[begin:end])
                for lists, begin, end in self._places()
            }
        )

    def _places(self) -> Iterator[tuple[TritonLayout, int, int]]:
        """Each layout, where its array begins, and where it ends."""
        begin = 0
        for lists in self.lists:
            yield lists, begin, begin + lists.num_ints
            begin += lists.num_ints


class TritonAttention:
    """See `RecordableAttention`. `batch_invariant`: a row gets the same bits in every step."""

    name = "triton"
    reads_unwritten = False
    reads_codes = True

    def __init__(
        self,
        needs: AttentionNeeds,
        dtype: torch.dtype,
        device: torch.device,
        *,
        batch_invariant: bool = False,
    ) -> None:
        self._needs = needs
        self._device = device
        capability, self._programs = _device_traits(device)
        self._tilings = {
            shape: choose_tilings(shape, dtype.itemsize, capability, batch_invariant=batch_invariant)
            for shape in needs.windows_of(None)
        }

    def layouts(
        self, capacities: Sequence[AttentionCapacity], groups: Sequence[int] | None = None
    ) -> tuple[TritonLayout | MixedLayout, ...]:
        of_each = [
            self._plans(capacity, None if groups is None else groups[i])
            for i, capacity in enumerate(capacities)
        ]
        largest: dict[AttentionShape, AttentionPlan] = {}
        for plan in chain.from_iterable(of_each):
            largest[plan.shape] = max(largest.get(plan.shape, plan), plan, key=lambda each: each.partial_rows)
        scratch = {shape: AttentionScratch.allocate(plan, self._device) for shape, plan in largest.items()}
        made = [tuple(TritonLayout(plan, scratch[plan.shape]) for plan in plans) for plans in of_each]
        return tuple(lists[0] if len(lists) == 1 else MixedLayout(lists) for lists in made)

    def lay_out(
        self, num_rows: Sequence[int], seq_lens: Sequence[int], block_tables: Sequence[Sequence[int]]
    ) -> TritonAttentionBatch | MixedBatch:
        """In an array of its own, with scratch memory of its own."""
        batch: TritonAttentionBatch | MixedBatch = lay_out_alone(
            self, self._needs.shape.block_size, self._device, num_rows, seq_lens, block_tables
        )
        return batch

    def run(
        self,
        q: torch.Tensor,
        cache: torch.Tensor,
        batch: TritonAttentionBatch | MixedBatch,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if isinstance(batch, MixedBatch):
            batch = batch.part(q, cache)
        return paged_attention(q, cache, batch, scale=scale, window=window, softcap=softcap, sinks=sinks)

    def previous_slots(self, batch: TritonAttentionBatch | MixedBatch, count: int) -> torch.Tensor:
        return batch.previous(count)

    def _plans(self, capacity: AttentionCapacity, group: int | None) -> list[AttentionPlan]:
        """One for each size of layers in a group (None: of all). The first has the places before each row."""
        previous = self._needs.previous_of(group)
        # Layers of a group may all be convolutions.
        windows_of = self._needs.windows_of(group) or {self._needs.shape: ()}
        return [
            AttentionPlan(
                shape,
                capacity,
                self._tilings[shape],
                num_programs=self._programs,
                windows=windows,
                previous=0 if number else previous,
            )
            for number, (shape, windows) in enumerate(windows_of.items())
        ]


def lay_out_alone(
    kernel: RecordableAttention,
    block_size: int,
    device: torch.device,
    num_rows: Sequence[int],
    seq_lens: Sequence[int],
    block_tables: Sequence[Sequence[int]],
) -> Any:
    """The batch of a step in an array of its own, with scratch memory of its own."""
    longest = max((-(-length // block_size) for length in seq_lens), default=0)
    capacity = AttentionCapacity(
        sum(num_rows), len(num_rows), len(num_rows) * longest, max(num_rows, default=1)
    )
    (layout,) = kernel.layouts([capacity])
    host = np.empty(layout.num_ints, dtype=np.int32)
    array = torch.empty(layout.num_ints, dtype=torch.int32, device=device)
    batch, used = layout.lay_out(host, array, num_rows, seq_lens, block_tables, recorded=False)
    array[:used].copy_(torch.from_numpy(host[:used]))
    return batch


def _device_traits(device: torch.device) -> tuple[tuple[int, int], int]:
    """Compute capability, and programs that run at the same time; where kernels are interpreted, any numbers do."""
    if device.type != "cuda":
        return (9, 0), 4
    return (
        torch.cuda.get_device_capability(device),
        2 * torch.cuda.get_device_properties(device).multi_processor_count,
    )
