"""A checkpoint with the weights that its quantised form stands for, for transformers to compute with."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import torch
from safetensors.torch import load_file, save_file

from loraplex.adapters.base_weights.grouped import quantise_int8
from loraplex.kernels.lora.site_groups import FLOAT_SITES, LAYER_SITES


def dequantised(base: Path, out: Path, *, head: bool = True) -> Path:
    """`base` in `out`, its linears and `head` in float32 as `--quantise int8` multiplies them. A head that is tied to
    the embedding becomes one of its own: the embedding is not quantised."""
    out.mkdir(parents=True)
    tensors: dict[str, torch.Tensor] = {}
    for path in base.iterdir():
        if path.suffix == ".safetensors":
            tensors |= load_file(path)
        elif path.name != "model.safetensors.index.json":
            shutil.copy(path, out)
    if "lm_head.weight" not in tensors:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    changed = {
        name: _dense(tensor) if is_linear(name) or (head and name == "lm_head.weight") else tensor
        for name, tensor in tensors.items()
    }
    config = json.loads((base / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    save_file(
        {name: tensor.float() for name, tensor in changed.items()},
        out / "model.safetensors",
        {"format": "pt"},
    )
    return out


def is_linear(name: str) -> bool:
    """Whether a tensor is the weight of one that is served as codes."""
    module, _, kind = name.rpartition(".")
    leaf = module.rpartition(".")[2]
    return kind == "weight" and leaf in LAYER_SITES and leaf not in FLOAT_SITES


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    values: np.ndarray
    if tensor.dtype is torch.bfloat16:
        values = tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    else:
        values = tensor.numpy()
    return torch.from_numpy(quantise_int8(values).dense())
