"""gpt-oss on the fused decoder: sinks, experts with biases, stacks with gate and up in turns."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from loraplex.adapters.admission.base_model import load_base_spec
from loraplex.adapters.spec import ExpertShape
from loraplex.engine.devices import kernels_elsewhere
from loraplex.engine.model.base import ModelUnsupported
from loraplex.engine.model.model_plan import ModelSettings, make_plan
from support.adapters.peft_zoo import PeftReference
from support.adapters.tiny_adapters import save_adapters
from support.engine.local_engine import answers_in_one_batch
from support.models.checkpoints import FAMILIES, VOCAB, PagedRun, edit_config, reference_logits, save_tiny
from support.models.loading import load_model, plan_model

pytestmark = pytest.mark.usefixtures("one_torch_thread")

PROMPT = [number * 7 % VOCAB for number in range(40)]
GATE_UP = "model.layers.0.mlp.experts.gate_up_proj"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("gpt_oss") / "base", FAMILIES["gpt_oss"])


def test_experts_are_found_in_stacks_whose_columns_lie_in_turns(base: Path) -> None:
    spec = load_base_spec(base)
    assert spec.experts[1] == ExpertShape(1, "model.layers.1.mlp.experts", 6, 32, 24, in_turns=True)
    assert {site for layer, site in spec.sites if layer == 1} == {
        "q_proj", "k_proj", "v_proj", "o_proj", "router",
    }  # fmt: skip
    assert plan_model(base).explain().startswith("gpt_oss on the fused decoder")
    elsewhere = make_plan(base, ModelSettings(), kernels_elsewhere(torch.device("cuda")))
    assert elsewhere.decoder == "fused"


def test_base_and_adapters_in_one_batch_answer_as_in_peft(base: Path, tmp_path: Path) -> None:
    """On the attention and the router. Prompts are computed in chunks, and prefixes found again."""
    names = ["q_proj", "k_proj", "v_proj", "o_proj"]
    chosen: dict[str, dict[str, Any]] = {
        "routed": {"r": 8, "lora_alpha": 16, "target_modules": names, "target_parameters": ["router.weight"]},
        "router": {"r": 3, "lora_alpha": 9, "target_modules": [], "target_parameters": ["router.weight"]},
        "dora": {"r": 4, "lora_alpha": 8, "target_modules": names, "use_dora": True},
    }
    adapters = save_adapters(base, tmp_path, chosen)
    sizes = {"max_model_len": 96, "max_num_batched_tokens": 24}
    answers = answers_in_one_batch(base, tmp_path, adapters, PROMPT, 20, **sizes)
    for name, answer in answers.items():
        # Each alone: a second adapter on one parameter changes what PEFT computes of the first.
        reference = PeftReference(base, {name: adapters.get(name, adapters["router"])}, torch.float32)
        logits = reference.logits(None if name == "base" else name, PROMPT + answer)
        assert answer == logits[len(PROMPT) - 1 : -1].argmax(-1).tolist(), name
    assert len({tuple(answer) for answer in answers.values()}) == 4


@pytest.mark.parametrize(
    ("dtype", "settings"),
    [("float32", {}), ("bfloat16", {}), ("bfloat16", {"kv_codes": True}), ("float32", {"quantise": True})],
    ids=lambda value: str(value),
)
def test_a_row_has_the_same_bits_alone_and_beside_others(
    dtype: str, settings: dict[str, Any], base: Path
) -> None:
    model = load_model(base, "cpu", dtype, kernels="numba", batch_invariant=True, **settings)
    rng = random.Random(dtype)
    prompts = [[rng.randrange(VOCAB) for _ in range(length)] for length in (2, 18, 40)]
    kv_dtype = torch.int8 if settings.get("kv_codes") else None
    together = PagedRun(model, prompts, kv_dtype=kv_dtype)
    while left := [i for i, prompt in enumerate(prompts) if together.done[i] < len(prompt)]:
        chosen = rng.sample(left, rng.randint(1, len(left)))
        together.step({i: min(rng.choice([1, 5, 16]), len(prompts[i]) - together.done[i]) for i in chosen})
    for index, prompt in enumerate(prompts):
        alone = PagedRun(model, [prompt], seed=index, kv_dtype=kv_dtype)
        alone.step({0: len(prompt)})
        assert torch.equal(alone.result(0), together.result(index)), index


@pytest.mark.parametrize(
    "changed", ["self_attn.sinks", "experts.gate_up_proj_bias", "experts.down_proj_bias"]
)
def test_sinks_and_biases_of_experts_count_as_in_transformers(
    changed: str, base: Path, tmp_path: Path
) -> None:
    tensors = load_file(base / "model.safetensors")
    for name in tensors:
        if name.endswith(changed):
            tensors[name] = 3 * tensors[name] + 1
    path = copy_with(base, tmp_path, tensors)
    (want,), (before,) = reference_logits(path, [PROMPT]), reference_logits(base, [PROMPT])
    run = PagedRun(load_model(path, "cpu", "float32"), [PROMPT])
    run.step({0: 25})
    run.step({0: 15})
    assert (run.result(0) - want).abs().max() < 1e-4 < 1e-2 * (want - before).abs().max()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"swiglu_limit": 0.0}, "swiglu_limit 0.0"),
        ({"swiglu_alpha": -1.0}, "swiglu_alpha -1.0"),
        ({"num_experts_per_tok": 7}, "num_experts_per_tok 7"),
        ({"num_local_experts": 0}, "num_experts 0"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"layer_types": ["full_attention", "chunked_attention", "full_attention"]}, "chunked_attention"),
    ],
)
def test_a_config_that_means_something_else_is_refused_by_name(
    changes: dict[str, Any], words: str, base: Path, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_bytes((base / "config.json").read_bytes())
    edit_config(tmp_path, **changes)
    with pytest.raises(ModelUnsupported, match=words):
        plan_model(tmp_path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda t: t.transpose(1, 2),
            r"experts\.0\.gate_proj\.weight has the shape \[16, 48\], not \[24, 32\]",
        ),
        (lambda t: t[:5], r"lacks .*experts\.5\.gate_proj"),
        (lambda t: t[..., :-1], r"lacks .*experts\.0\.gate_proj"),
        (lambda t: t[0], r"lacks .*experts\.0\.gate_proj"),
    ],
)
def test_stacks_of_another_shape_are_refused_by_name(
    change: Any, words: str, base: Path, tmp_path: Path
) -> None:
    tensors = load_file(base / "model.safetensors")
    path = copy_with(base, tmp_path, tensors | {GATE_UP: change(tensors[GATE_UP]).contiguous()})
    with pytest.raises(ModelUnsupported, match=words):
        load_model(path, "cpu", "float32")


def test_numbers_of_the_activation_are_of_the_fingerprint(base: Path, tmp_path: Path) -> None:
    path = copy_with(base, tmp_path, load_file(base / "model.safetensors"))
    before = load_base_spec(path).fingerprint
    edit_config(path, swiglu_limit=0.5)
    assert load_base_spec(path).fingerprint != before


def copy_with(base: Path, out: Path, tensors: dict[str, torch.Tensor]) -> Path:
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    (out / "config.json").write_bytes((base / "config.json").read_bytes())
    return out
