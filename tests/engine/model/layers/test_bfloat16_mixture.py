"""Adapters on the experts of a mixture in bfloat16, beside transformers and PEFT in float32."""

from __future__ import annotations

import random
from contextlib import closing
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from loraplex.engine.logprobs import join_scores
from support.adapters.peft_zoo import PeftReference
from support.engine.local_engine import LocalEngine
from support.models.checkpoints import FAMILIES, VOCAB, save_tiny

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_torch_thread")]

SIZES = {
    "hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 64, "num_experts": 16,
    "num_experts_per_tok": 4, "num_hidden_layers": 4, "head_dim": 32, "norm_topk_prob": True,
}  # fmt: skip
"""A model in which bfloat16's rounding moves a log probability by a tenth in the mean."""
RANKS = ("8", "32", "64")
STACKS = ["experts.gate_up_proj", "experts.down_proj"]


def save_base(out: Path) -> Path:
    """Save a mixture whose numbers are those of bfloat16."""
    base = save_tiny(out, FAMILIES["qwen3_moe"] | SIZES)
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(base / "model.safetensors").items()}
    save_file(tensors, base / "model.safetensors", {"format": "pt"})
    return base


def save_adapter(base: Path, out: Path, rank: int) -> Path:
    """PEFT's, on attention and experts, of random numbers of bfloat16, with products as large at any rank."""
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    config = LoraConfig(
        r=rank, lora_alpha=rank, target_modules=["q_proj", "o_proj"], target_parameters=STACKS
    )
    model, generator = get_peft_model(plain, config), torch.Generator().manual_seed(rank)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if ".lora_" in name:
                values = torch.randn(weight.shape, generator=generator) * (0.005 / rank**0.5) ** 0.5
                weight.copy_(values.bfloat16())
    model.save_pretrained(out)
    return out


def test_bfloat16_adapters_err_no_more_than_the_base_at_any_rank(tmp_path: Path) -> None:
    """Means over log probabilities of given tokens. The base's own error is that of transformers. PEFT folds an
    expert's change into weights of bfloat16; here it is added behind them."""
    base = save_base(tmp_path / "base")
    adapters = {rank: save_adapter(base, tmp_path / rank, int(rank)) for rank in RANKS}
    names, rng = (None, *adapters), random.Random(1)
    prompts = [[rng.randrange(3, VOCAB) for _ in range(48)] for _ in range(16)]

    def by_peft(dtype: torch.dtype) -> dict[str | None, torch.Tensor]:
        reference, places = PeftReference(base, adapters, dtype), range(47)
        return {
            name: torch.stack(
                [reference.logits(name, prompt).log_softmax(-1)[places, prompt[1:]] for prompt in prompts]
            )
            for name in names
        }

    exact, rounded = by_peft(torch.float32), by_peft(torch.bfloat16)
    settings = {"kv_cache_memory": 64 << 20, "adapter_memory": 64 << 20, "adapter_cpu_memory": 64 << 20}
    with closing(
        LocalEngine(base, tmp_path / "work", dtype="bfloat16", kernels="numba", **settings)
    ) as engine:
        refs = {name: engine.publish(folder) for name, folder in adapters.items()}
        for number, prompt in enumerate(prompts):
            for name in names:
                adapter = None if name is None else refs[name]
                engine.add(f"{name} {number}", prompt, adapter, max_tokens=1, prompt_logprobs=0)
        engine.run()

        def scores(key: str) -> torch.Tensor:
            found = join_scores([e.scores for e in engine.events[key] if e.scores is not None]).prompt
            assert found is not None
            return torch.frombuffer(bytearray(found.values), dtype=torch.float32).view(47, -1)[:, 0]

        ours = {
            name: torch.stack([scores(f"{name} {number}") for number in range(len(prompts))])
            for name in names
        }

    def mean(one: torch.Tensor, other: torch.Tensor) -> float:
        return float((one - other).abs().mean())

    most = 1.2 * mean(rounded[None], exact[None])
    for name in names:
        error, peers_error, effect = (
            mean(each, exact[name]) for each in (ours[name], rounded[name], exact[None])
        )
        print(f"{name}: error {error:.4f}, PEFT's {peers_error:.4f}, at most {most:.4f}; effect {effect:.4f}")
        assert error <= most, name
        assert name is None or effect > 2 * most, "an adapter that did nothing would show"
