"""The weight of a base linear in 8-bit floats (e4m3), as checkpoints store it."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class FloatWeight:
    """w[n, k] = values[n, k] · scales[n, k // group]: values [N, K] float8_e4m3fn, scales [N, G] float32, for G groups
    of K / G inputs. `activations`: x may be rounded to e4m3 too."""

    values: torch.Tensor
    scales: torch.Tensor
    activations: bool

    @property
    def group(self) -> int:
        return self.values.shape[1] // self.scales.shape[1]
