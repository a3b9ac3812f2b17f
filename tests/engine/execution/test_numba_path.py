"""The engine on the kernels that are compiled for a CPU."""

from __future__ import annotations

import random

import pytest
import torch

from support.adapters.peft_zoo import PeftReference
from support.adapters.tiny_adapters import save_adapters
from support.engine.local_engine import LocalEngine
from support.models.checkpoints import FAMILIES, VOCAB, save_tiny

pytestmark = pytest.mark.usefixtures("one_torch_thread")


@pytest.mark.parametrize("family", ["llama-biases", "gemma3"])
def test_tokens_are_those_of_transformers_and_peft(family, tmp_path):
    base = save_tiny(tmp_path / "base", FAMILIES[family])
    adapters = save_adapters(base, tmp_path)
    engine = LocalEngine(
        base,
        tmp_path / "work",
        kernels="numba",
        dtype="float32",
        max_model_len=100,
        max_num_seqs=8,
        max_num_batched_tokens=40,
        kv_cache_memory=4 << 20,
        adapter_memory=4 << 20,
        adapter_cpu_memory=4 << 20,
        num_threads=1,
    )
    rng = random.Random(family)
    refs = {name: engine.publish(folder, name=name) for name, folder in adapters.items()}
    asked = []
    for number in range(9):
        name = [None, "all", "many-ranks"][number % 3]
        prompt = [rng.randrange(3, VOCAB) for _ in range(rng.choice([2, 9, 40]))]
        asked.append((name, prompt))
        engine.add(str(number), prompt, refs.get(name), max_tokens=12)
    engine.run()
    answers = [engine.tokens(str(number)) for number in range(len(asked))]
    engine.close()
    reference = PeftReference(base, adapters, torch.float32)
    for (name, prompt), answer in zip(asked, answers, strict=True):
        want = reference.logits(name, prompt + answer[:-1])[len(prompt) - 1 :].argmax(-1).tolist()
        assert answer == want, name
