"""Which of a device's failures an exception of a forward pass is."""

from __future__ import annotations

import torch

from loraplex.engine.execution.device_errors import DeviceLost, DeviceOutOfMemory

_NO_MEMORY = ("out of memory", "can't allocate memory", "alloc_failed", "could not create a primitive")
"""Words of CUDA's driver and runtime, of torch's allocator on a CPU, of cuBLAS's and cuDNN's statuses, and of oneDNN,
which has other reasons for them too."""


def as_device_fault(error: Exception, device: torch.device) -> Exception:
    """DeviceOutOfMemory or DeviceLost with the first line of what was said, or `error` itself where it is neither.

    Raise what is returned outside of the `except` block: the frames that a traceback holds keep a step's activations,
    which are the memory that is lacking.
    """
    if isinstance(error, DeviceOutOfMemory | DeviceLost):
        return error
    said = next(iter(str(error).splitlines()), "") or type(error).__name__
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and any(words in str(error).lower() for words in _NO_MEMORY)
    ):
        return DeviceOutOfMemory(said)
    if device.type == "cuda" and not _answers(device):
        return DeviceLost(said)
    return error


def give_back_memory(device: torch.device) -> None:
    """Device memory that torch caches and nothing uses now."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _answers(device: torch.device) -> bool:
    """After an illegal access or a failed assertion a CUDA context fails every call, for as long as its process
    lives."""
    try:
        torch.cuda.synchronize(device)
    except Exception:
        return False
    return True
