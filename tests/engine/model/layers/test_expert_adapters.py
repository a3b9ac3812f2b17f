"""LoRA on routed experts, from the files that PEFT saves to answers, beside attention, shared experts and the base."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from loraplex.adapters.admission.base_model import load_base_spec
from loraplex.engine.logprobs import join_scores
from support.engine.local_engine import LocalEngine
from support.models.checkpoints import FAMILIES, VOCAB, save_tiny
from support.models.expert_adapters import pairs, write

pytestmark = pytest.mark.usefixtures("one_torch_thread")

MIXTURES = ("qwen3_moe", "olmoe", "mixtral", "glm4_moe", "qwen3_5_moe", "qwen3_next", "qwen2_moe")
BOTH = ["experts.gate_up_proj", "experts.down_proj"]
SEVEN = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
TOKENS = 20
Logits = Callable[[list[int]], torch.Tensor]


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("bases")
    return {family: save_tiny(root / family, FAMILIES[family]) for family in MIXTURES}


def of_transformers(base: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation="eager").eval()


def logits_of(model: Any) -> Logits:
    def logits(tokens: list[int]) -> torch.Tensor:
        with torch.no_grad():
            found: torch.Tensor = model(torch.tensor([tokens])).logits[0]
        return found

    return logits


def save_trained(base: Path, out: Path, seed: int, **config: Any) -> Logits:
    """An adapter as PEFT makes and saves it, of random values."""
    model = get_peft_model(of_transformers(base), LoraConfig(lora_alpha=8, **config))
    generator = torch.Generator().manual_seed(seed)
    size = 0.15 if config["r"] < 32 else 0.06
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if ".lora_" in name:
                weight.copy_(size * torch.randn(weight.shape, generator=generator))
    model.save_pretrained(out)
    return logits_of(model.eval())


def save_pairs(base: Path, out: Path, rank: int, **config: Any) -> Logits:
    """A pair an expert, and the model with their products in its weights."""
    experts = load_base_spec(base).experts
    shape = next(iter(experts.values()))
    leaves = ("w1", "w3", "w2") if "block_sparse_moe" in shape.module_path else tuple(SEVEN[-3:])
    tensors = {name: 0.15 * array for name, array in pairs(experts, rank, leaves).items()}
    write(out, tensors, r=rank, target_modules=rf".*\.experts\.\d+\.({'|'.join(leaves)})", **config)
    scaling = 8 / rank ** (0.5 if config.get("use_rslora") else 1)
    model = of_transformers(base)
    for name, weight in model.named_parameters():
        place = re.search(r"layers\.(\d+)\..*experts\.(gate_up|down)_proj$", name)
        if place is None:
            continue
        inner = shape.inner_size
        parts = zip(leaves, (slice(0, inner), slice(inner, None), slice(None)), strict=True)
        for leaf, rows in list(parts)[2:] if place[2] == "down" else list(parts)[:2]:
            for expert in range(shape.count):
                path = f"{experts[int(place[1])].module_path}.{expert}.{leaf}"
                a, b = (torch.from_numpy(tensors[f"{path}.lora_{side}.weight"]) for side in "AB")
                weight.data[expert, rows] += scaling * b @ a
    return logits_of(model)


def save_all(base: Path, root: Path) -> dict[str, Logits]:
    """Adapters of every form, by the names of their folders."""
    both: dict[str, Any] = {"target_parameters": BOTH}
    with_attention = {"target_modules": ["q_proj", "o_proj"], **both}
    if "qwen3_next" in base.name:
        with_attention["target_modules"] = ["q_proj", "in_proj_qkvz"]
    return {
        "one rank": save_trained(base, root / "one rank", 1, r=1, target_modules=[], **both),
        "three, rsLoRA": save_trained(
            base, root / "three, rsLoRA", 2, r=3, use_rslora=True, **with_attention
        ),
        "eight, down": save_trained(
            base, root / "eight, down", 3, r=8, target_modules=[], target_parameters=BOTH[1:]
        ),
        "32": save_trained(base, root / "32", 4, r=32, **with_attention),
        "64 and 128": save_trained(base, root / "64 and 128", 5, r=64, target_modules=[],
                                   rank_pattern={r".*\.gate_up_proj": 128}, **both),
        "pairs": save_pairs(base, root / "pairs", 2),
        "pairs, rsLoRA": save_pairs(base, root / "pairs, rsLoRA", 12, use_rslora=True),
    }  # fmt: skip


def engine_of(base: Path, work: Path, **settings: Any) -> LocalEngine:
    return LocalEngine(base, work, **({
        "dtype": "float32", "kv_cache_memory": 16 << 20, "adapter_memory": 24 << 20, "max_model_len": 80,
        "max_num_batched_tokens": 48, "max_adapter_rank": 64,
    } | settings))  # fmt: skip


def prompt_of(name: str) -> list[int]:
    return [3 + (7 + len(name)) * number % (VOCAB - 3) for number in range(21)]


def check_answers(engine: LocalEngine, logits: dict[str, Logits]) -> None:
    for name, expected in logits.items():
        prompt, tokens = prompt_of(name), engine.tokens(name)
        want = expected(prompt + tokens[:-1])[len(prompt) - 1 :]
        assert len(tokens) == TOKENS
        assert tokens == want.argmax(-1).tolist(), name
        found = join_scores([e.scores for e in engine.events[name] if e.scores is not None]).output
        assert found is not None
        values = torch.frombuffer(bytearray(found.values), dtype=torch.float32).view(TOKENS, -1)[:, 0]
        chosen = want.log_softmax(-1)[range(TOKENS), tokens]
        assert (values - chosen).abs().max() <= 2.5e-4 * want.abs().max(), name


@pytest.mark.parametrize(
    "family", [MIXTURES[0], *(pytest.param(f, marks=pytest.mark.slow) for f in MIXTURES[1:])]
)
def test_every_form_answers_as_peft_does(family: str, bases: dict[str, Path], tmp_path: Path) -> None:
    logits = save_all(bases[family], tmp_path)
    engine = engine_of(bases[family], tmp_path / "work")
    try:
        for name in logits:
            engine.add(name, prompt_of(name), engine.publish(tmp_path / name), max_tokens=TOKENS, logprobs=0)
        logits["base"] = logits_of(of_transformers(bases[family]))
        engine.add("base", prompt_of("base"), max_tokens=TOKENS, logprobs=0)
        engine.run()
        check_answers(engine, logits)
    finally:
        engine.close()
