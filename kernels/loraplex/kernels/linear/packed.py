"""Base linears: the weight that a backend has packed for its kernels, and calls with x."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class PackedLinear(ABC):
    """A weight of `shape` [N, K] as `Ops.pack` made it. `dtype` is that of x and y."""

    shape: tuple[int, int]
    dtype: torch.dtype

    @abstractmethod
    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x·Wᵀ + b [..., N], contiguous, for x [..., K] and bias [N] or None. Raises ValueError for others."""

    @property
    def nbytes(self) -> int:
        return tensor_bytes(self)

    @property
    def library(self) -> str:
        """The library, with its version, that multiplies; empty for the engine's own kernels and torch's."""
        return ""


def tensor_bytes(parts: Any) -> int:
    """Bytes of all tensors in dataclasses and tuples of them, each counted once."""
    found = {id(part): part for part in every_part(parts) if isinstance(part, torch.Tensor)}
    # In a layout of oneDNN's own, `nbytes` may be missing.
    return sum(tensor.numel() * tensor.element_size() for tensor in found.values())


def every_part(parts: Any) -> Iterator[Any]:
    """The dataclasses in dataclasses and tuples of them, and what their fields and the tuples hold."""
    waiting = [parts]
    while waiting:
        part = waiting.pop()
        yield part
        if isinstance(part, tuple):
            waiting += part
        elif dataclasses.is_dataclass(part):
            waiting += [getattr(part, field.name) for field in dataclasses.fields(part)]
