"""How a step's numbers come to the device, as the sampler and the runner see it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray


class HostToDevice(Protocol):
    """Copies numbers of the host to the device. What is returned may be read by work that is queued after `send`."""

    def ints(self, values: Sequence[int] | NDArray[np.int64]) -> torch.Tensor:
        """[n] int64"""
        ...

    def floats(self, values: Sequence[float] | NDArray[np.float32]) -> torch.Tensor:
        """[n] float32"""
        ...

    def doubles(self, values: Sequence[float] | NDArray[np.float64]) -> torch.Tensor:
        """[n] float64"""
        ...
