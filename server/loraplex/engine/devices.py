"""The device and the kernels that an engine runs with."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch

from loraplex.adapters.errors import LoraplexError
from loraplex.kernels.backend import BackendUnavailable, resolve_kernels
from loraplex.kernels.bundle import Kernels


class DeviceUnavailable(LoraplexError):
    """The device that was asked for is not there, or can't run the kernels that were."""

    code = "device_unavailable"


def choose_kernels(device: str, kernels: str, *, batch_invariant: bool = False) -> Kernels:
    """The kernels of an engine with these settings, on its device. Raises DeviceUnavailable."""
    found = resolve_device(device)
    try:
        return resolve_kernels(kernels, found, batch_invariant=batch_invariant)
    except BackendUnavailable as error:
        raise DeviceUnavailable(f"--kernels {kernels}: {error}") from error


def kernels_elsewhere(device: torch.device) -> Kernels:
    """Kernels of a device that need not be here, to plan with: weights on a GPU have the forms of Triton."""
    if device.type == "cpu":
        return resolve_kernels("auto", device)
    return replace(resolve_kernels("torch", device), backend="triton")


def resolve_device(asked: str) -> torch.device:
    """Raises DeviceUnavailable."""
    if asked == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if asked == "cuda" and not torch.cuda.is_available():
        raise DeviceUnavailable("--device cuda: torch finds no CUDA device here; use --device cpu or auto")
    return torch.device(asked)


def choose_lookahead(asked: Literal[-1, 0, 1], device: torch.device) -> Literal[0, 1]:
    """Steps that are planned before the one before them is collected; -1: by the device."""
    if asked == -1:
        return 1 if device.type == "cuda" else 0
    return asked


def obstacle_to_speculation(asked: Literal["auto", "off"], lookahead: int, kernels: Kernels) -> str:
    """Why no token is drafted, whatever steps cost; empty: nothing speaks against it."""
    if asked == "off":
        return "--speculation off"
    if lookahead:
        return "steps are planned before the tokens of the one before are known (lookahead 1)"
    if kernels.backend == "triton":
        return "it is for the kernels of CPUs"
    return ""


def refuse_bits(obstacle: str) -> DeviceUnavailable:
    """The refusal of --batch-invariant where the kernels cannot promise the same bits."""
    return DeviceUnavailable(
        f"--batch-invariant: {obstacle}; serve without it, or with other --kernels or another --dtype"
    )
