"""Which implementation of the kernels runs, resolved once when the engine is built."""

from __future__ import annotations

import importlib.util
import os
from typing import Literal

import torch

Backend = Literal["torch", "numba", "triton"]
"""The implementations, by name. "torch" runs on any device, "numba" on CPUs, "triton" on GPUs, and where its kernels
are interpreted, as in tests (TRITON_INTERPRET=1)."""
_MIN_CAPABILITY = (8, 0)
"""Of a GPU: what the kernels' tiles and types are made for."""


class BackendUnavailable(ValueError):
    """An implementation was asked for by name that can't run here."""


def resolve_backend(choice: str, device: torch.device) -> Backend:
    """The implementation to use on `device`: the best there is for "auto", else the one that `choice` names.

    Raises BackendUnavailable rather than fall back where an explicit choice can't be had.
    """
    if choice == "torch":
        return "torch"
    if choice == "numba":
        if device.type == "cpu":
            return "numba"
        raise BackendUnavailable(f"the numba kernels are for CPUs, and the device is {device.type!r}")
    obstacle = _obstacle_to_triton(device)
    if choice == "auto":
        return "triton" if device.type == "cuda" and obstacle is None else "torch"
    if choice == "triton":
        if obstacle is None:
            return "triton"
        raise BackendUnavailable(f"the triton kernels can't run here: {obstacle}; choose auto or torch")
    raise BackendUnavailable(f"there are no {choice!r} kernels; choose auto, torch, numba or triton")


def _obstacle_to_triton(device: torch.device) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return None
    if device.type != "cuda":
        return f"the device is {device.type!r}"
    capability = torch.cuda.get_device_capability(device)
    if capability < _MIN_CAPABILITY:
        return f"the GPU has compute capability {capability[0]}.{capability[1]}, and 8.0 is needed"
    return None
