"""Families with windows, softcaps and packed linears through the whole engine: a sharded checkpoint, adapters by PEFT,
prompts in chunks beside others' decodes, prefixes that are shared, and a pool so small that sequences start over."""

from __future__ import annotations

import random

import pytest
import torch

from loraplex.engine.kv_memory import block_bytes
from loraplex.engine.model.base import ModelShape
from support.local_engine import LocalEngine
from support.models import FAMILIES, VOCAB, save_tiny
from support.peft_zoo import PeftReference
from support.tiny_adapters import save_adapters

pytestmark = pytest.mark.usefixtures("one_torch_thread")

NUM_BLOCKS = 14
OUTPUTS = 24


@pytest.mark.parametrize("family", ["mistral-window", "qwen2-window", "phi3", "gemma2", "gemma3"])
def test_tokens_are_those_of_transformers_and_peft(family, tmp_path):
    options = FAMILIES[family]
    base = save_tiny(tmp_path / "base", options, max_shard_size="20KB")
    assert len(list(base.glob("*.safetensors"))) > 1
    adapters = save_adapters(base, tmp_path)
    kv_heads, head_dim = options.get("num_key_value_heads", 2), options.get("head_dim", 8)
    shape = ModelShape(3, kv_heads, head_dim, VOCAB, 512)
    engine = LocalEngine(
        base,
        tmp_path / "work",
        dtype="float32",
        max_model_len=100,
        max_num_seqs=8,
        max_num_batched_tokens=40,
        kv_cache_memory=NUM_BLOCKS * block_bytes(shape, torch.float32),
        adapter_memory=4 << 20,
        adapter_cpu_memory=4 << 20,
        num_threads=1,
    )
    rng = random.Random(family)
    refs = {name: engine.publish(folder, name=name) for name, folder in adapters.items()}
    shared = [rng.randrange(3, VOCAB) for _ in range(35)]  # far beyond each family's window
    asked = []
    for number in range(12):
        name = [None, "all", "many-ranks"][number % 3]
        prompt = shared[: rng.choice([0, 16, 35])] + [
            rng.randrange(3, VOCAB) for _ in range(rng.choice([2, 9]))
        ]
        asked.append((name, prompt))
        engine.add(str(number), prompt, refs.get(name), max_tokens=OUTPUTS)
    engine.run()
    stats = engine.core.stats()
    answers = [engine.tokens(str(number)) for number in range(len(asked))]
    engine.close()
    assert stats.num_preemptions > 0
    assert stats.prefix_cache_hits > 0
    reference = PeftReference(base, adapters, torch.float32)
    for (name, prompt), answer in zip(asked, answers, strict=True):
        # Teacher-forced: each token is the likeliest after those before it.
        want = reference.logits(name, prompt + answer[:-1])[len(prompt) - 1 :].argmax(-1).tolist()
        assert answer == want, name
