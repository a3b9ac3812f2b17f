"""The backend whose kernels run, resolved once when the engine is built."""

from __future__ import annotations

import importlib.util
import os
from functools import cache
from typing import get_args

import torch

from loraplex.kernels.bundle import Backend, Kernels
from loraplex.kernels.failures import describe_failure
from loraplex.kernels.torch_backend import torch_kernels

_MIN_CAPABILITY = (8, 0)
"""Compute capability of a GPU that the kernels' tiles and types are made for."""


class BackendUnavailable(ValueError):
    """An implementation was asked for by name that can't run here."""


def resolve_kernels(choice: str, device: torch.device, *, batch_invariant: bool = False) -> Kernels:
    """The kernels to use on `device`: the best there are for "auto", else those that `choice` names. `batch_invariant`:
    those whose rows have the same bits in every step, where that is a choice.

    Raises BackendUnavailable rather than fall back where an explicit choice can't be had.
    """
    if choice == "auto":
        best = best_backend(device)
        return make_kernels(
            best if obstacle_to(best, device) is None else "torch", device, batch_invariant=batch_invariant
        )
    for backend in get_args(Backend):
        if choice == backend:
            obstacle = obstacle_to(backend, device)
            if obstacle is None:
                return make_kernels(backend, device, batch_invariant=batch_invariant)
            raise BackendUnavailable(f"the {choice} kernels can't run here: {obstacle}; choose auto or torch")
    raise BackendUnavailable(f"there are no '{choice}' kernels; choose auto, torch, numba or triton")


def make_kernels(backend: Backend, device: torch.device, *, batch_invariant: bool = False) -> Kernels:
    """The kernels of a backend that runs on `device`."""
    if backend == "numba":
        from loraplex.kernels.numba_backend import numba_kernels  # takes a second to import

        return numba_kernels(device, batch_invariant=batch_invariant)
    if backend == "triton":
        # Triton need not be there where it does not run.
        from loraplex.kernels.triton_backend import triton_kernels

        return triton_kernels(device, batch_invariant=batch_invariant)
    return torch_kernels(device, batch_invariant=batch_invariant)


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
