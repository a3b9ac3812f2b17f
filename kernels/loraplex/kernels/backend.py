"""Which implementation of the kernels runs, resolved once when the engine is built."""

from __future__ import annotations

import importlib.util
import os
from functools import cache
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
    if choice == "auto":
        best = best_backend(device)
        return best if obstacle_to(best, device) is None else "torch"
    asked: Backend | None = "numba" if choice == "numba" else "triton" if choice == "triton" else None
    if asked is not None:
        obstacle = obstacle_to(asked, device)
        if obstacle is None:
            return asked
        raise BackendUnavailable(f"the {choice} kernels can't run here: {obstacle}; choose auto or torch")
    raise BackendUnavailable(f"there are no '{choice}' kernels; choose auto, torch, numba or triton")


def best_backend(device: torch.device) -> Backend:
    """The fastest for `device`, whether or not it can run."""
    return "triton" if device.type == "cuda" else "numba"


def obstacle_to(backend: Backend, device: torch.device) -> str | None:
    """Why an implementation can't run on `device`; None where it can."""
    if backend == "torch":
        return None
    return _obstacle_to_triton(device) if backend == "triton" else _obstacle_to_numba(device)


def _obstacle_to_numba(device: torch.device) -> str | None:
    if device.type != "cpu":
        return f"they are for CPUs, and the device is '{device.type}'"
    if importlib.util.find_spec("numba") is None:
        return "the package numba is not installed"
    return _numba_failure()


@cache
def _numba_failure() -> str | None:
    """The errors of numba where it does not support this numpy, LLVM or processor."""
    try:
        from numba import config

        if config.DISABLE_JIT:
            return "NUMBA_DISABLE_JIT is set, so numba compiles nothing: unset it"
        from loraplex.kernels.numba_runtime.probe import probe

        probe()
    except Exception as error:  # of any kind: what is installed does not fit together
        return describe_failure("numba", error)
    return None


def describe_failure(library: str, error: Exception) -> str:
    """In one line."""
    reason = (str(error).strip().splitlines() or [""])[0]
    return f"{library} failed with {type(error).__name__}: {reason}"


def _obstacle_to_triton(device: torch.device) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return None
    if device.type != "cuda":
        return f"the device is '{device.type}'"
    capability = torch.cuda.get_device_capability(device)
    if capability < _MIN_CAPABILITY:
        return f"the GPU has compute capability {capability[0]}.{capability[1]}, and 8.0 is needed"
    return None
