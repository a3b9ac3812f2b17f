"""Models as a start plans and loads them, by the names of a device and of kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from loraplex.engine.devices import kernels_elsewhere
from loraplex.engine.model import loading
from loraplex.engine.model.base import Model
from loraplex.engine.model.model_plan import ModelPlan, ModelSettings, make_plan
from loraplex.engine.model.outline import ModelOutline
from loraplex.engine.model.outline import outline_model as outline_plan
from loraplex.engine.model.plans import KeptPlans
from loraplex.kernels.backend import resolve_kernels


def plan_model(
    model_dir: Path,
    device: str | torch.device = "cpu",
    dtype: str | torch.dtype = "auto",
    *,
    kernels: str = "auto",
    batch_invariant: bool = False,
    plans: KeptPlans | None = None,
    quantise: bool = False,
    kv_codes: bool = False,
    **settings: Any,
) -> ModelPlan:
    found = resolve_kernels(kernels, torch.device(device), batch_invariant=batch_invariant)
    asked = ModelSettings(
        dtype=str(dtype).removeprefix("torch."),
        quantise="int8" if quantise else "none",
        kv_cache_dtype="int8" if kv_codes else "auto",
        **settings,
    )
    return make_plan(model_dir, asked, found, plans)


def load_model(
    model_dir: Path, device: str | torch.device, dtype: str | torch.dtype = "auto", **options: Any
) -> Model:
    return loading.load_model(plan_model(model_dir, device, dtype, **options))


def outline_model(
    model_dir: Path, device: torch.device, dtype: str, *, quantise: bool = False
) -> ModelOutline:
    """Outline a model for a device that need not be here, as `loraplex plan` does."""
    settings = ModelSettings(dtype=dtype, quantise="int8" if quantise else "none")
    return outline_plan(make_plan(model_dir, settings, kernels_elsewhere(device)))
