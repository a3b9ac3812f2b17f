"""LoRA on routed experts in torch's operations: the formula, and what other implementations are compared with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

import numpy as np
import torch

from loraplex.kernels.experts.lora_types import (
    ExpertLoraWeights,
    check_operands,
    sites_of_group,
    slots_of_rows,
)
from loraplex.kernels.experts.types import ExpertRows
from loraplex.kernels.lora.types import GRANULE_BYTES, Segment


class TorchExpertLoraPass:
    """See `loraplex.kernels.experts.lora_types.ExpertLoraPass`. It reads the routes on the host."""

    def __init__(
        self,
        weights: ExpertLoraWeights,
        by_slot: Mapping[int, Sequence[Segment]],
        num_rows: int,
    ) -> None:
        self._weights = weights
        self._slots = slots_of_rows(by_slot, num_rows)

    def apply(self, layer: int, group: str, x: torch.Tensor, y: torch.Tensor, rows: ExpertRows) -> None:
        """See `ExpertLoraPass.apply`. Raises ValueError where the shapes are not the group's, KeyError for no group."""
        found, first_site = sites_of_group(self._weights, group)
        check_operands(found, len(self._slots), x, y, rows)
        for slot, expert, places in self._runs(rows):
            given = x[places].float()
            for site, (begin, end) in enumerate(found.columns, first_site):
                out = y[places, begin:end]
                for a, b in self._tiles(slot, layer, site, expert, found.in_features, end - begin):
                    out = out.float() + given @ a.float().T @ b.float()
                y[places, begin:end] = out.to(y.dtype)

    def _runs(self, rows: ExpertRows) -> Iterator[tuple[int, int, slice]]:
        """The slot and the expert of adjacent places that have both in common, except those of the base model."""
        slots = self._slots[rows.row_of.cpu().numpy()]
        for expert, (first, last) in enumerate(pairwise(rows.starts.tolist())):
            cuts = first + 1 + np.flatnonzero(np.diff(slots[first:last]))
            for begin, end in pairwise([first, *cuts.tolist(), last]):
                if begin < end and slots[begin] >= 0:
                    yield int(slots[begin]), expert, slice(begin, end)

    def _tiles(
        self, slot: int, layer: int, site: int, expert: int, inputs: int, outputs: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """A [height, K] and B [height, N] of each chunk."""
        height = int(self._weights.heights[slot, layer, site])
        storage = self._weights.storage
        for offsets in self._weights.tables[slot, layer, site, expert].tolist():
            if not (height and offsets[0]):
                return
            a, b = (
                storage[offset * GRANULE_BYTES // storage.itemsize :][: height * width].view(height, width)
                for offset, width in zip(offsets, (inputs, outputs), strict=True)
            )
            yield a, b
