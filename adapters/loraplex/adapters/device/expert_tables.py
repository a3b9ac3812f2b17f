"""The tables of an arena that say where the tiles of adapters on routed experts lie.

They are large, 3 MB an adapter of a mixture of 30 billion weights, and most adapters may have nothing on experts. So an
adapter on experts takes a slot of these tables beside its slot of the arena, and there are as many as such adapters fit
into the arena's pages (`ArenaLayout.expert_slots`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from loraplex.adapters.device.host_image import HostImage
from loraplex.adapters.device.layout import ArenaLayout
from loraplex.kernels.bundle import Kernels
from loraplex.kernels.experts.lora_types import ExpertLoraWeights

if TYPE_CHECKING:
    from loraplex.kernels.experts.triton_expert_lora import TritonExpertLora


class ExpertTables:
    """`weights` as passes of a CPU read them, and `programs` with a copy on the device for kernels whose lists lie
    there, None for others. `num_slots` are the arena's, `storage` its pages in the layout's dtype. `describe` and
    `clear` may run in different threads, for different slots."""

    def __init__(
        self, layout: ArenaLayout, num_pages: int, num_slots: int, storage: torch.Tensor, kernels: Kernels
    ) -> None:
        assert layout.experts is not None
        experts, count = layout.experts, min(layout.expert_slots(num_pages), num_slots)
        places = (count, layout.num_layers, experts.num_sites)
        self.weights = ExpertLoraWeights(
            storage=storage,
            groups=experts.groups,
            slot_of=np.full(num_slots, -1, np.int32),
            tables=np.zeros((*places, experts.num_experts, experts.max_chunks + 1, 2), np.int32),
            heights=np.zeros(places, np.int32),
        )
        self.programs: TritonExpertLora | None = None
        if kernels.expert_lora_pass is None:
            # Triton need not be there where it does not run.
            from loraplex.kernels.experts.triton_expert_lora import TritonExpertLora

            self.programs = TritonExpertLora(self.weights)
        self._free = list(range(count))[::-1]

    def describe(
        self, image: HostImage, slot: int, place: Callable[[NDArray[np.int32]], NDArray[np.int64]]
    ) -> None:
        """Take over what an image has on experts; `place` turns its granules into the storage's."""
        self.clear(slot)
        if not len(image.experts):
            return
        weights, own = self.weights, self._free.pop()
        *where, a_tiles, b_tiles = image.experts.T
        weights.tables[own, *where, 0] = place(a_tiles)
        weights.tables[own, *where, 1] = place(b_tiles)
        layers, numbers, heights = image.heights.T
        weights.heights[own, layers, numbers] = heights
        if self.programs is not None:
            self.programs.write(own)
        weights.slot_of[slot] = own

    def clear(self, slot: int) -> None:
        """Free what the adapter of a slot of the arena has here."""
        own = int(self.weights.slot_of[slot])
        if own >= 0:
            self.weights.slot_of[slot] = -1
            self.weights.heights[own] = 0
            self.weights.tables[own] = 0
            self._free.append(own)
