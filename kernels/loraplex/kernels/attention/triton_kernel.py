"""Paged attention in Triton as an `AttentionKernel`: decoding and prompts, recorded or not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat
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
    write_kv,
)
from loraplex.kernels.attention.triton_plan import AttentionCapacity, AttentionPlan
from loraplex.kernels.attention.triton_tiling import choose_tilings


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
        self._tilings = choose_tilings(
            needs.shape, dtype.itemsize, capability, batch_invariant=batch_invariant
        )

    def layouts(
        self, capacities: Sequence[AttentionCapacity], windows: Sequence[int | None] | None = None
    ) -> tuple[TritonLayout, ...]:
        of_each = repeat(self._needs.windows) if windows is None else [(window,) for window in windows]
        plans = [self._plan(capacity, own) for capacity, own in zip(capacities, of_each, strict=False)]
        largest = max(plans, key=lambda plan: plan.partial_rows)
        scratch = AttentionScratch.allocate(largest, self._device)
        return tuple(TritonLayout(plan, scratch) for plan in plans)

    def lay_out(
        self, num_rows: Sequence[int], seq_lens: Sequence[int], block_tables: Sequence[Sequence[int]]
    ) -> TritonAttentionBatch:
        """In an array of its own, with scratch memory of its own."""
        batch: TritonAttentionBatch = lay_out_alone(
            self, self._needs.shape.block_size, self._device, num_rows, seq_lens, block_tables
        )
        return batch

    def write_kv(self, kv: torch.Tensor, cache: torch.Tensor, batch: TritonAttentionBatch) -> None:
        write_kv(kv, cache, batch.slots)

    def run(
        self,
        q: torch.Tensor,
        cache: torch.Tensor,
        batch: TritonAttentionBatch,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        return paged_attention(q, cache, batch, scale=scale, window=window, softcap=softcap)

    def _plan(self, capacity: AttentionCapacity, windows: Sequence[int | None]) -> AttentionPlan:
        return AttentionPlan(
            self._needs.shape,
            capacity,
            self._tilings,
            num_programs=self._programs,
            windows=windows,
        )


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
