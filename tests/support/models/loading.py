"""Models as a start loads them, by the names of a device and of kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from loraplex.engine.model import loading
from loraplex.engine.model.base import Model
from loraplex.kernels.backend import resolve_kernels


def load_model(
    model_dir: Path,
    device: str | torch.device,
    dtype: str | torch.dtype = "auto",
    *,
    kernels: str = "auto",
    batch_invariant: bool = False,
    **options: Any,
) -> Model:
    found = resolve_kernels(kernels, torch.device(device), batch_invariant=batch_invariant)
    return loading.load_model(model_dir, found, dtype, **options)
