"""Log probabilities of the small real model and the example adapters, computed with the whole model in memory."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from loraplex.adapters.admission.base_model import BaseWeights, load_base_spec
from loraplex.adapters.admission.inspection import inspect_adapter
from loraplex.adapters.base_weights.nf4 import quantise_nf4
from loraplex.adapters.device.arena import AdapterArena
from loraplex.adapters.device.host_image import build_image
from loraplex.adapters.device.layout import ArenaLayout
from loraplex.kernels.backend import resolve_kernels
from support.models.checkpoints import PagedRun
from support.models.loading import load_model

ROOT = Path(__file__).parents[3]
ADAPTERS = ("json", "pirate", "sentiment")
TOKENS = 200
"""Tokens of each kind of text."""


def texts() -> list[str]:
    """Five kinds of text, of this repository: a chat, code, JSON, docs and a licence."""
    chat = "<|im_start|>user\nWhat should I do on a rainy day in a city that I do not know?<|im_end|>\n" * 12
    return [
        chat + "<|im_start|>assistant\nYou could go to a museum, or read a book in a quiet place.",
        (ROOT / "server/loraplex/engine/scheduling/scheduler.py").read_text(),
        (ROOT / "examples/adapters/json/adapter_config.json").read_text() * 3,
        (ROOT / "README.md").read_text(),
        (ROOT / "LICENSE").read_text(),
    ]


def logits(
    model_dir: Path,
    prompts: list[list[int]],
    *,
    quantise: bool,
    names: Sequence[str] = ("base", *ADAPTERS),
    kv_dtype: torch.dtype | None = None,
) -> dict[str, torch.Tensor]:
    """[tokens of all prompts, V] log probabilities, of the base and of each adapter, or of those in
    `names`.
    `kv_dtype`: of keys and values, None for the model's."""
    model = load_model(model_dir, "cpu", "float32", quantise=quantise)
    spec = load_base_spec(model_dir, quantise="int8" if quantise else "none")
    layout = ArenaLayout(model.site_groups, model.num_layers, model.dtype, max_rank=64, head=model.head_group)
    arena = AdapterArena(layout, 1024, len(ADAPTERS), resolve_kernels("auto", torch.device("cpu")))
    used, found = 0, {}
    for slot, name in enumerate(ADAPTERS):
        folder = ROOT / "examples" / "adapters" / name
        files = folder / "adapter_config.json", folder / "adapter_model.safetensors"
        image = build_image(
            inspect_adapter(*files, spec, max_rank=64), files[1], layout, base=BaseWeights(spec)
        )
        arena.write(image, slot, tuple(range(used, used + image.num_pages)))
        used += image.num_pages
    for slot, name in enumerate(("base", *ADAPTERS), -1):
        if name not in names:
            continue
        run = PagedRun(model, prompts, kv_dtype=kv_dtype or model.dtype)
        for number, prompt in enumerate(prompts):
            segments = [] if slot < 0 else [(slot, 0, len(prompt))]
            lora = arena.lora_pass(segments, len(prompt)) if segments else None
            run.step({number: len(prompt)}, lora)
        found[name] = torch.cat([run.result(i) for i in range(len(prompts))]).log_softmax(-1)
    return found


def prompts_of(model_dir: Path) -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    return [tokenizer.encode(text).ids[:TOKENS] for text in texts()]


def write_nf4(model_dir: Path, out: Path) -> None:
    """The checkpoint, its layers' linears as nf4 stands for them, in float32."""
    for path in model_dir.glob("*.json"):
        shutil.copy(path, out)
    tensors = load_file(model_dir / "model.safetensors")
    for name, weight in tensors.items():
        found = weight.float()
        is_linear = name.endswith("_proj.weight")
        tensors[name] = torch.from_numpy(quantise_nf4(found.numpy())) if is_linear else found
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
