"""The text part of a model that also sees answers alike under every name that adapters give its modules."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from loraplex.kernels.lora.site_groups import MODEL_PROJECTION
from support.adapters.peft_zoo import PeftReference
from support.adapters.tiny_adapters import GATES, save_adapters
from support.engine.local_engine import LocalEngine
from support.models.checkpoints import FAMILIES, VOCAB, save_tiny_with_vision

pytestmark = pytest.mark.usefixtures("one_torch_thread")

NOW = "model.language_model."
DECODERS = (NOW, "language_model.model.", "model.", "", "language_model.")
ADAPTER = {"dora": {"r": 4, "lora_alpha": 8, "use_dora": True}}
PROMPT = [number * 7 % VOCAB for number in range(30)]


def renamed(source: Path, target: Path, old: str, new: str) -> Path:
    """A directory with a safetensors file, whose tensors have another name."""
    shutil.copytree(source, target)
    (path,) = target.glob("*.safetensors")
    tensors = {name.replace(old, new, 1): tensor for name, tensor in load_file(path).items()}
    save_file(tensors, path, metadata={"format": "pt"})
    return target


@pytest.mark.parametrize(
    ("kind", "family", "stored"),
    [
        ("gemma3", "gemma3", "language_model.model."),
        ("gemma3", "gemma3", "model."),
        ("gemma4", "gemma4-e2b", "model."),
    ],
)
def test_adapters_answer_alike_under_every_name(kind: str, family: str, stored: str, tmp_path: Path) -> None:
    """`stored` is what the base's own checkpoint calls its decoder."""
    made = save_tiny_with_vision(tmp_path / "made", kind, FAMILIES[family])
    (weights,) = made.glob("*.safetensors")
    old = next(name for name in load_file(weights) if name.endswith("embed_tokens.weight"))
    base = renamed(made, tmp_path / "base", old.removesuffix("embed_tokens.weight"), stored)
    targets = ["q_proj", "down_proj", *(GATES if kind == "gemma4" else ())]
    adapter = save_adapters(made, tmp_path, {"dora": ADAPTER["dora"] | {"target_modules": targets}})["dora"]
    folders = [
        renamed(adapter, tmp_path / f"adapter-{number}", NOW, decoder)
        for number, decoder in enumerate(DECODERS)
    ]
    engine = LocalEngine(
        base, tmp_path, dtype="float32", kv_cache_memory=8 << 20, adapter_memory=8 << 20, max_model_len=128
    )
    try:
        for number, folder in enumerate(folders):
            names = load_file(folder / "adapter_model.safetensors")
            parts = "layers.", f"{MODEL_PROJECTION}."
            prefixes = tuple(f"base_model.model.{DECODERS[number]}{part}" for part in parts)
            assert all(name.startswith(prefixes) for name in names)
            engine.add(folder.name, PROMPT, engine.publish(folder), max_tokens=8)
        engine.add("base", PROMPT, max_tokens=8)
        engine.run()
        answers = {folder.name: engine.tokens(folder.name) for folder in folders}
        plain = engine.tokens("base")
    finally:
        engine.close()
    reference = PeftReference(made, {"dora": adapter}, torch.float32)
    expected = (
        reference.logits("dora", PROMPT + answers["adapter-0"])[len(PROMPT) - 1 : -1].argmax(-1).tolist()
    )
    assert answers == dict.fromkeys(answers, expected)
    assert expected != plain
    assert json.loads((adapter / "adapter_config.json").read_text())["target_modules"]
