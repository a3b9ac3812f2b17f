"""The path of GPUs through the whole engine, interpreted: lists of work, one copy a step, recorded steps."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

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


class Repeater:
    """What a CUDA graph is to the engine: the same work over the same memory, however the step came to be. What it
    returned before is overwritten, as in a pool that graphs share."""

    def __init__(self) -> None:
        self.replays: Counter[int] = Counter()
        self.last: torch.Tensor | None = None

    def record(self, work: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        rows = work().shape[0]

        def replay() -> torch.Tensor:
            if self.last is not None:
                self.last.fill_(float("nan"))
            self.replays[rows] += 1
            self.last = work()
            return self.last

        return replay


@pytest.mark.parametrize(
    ("family", "lookahead", "requests", "tokens"),
    [
        pytest.param("llama-biases", 1, 5, 5, marks=pytest.mark.slow),
        pytest.param("gemma3", 0, 5, 4, marks=pytest.mark.slow),
        *(
            pytest.param(family, lookahead, 7, 9, marks=pytest.mark.soak)
            for family in ("llama-biases", "gemma3", "qwen3", "phi3", "gemma2", "mistral-window")
            for lookahead in (0, 1)
        ),
    ],
)
def test_tokens_are_those_of_transformers_and_peft(family, lookahead, requests, tokens, tmp_path):
    options = FAMILIES[family]
    base = save_tiny(tmp_path / "base", options)
    adapters = save_adapters(base, tmp_path)
    kv_heads, head_dim = options.get("num_key_value_heads", 2), options.get("head_dim", 8)
    shape = ModelShape(3, kv_heads, head_dim, VOCAB, 512)
    recorder = Repeater()
    engine = LocalEngine(
        base,
        tmp_path / "work",
        recorder=recorder,
        kernels="triton",
        lookahead=lookahead,
        dtype="float32",
        max_model_len=100,
        max_num_seqs=6,
        max_num_batched_tokens=40,
        kv_cache_memory=NUM_BLOCKS * block_bytes(shape, torch.float32),
        adapter_memory=4 << 20,
        adapter_cpu_memory=4 << 20,
        num_threads=1,
    )
    rng = random.Random(family)
    refs = {name: engine.publish(folder, name=name) for name, folder in adapters.items()}
    shared = [rng.randrange(3, VOCAB) for _ in range(35)]
    asked = []
    for number in range(requests):
        name = [None, "all", "many-ranks"][number % 3]
        prompt = shared[: rng.choice([0, 16, 35])] + [
            rng.randrange(3, VOCAB) for _ in range(rng.choice([2, 9]))
        ]
        asked.append((name, prompt))
        engine.add(str(number), prompt, refs.get(name), max_tokens=tokens)
    engine.run()
    answers = [engine.tokens(str(number)) for number in range(len(asked))]
    engine.close()
    assert len(recorder.replays) > 1
    reference = PeftReference(base, adapters, torch.float32)
    for (name, prompt), answer in zip(asked, answers, strict=True):
        want = reference.logits(name, prompt + answer[:-1])[len(prompt) - 1 :].argmax(-1).tolist()
        assert answer == want, name
