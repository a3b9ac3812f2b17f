"""A tiny base with a delta net in its first layer, and LoRA on the parts of its in_proj_qkv."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from loraplex.adapters.split_linears import PARTS
from support.adapters.drafts import (
    AdapterDraft,
    TinyBase,
    base_tensors,
    peft_config,
    write_base,
    write_safetensors,
)

_LAYER = "model.layers.0.linear_attn."
_ROWS = dict(zip(PARTS, (8, 8, 16), strict=True))


def write_delta_base(directory: Path) -> Path:
    arch = TinyBase()
    tensors = base_tensors(arch)
    for name, rows in (("in_proj_qkv", sum(_ROWS.values())), ("in_proj_z", 16)):
        tensors[f"{_LAYER}{name}.weight"] = tensors["lm_head.weight"][:rows].copy()
    write_base(directory, arch)
    write_safetensors(directory / "model.safetensors", tensors, {"format": "pt"})
    return directory


def draft_parts(rank: int = 4) -> AdapterDraft:
    rng = np.random.default_rng(rank)
    draft = AdapterDraft(peft_config(r=rank, target_modules=[*PARTS]))
    for part, rows in _ROWS.items():
        for matrix, shape in (("A", (rank, TinyBase().hidden)), ("B", (rows, rank))):
            name = f"base_model.model.{_LAYER}{part}.lora_{matrix}.weight"
            draft.tensors[name] = rng.standard_normal(shape).astype(np.float32)
    return draft
