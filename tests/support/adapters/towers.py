"""A tiny multimodal base as files have it, and adapters on the parts that no text goes through."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from support.adapters.admission import ARCH, halves
from support.adapters.drafts import AdapterDraft, base_tensors, draft_adapter, write_base, write_safetensors

TOWER = "model.vision_tower.encoder.layers.0.self_attn.q_proj"
PROJECTOR = "model.multi_modal_projector.linear_1"
TABLE = "model.vision_tower.embeddings.position_embedding"
PREFIX = "base_model.model."


def write_multimodal_base(directory: Path) -> Path:
    """LLaVA: [32, 24] in the tower, [32, 16] in the projector, a table of 9 rows."""
    write_base(directory, ARCH)
    tensors = {f"language_model.{name}": tensor for name, tensor in base_tensors(ARCH).items()}
    for module, shape in ((TOWER, (32, 24)), (PROJECTOR, (32, 16)), (TABLE, (9, 24))):
        tensors[f"{module.removeprefix('model.')}.weight"] = halves(*shape)
    tensors["multi_modal_projector.linear_1.bias"] = halves(32)
    write_safetensors(directory / "model.safetensors", tensors, {"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({"model_type": "llava", "text_config": config}))
    return directory


def draft_with(*modules: str, inputs: int = 24, **fields: Any) -> AdapterDraft:
    """LoRA on the language model, and on these modules of 32 outputs."""
    draft = draft_adapter(ARCH, **fields)
    for module in modules:
        draft.tensors[f"{PREFIX}{module}.lora_A.weight"] = halves(4, inputs)
        draft.tensors[f"{PREFIX}{module}.lora_B.weight"] = halves(32, 4)
    return draft
