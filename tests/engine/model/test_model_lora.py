"""Adapters in the arena, mixed with base rows in one forward pass, give what PEFT gives."""

from __future__ import annotations

import random

import pytest
import torch

from loraplex.adapters.admission.base_model import BaseWeights, load_base_spec
from loraplex.adapters.admission.inspection import inspect_adapter
from loraplex.adapters.device.arena import AdapterArena
from loraplex.adapters.device.host_image import build_image
from loraplex.adapters.device.layout import ArenaLayout
from loraplex.kernels.backend import resolve_kernels
from support.adapters.peft_zoo import PeftReference
from support.adapters.tiny_adapters import ADAPTERS, KINDS, save_adapters
from support.models.checkpoints import FAMILIES, OTHERS, VOCAB, PagedRun, save_tiny
from support.models.loading import load_model

pytestmark = pytest.mark.usefixtures("one_torch_thread")

OWN_NAMES = {
    "phi": {"model_type": "phi", "num_key_value_heads": 4},
    "gpt_neox": {"model_type": "gpt_neox", "num_key_value_heads": 4},
    "opt": {"model_type": "opt", "num_key_value_heads": 4, "ffn_dim": 48, "word_embed_proj_dim": 32},
}
"""Families whose linears have names that no fused decoder has."""

NARROW = {"qwen3_next": {"linear_num_value_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16}}
"""Sizes of families whose linears are too wide for the pages of the test."""


ALL = (
    "llama", "llama-biases", "mistral-window", "qwen2", "qwen3", "phi3", "gemma2", "gemma3", "olmo2", "granite",
    "starcoder2", "lfm2", "lfm2-biases", "lfm3", "lfm3-plain", "qwen3_5-2", "olmo_hybrid",
    "olmo_hybrid-rope", "granite4", "qwen3_moe", "olmoe", "mixtral", "glm4_moe", "gpt_oss", "qwen2_moe",
    "qwen3_5_moe", "qwen3_next", "granitemoe", "granitemoeshared", "granite4-tiny", "gemma4-moe", *OWN_NAMES,
)  # fmt: skip
ONE_OF_A_KIND = (
    "llama-biases", "phi3", "gemma3", "lfm2", "lfm3", "qwen3_5-2", "olmo_hybrid", "granite4", "qwen3_moe", "olmo2",
    "gpt_oss", "qwen3_next", "granite", "starcoder2", *OWN_NAMES,
)  # fmt: skip
"""Separate linears with biases, packed ones, norms of heads with windows, short convolutions, gates of heads, delta
nets of both kinds, experts, these with sinks and biases, both of them with a shared expert, norms behind, multipliers,
and names of their own; the long version has all."""
WITH_TORCH = ("llama-biases", "phi3", "gemma3", "lfm2", "qwen3_5-2", "starcoder2")
"""Separate and packed linears, norms of heads, short convolutions, delta nets, and a model through transformers; the
long version has all."""


@pytest.mark.parametrize(
    ("family", "kernels"),
    [
        *(
            pytest.param(family, "numba", marks=() if family in ONE_OF_A_KIND else pytest.mark.soak)
            for family in ALL
        ),
        *(
            pytest.param(family, "torch", marks=() if family in WITH_TORCH else pytest.mark.soak)
            for family in ALL
        ),
    ],
)
def test_mixed_batches_equal_peft(family, kernels, tmp_path):
    options = {**FAMILIES, **OTHERS, **OWN_NAMES}[family] | NARROW.get(family, {})
    base = save_tiny(tmp_path / "base", options)
    adapters = save_adapters(base, tmp_path, ADAPTERS | KINDS)
    model = load_model(base, "cpu", "float32", kernels=kernels)
    groups, head = model.site_groups, model.head_group
    layout = ArenaLayout(groups, model.num_layers, model.dtype, max_rank=32, page_bytes=4096, head=head)
    # In blocks of columns, the last one narrower.
    assert len(layout.head.out_features) > 1
    assert len(set(layout.head.out_features)) == 2
    arena = AdapterArena(layout, 512, len(adapters), resolve_kernels(kernels, torch.device("cpu")))
    spec, used = load_base_spec(base), 0
    weights = BaseWeights(spec)
    for slot, path in enumerate(adapters.values()):
        files = path / "adapter_config.json", path / "adapter_model.safetensors"
        image = build_image(inspect_adapter(*files, spec, max_rank=32), files[1], layout, base=weights)
        arena.write(image, slot, tuple(range(used, used + image.num_pages)))
        used += image.num_pages

    names = [None, *adapters, None, "all", "dora", "dora-head"]
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
        run.step(counts, arena.lora_pass(segments, first), arena.head_pass(segments, first))

    reference = PeftReference(base, adapters, torch.float32)
    for i, (name, prompt) in enumerate(zip(names, prompts, strict=True)):
        want = reference.logits(name, prompt)
        torch.testing.assert_close(
            run.result(i), want, atol=5e-4, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
        )
        if name is not None:
            assert (want - reference.logits(None, prompt)).abs().max() > 0.1
