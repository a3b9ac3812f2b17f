"""The memory of a device, and how much of it a start leaves alone."""

from __future__ import annotations

import gc
from typing import Protocol

import torch

MIN_HEADROOM = 256 << 20
HEADROOM_SHARE = 0.02
"""Share of the device's memory, at least MIN_HEADROOM, that is kept for the fragments of torch's allocator, and for
what the driver takes while steps run."""


class DeviceMemory(Protocol):
    """A device whose memory can be asked for. In bytes."""

    def total(self) -> int: ...

    def free(self) -> int:
        """Bytes that nobody has taken now, in this process or another. Memory that torch keeps for its next tensors is
        taken: the largest step that ever ran shows in it."""
        ...

    def give_back(self) -> None:
        """Free what torch keeps and nothing uses."""
        ...


class CudaMemory:
    """The memory of one GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def total(self) -> int:
        return int(torch.cuda.mem_get_info(self._device)[1])

    def free(self) -> int:
        torch.cuda.synchronize(self._device)
        return int(torch.cuda.mem_get_info(self._device)[0])

    def give_back(self) -> None:
        gc.collect()
        torch.cuda.empty_cache()


def headroom(total: int) -> int:
    """Bytes that a start leaves free on a device with `total`."""
    return max(MIN_HEADROOM, int(total * HEADROOM_SHARE))
