"""Which implementation of the kernels runs, resolved once when the engine is built."""

from __future__ import annotations

from typing import Literal

import torch

Backend = Literal["torch"]
AVAILABLE: tuple[Backend, ...] = ("torch",)
"""The implementations that this version has, by name. "torch" runs on any device."""


class BackendUnavailable(ValueError):
    """An implementation was asked for by name that can't run here."""


def resolve_backend(choice: str, device: torch.device) -> Backend:
    """The implementation to use on `device`: the best there is for "auto", else the one that `choice` names.

    Raises BackendUnavailable rather than fall back where an explicit choice can't be had.
    """
    if choice == "auto":
        return "torch"
    for name in AVAILABLE:
        if name == choice:
            return name
    raise BackendUnavailable(
        f"there are no {choice!r} kernels for {device.type!r}; choose auto or {', '.join(AVAILABLE)}"
    )
