"""Adapters as mlx-lm saves them, written with numpy, and mlx-lm's own formula."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from support.adapters.drafts import NUMPY_DTYPES, TinyBase, encode_safetensors, site_module

MLX_TENSORS = "adapters.safetensors"


def mlx_config(**fields: Any) -> dict[str, Any]:
    """The options of a training, as `mlx_lm.lora` saves them all."""
    return {
        "adapter_path": "adapters",
        "batch_size": 4,
        "config": None,
        "data": "data",
        "fine_tune_type": "lora",
        "grad_checkpoint": False,
        "iters": 600,
        "learning_rate": 1e-5,
        "lora_parameters": {"rank": 4, "dropout": 0.0, "scale": 20.0},
        "lr_schedule": None,
        "mask_prompt": False,
        "max_seq_length": 2048,
        "model": "tiny",
        "num_layers": 16,
        "optimizer": "adam",
        "optimizer_config": {"adam": {}},
        "resume_adapter_file": None,
        "save_every": 100,
        "seed": 0,
        "steps_per_eval": 200,
        "test": False,
        "train": True,
        "val_batches": 25,
    } | fields


def mlx_tensors(
    arch: TinyBase,
    *,
    rank: int = 4,
    targets: Sequence[str] = ("q_proj", "v_proj"),
    layers: Iterable[int] | None = None,
    dtype: str = "F32",
    seed: int = 1,
    dora: bool = False,
) -> dict[str, np.ndarray]:
    """lora_a [in, r], lora_b [r, out] and, with `dora`, m [out]."""
    rng = np.random.default_rng(seed)
    made: dict[str, np.ndarray] = {}
    for layer in range(arch.layers) if layers is None else layers:
        for site in targets:
            out_features, in_features = arch.out_in(site)
            module = site_module(layer, site)
            made[f"{module}.lora_a"] = (rng.standard_normal((in_features, rank)) * 0.1).astype(
                NUMPY_DTYPES[dtype]
            )
            made[f"{module}.lora_b"] = (rng.standard_normal((rank, out_features)) * 0.1).astype(
                NUMPY_DTYPES[dtype]
            )
            if dora:
                made[f"{module}.m"] = (1 + 0.2 * rng.random(out_features)).astype(NUMPY_DTYPES[dtype])
    return made


def mlx_files(config: dict[str, Any], tensors: dict[str, np.ndarray]) -> dict[str, bytes]:
    return {
        "adapter_config.json": json.dumps(config, indent=4).encode(),
        MLX_TENSORS: encode_safetensors(tensors, {"format": "mlx"}),
    }


def write_mlx(directory: Path, config: dict[str, Any], tensors: dict[str, np.ndarray]) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in mlx_files(config, tensors).items():
        (directory / name).write_bytes(content)
    return directory


def mlx_linear(
    x: np.ndarray, weight: np.ndarray, scale: float, a: np.ndarray, b: np.ndarray, m: np.ndarray | None = None
) -> np.ndarray:
    """y [..., out] of x [..., in] by mlx-lm's LoRALinear, with m by its DoRALinear, in float64. `weight` is
    [out, in]."""
    x, weight, a, b = (np.asarray(value, np.float64) for value in (x, weight, a, b))
    y = x @ weight.T + scale * ((x @ a) @ b)
    if m is None:
        return y
    norm = np.linalg.norm(weight + (scale * b.T) @ a.T, axis=1)
    return np.asarray(m, np.float64) / norm * y
