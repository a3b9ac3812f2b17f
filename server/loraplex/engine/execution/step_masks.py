"""The masks of a step's rows with a grammar, from the threads that fill them to the device."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import torch

from loraplex.engine.grammar.masks import FilledMasks, MaskMaker, MaskRow
from loraplex.engine.host_to_device import HostToDevice
from loraplex.engine.sampling.sampled_row import SampledRow
from loraplex.kernels.sampling.types import TokenMasks


@dataclass(frozen=True, slots=True)
class StepMasks:
    """Masks that are being filled. `rows` have them; `numbers` and `places` are `TokenMasks.rows` and its `places`."""

    rows: tuple[MaskRow, ...]
    numbers: torch.Tensor
    places: torch.Tensor
    future: Future[FilledMasks]

    def wait(self) -> tuple[TokenMasks, dict[int, str]]:
        """Wait in the worker, after the forward pass is queued, for the masks on the device, and what is wrong with
        rows, by their numbers."""
        filled = self.future.result()
        bits = torch.from_numpy(filled.bits)
        device = self.numbers.device
        if device.type == "cuda":
            bits = bits.pin_memory().to(device, non_blocking=True)
        return TokenMasks(self.numbers, self.places, bits), filled.failed


def begin_masks(
    maker: MaskMaker | None,
    rows: Sequence[SampledRow],
    eos_ids: Collection[int],
    sources: Mapping[str, int],
    previous: Callable[[], Sequence[int | None] | None],
    upload: HostToDevice,
) -> StepMasks | None:
    """None where no row has a grammar: then nothing is done. See `MaskMaker` for the arguments."""
    if all(row.request.grammar is None for row in rows):
        return None
    if maker is None:
        raise RuntimeError("a row has a grammar, and this runner takes none")
    masked = maker.plan(rows, eos_ids, sources)
    numbers = [row.row for row in masked]
    places = np.full(len(rows), -1, dtype=np.int64)
    places[numbers] = np.arange(len(numbers))
    return StepMasks(masked, upload.ints(numbers), upload.ints(places), maker.start(masked, previous))
