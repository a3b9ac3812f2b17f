"""A recorded pass of batched LoRA and its list of work: any step may be put there."""

from __future__ import annotations

import numpy as np
import torch

from loraplex.kernels.lora.readers.triton_readers import FusedReaders
from loraplex.kernels.lora.triton_lora import LoraLauncher, TritonLora
from loraplex.kernels.lora.triton_tiling import LoraTiling
from loraplex.kernels.lora.types import Scratch, Segment
from support.kernels.lora_arena import ManualArena


class RecordedPass:
    """For steps of up to `rows` rows. Hidden values are NaN before the first step."""

    def __init__(self, arena: ManualArena, tiling: LoraTiling, *, rows: int, programs: int = 5) -> None:
        device = arena.weights.storage.device
        scratch = Scratch(device)
        self._rows = rows
        self.lora = TritonLora(
            arena.weights, scratch, max_rows=rows, max_segments=rows, tiling=tiling, programs=programs
        )
        scratch.buffer("lora hidden", (self.lora.hidden_size,), torch.float32).fill_(float("nan"))
        for slot in range(len(arena.weights.num_chunks)):
            self.lora.write(slot)
        self.work = torch.zeros(self.lora.work_size, dtype=torch.int32, device=device)
        self.launcher: LoraLauncher = self.lora.recorded(self.work, rows)
        self.readers = FusedReaders(self.launcher)

    def put(self, segments: list[Segment]) -> None:
        numbers = np.full(self.lora.work_size, 99, np.int32)
        self.lora.plan(segments, self._rows, numbers, fixed=True)
        self.work.copy_(torch.from_numpy(numbers))
