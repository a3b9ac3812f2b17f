"""What serves where the fused decoder or the compiled kernels can't: the real model through transformers, and on
torch's kernels, beside transformers and PEFT in float32."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from support.adapters.peft_zoo import PeftReference
from support.engine.local_engine import LocalEngine

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_torch_thread")]

ADAPTER = Path(__file__).parents[3] / "examples" / "adapters" / "pirate"
QUESTIONS = (
    "What do you think of the sea?",
    "List three prime numbers above 100.",
    "Tell me about owls. " * 10,
)
NUM_OUTPUTS = 6


@pytest.fixture(scope="module")
def reference(real_model_dir: Path) -> PeftReference:
    return PeftReference(real_model_dir, {"pirate": ADAPTER}, torch.float32)


@pytest.fixture
def unknown_architecture(real_model_dir: Path, tmp_path: Path) -> Path:
    """The real weights under an architecture that computes the same, and that is in no list of ours: it is compared
    with transformers' own attention when it is loaded."""
    folder = tmp_path / "model"
    folder.mkdir()
    for path in real_model_dir.iterdir():
        if path.name != "config.json":
            (folder / path.name).symlink_to(path)
    config = json.loads((real_model_dir / "config.json").read_text())
    config |= {
        "model_type": "hyperclovax",
        "architectures": ["HyperCLOVAXForCausalLM"],
        "use_post_norm": False,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def assert_equal_to_peft(
    model_dir: Path, work_dir: Path, reference: PeftReference, *, kernels: str, decoder: str
) -> None:
    """Base and adapter on every question in one engine at once, prompts in chunks beside others' decoding."""
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    engine = LocalEngine(
        model_dir, work_dir, kernels=kernels, dtype="float32", max_num_seqs=8, max_num_batched_tokens=48,
        max_model_len=512, kv_cache_memory=256 << 20, adapter_memory=32 << 20, adapter_cpu_memory=32 << 20,
    )  # fmt: skip
    asked: list[tuple[str, str | None, list[int]]] = []
    try:
        assert engine.built.info.decoder == decoder
        adapter = engine.publish(ADAPTER)
        for number, question in enumerate(QUESTIONS):
            text = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
            prompt = tokenizer.encode(text).ids
            for name, ref in ((None, None), ("pirate", adapter)):
                asked.append((f"{name}/{number}", name, prompt))
                engine.add(asked[-1][0], prompt, ref, max_tokens=NUM_OUTPUTS)
        engine.run()
        answers = {request_id: engine.tokens(request_id) for request_id, _, _ in asked}
    finally:
        engine.close()
    for request_id, name, prompt in asked:
        tokens = answers[request_id]
        assert len(tokens) == NUM_OUTPUTS
        expected = reference.logits(name, prompt + tokens[:-1])[len(prompt) - 1 :]
        assert tokens == expected.argmax(-1).tolist(), request_id
    assert all(answers[f"None/{n}"] != answers[f"pirate/{n}"] for n in range(len(QUESTIONS)))


def test_unknown_architecture_through_transformers_equals_peft(
    unknown_architecture: Path, tmp_path: Path, reference: PeftReference
) -> None:
    assert_equal_to_peft(
        unknown_architecture, tmp_path / "work", reference, kernels="auto", decoder="transformers"
    )


@pytest.mark.soak
def test_torch_kernels_equal_peft(real_model_dir: Path, tmp_path: Path, reference: PeftReference) -> None:
    assert_equal_to_peft(real_model_dir, tmp_path / "work", reference, kernels="torch", decoder="fused")
