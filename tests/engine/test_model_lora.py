"""Adapters in the arena, mixed with base rows in one forward pass, give what PEFT gives."""

from __future__ import annotations

import json
import random

import pytest
import torch

from loraplex.adapters.arena import AdapterArena
from loraplex.adapters.base import load_base_spec
from loraplex.adapters.format import inspect_adapter
from loraplex.adapters.layout import ArenaLayout
from loraplex.adapters.weights import build_image
from loraplex.engine.model.loading import load_model
from support.models import FAMILIES, OTHERS, VOCAB, PagedRun, save_tiny
from support.peft_zoo import ALL_SITES, PeftReference

pytestmark = pytest.mark.usefixtures("one_torch_thread")

ADAPTERS = {
    "all": {"r": 8, "lora_alpha": 16, "target_modules": ALL_SITES},
    "some": {"r": 3, "lora_alpha": 5, "target_modules": ["k_proj", "o_proj", "up_proj"], "layers_to_transform": [0, 2]},
    "many-ranks": {
        "r": 20, "lora_alpha": 10, "use_rslora": True, "target_modules": ["q_proj", "v_proj", "down_proj"],
        "rank_pattern": {"v_proj": 1},
    },
}  # fmt: skip


FUSED_TARGETS = {"q_proj": "qkv_proj", "v_proj": "qkv_proj", "k_proj": "qkv_proj",
                 "gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}  # fmt: skip


def for_fused(options):
    """The same adapter for a base that has Q, K and V, and gate and up, as one linear each."""
    targets = list(dict.fromkeys(FUSED_TARGETS.get(name, name) for name in options["target_modules"]))
    pattern = {FUSED_TARGETS.get(name, name): rank for name, rank in options.get("rank_pattern", {}).items()}
    return options | {"target_modules": targets, "rank_pattern": pattern}


def save_adapters(base, out):
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    made = {}
    fused = json.loads((base / "config.json").read_text())["model_type"] == "phi3"
    adapters = {name: for_fused(options) if fused else options for name, options in ADAPTERS.items()}
    for number, (name, options) in enumerate(adapters.items()):
        model = get_peft_model(
            AutoModelForCausalLM.from_pretrained(base), LoraConfig(task_type="CAUSAL_LM", **options)
        )
        generator = torch.Generator().manual_seed(number)
        for key, weight in model.named_parameters():
            if "lora_" in key:
                weight.data.normal_(0, 0.3, generator=generator)
        made[name] = out / name
        model.save_pretrained(made[name])
    return made


@pytest.mark.parametrize(
    "family",
    ["llama", "llama-biases", "mistral-window", "qwen2", "qwen3", "phi3", "gemma2", "gemma3", "olmo2"],
)
def test_mixed_batches_equal_peft(family, tmp_path):
    base = save_tiny(tmp_path / "base", {**FAMILIES, **OTHERS}[family])
    adapters = save_adapters(base, tmp_path)
    model = load_model(base, "cpu", "float32")
    layout = ArenaLayout(model.site_groups, model.num_layers, model.dtype, max_rank=32)
    arena = AdapterArena(layout, num_pages=16, num_slots=4, device=torch.device("cpu"))
    spec, used = load_base_spec(base), 0
    for slot, path in enumerate(adapters.values()):
        files = path / "adapter_config.json", path / "adapter_model.safetensors"
        image = build_image(inspect_adapter(*files, spec, max_rank=32), files[1], layout)
        arena.write(image, slot, tuple(range(used, used + image.num_pages)))
        used += image.num_pages

    names = [None, "some", "all", None, "many-ranks", "all"]
    slots = {name: slot for slot, name in enumerate(adapters)} | {None: -1}
    rng = random.Random(family)
    prompts = [[rng.randrange(VOCAB) for _ in range(rng.choice([9, 18, 35]))] for _ in names]
    run = PagedRun(model, prompts)
    while alive := [i for i, p in enumerate(prompts) if run.done[i] < len(p)]:
        counts = {i: min(rng.choice([1, 4, 17]), len(prompts[i]) - run.done[i]) for i in alive}
        segments, first = [], 0
        for i, count in counts.items():
            segments.append((slots[names[i]], first, count))
            first += count
        run.step(counts, arena.lora_pass(segments, first))

    reference = PeftReference(base, adapters, torch.float32)
    for i, (name, prompt) in enumerate(zip(names, prompts, strict=True)):
        want = reference.logits(name, prompt)
        torch.testing.assert_close(
            run.result(i), want, atol=5e-4, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
        )
        if name is not None:
            assert (want - reference.logits(None, prompt)).abs().max() > 0.1
