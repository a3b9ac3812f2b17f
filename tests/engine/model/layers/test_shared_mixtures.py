"""Mixtures whose layers have a shared expert too: GLM-4.5, Qwen2-MoE, Granite, Gemma 4, and Qwen3.5-MoE and Qwen3-Next
behind delta nets."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from loraplex.adapters.admission.base_model import load_base_spec
from loraplex.adapters.spec import BaseSpec
from loraplex.engine.devices import kernels_elsewhere
from loraplex.engine.logprobs import join_scores
from loraplex.engine.model.base import ModelUnsupported
from loraplex.engine.model.model_plan import ModelSettings, make_plan
from loraplex.kernels.backend import resolve_kernels
from loraplex.kernels.lora.site_groups import EMBEDDING, HEAD
from support.engine.local_engine import LocalEngine
from support.models.checkpoints import (
    FAMILIES,
    VOCAB,
    PagedRun,
    edit_config,
    reference_logits,
    save_tiny,
    save_tiny_with_vision,
)
from support.models.loading import load_model, plan_model

pytestmark = pytest.mark.usefixtures("one_torch_thread")

MIXTURES = ("qwen3_next", "qwen3_5_moe", "qwen2_moe", "glm4_moe")
IN_LAYERS = ("gemma4-moe", "granite4-tiny", "granitemoeshared", "granitemoe")
"""Those whose experts stand beside the feed-forward, in stacks; the last has no other."""
ELSEWHERE = {"qwen2_moe", "glm4_moe", "granitemoeshared", "granitemoe"}
"""Those that run through transformers where torch computes on a GPU."""
STACKED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
TOKENS = 20
GPU = torch.device("cuda")


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("bases")
    return {family: save_tiny(root / family, FAMILIES[family]) for family in (*MIXTURES, *IN_LAYERS)}


def save_adapter(base: BaseSpec, out: Path, rank: int, **options: Any) -> dict[str, torch.Tensor]:
    """LoRA on every linear of the layers, as PEFT saves it, and the change of each weight by its module's path."""
    generator = torch.Generator().manual_seed(rank)
    tensors: dict[str, torch.Tensor] = {}
    changes: dict[str, torch.Tensor] = {}
    alpha, root = 8, 0.5 if options.get("use_rslora") else 1.0
    for (_, site), shape in base.sites.items():
        if site not in (HEAD, EMBEDDING):
            a = 0.2 * torch.randn(rank, shape.in_features, generator=generator)
            b = 0.2 * torch.randn(shape.out_features, rank, generator=generator)
            name = f"base_model.model.{shape.module_path}"
            tensors |= {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}
            changes[shape.module_path] = alpha / rank**root * b @ a
    out.mkdir()
    save_file(tensors, out / "adapter_model.safetensors", {"format": "pt"})
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": sorted(changes),
        **options,
    }
    (out / "adapter_config.json").write_text(json.dumps(config))
    return changes


def merged(base: Path, changes: dict[str, torch.Tensor]) -> Any:
    model = AutoModelForCausalLM.from_pretrained(
        base, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    for path, change in changes.items():
        model.get_submodule(path).weight.data += change
    return model


@pytest.mark.parametrize(
    "family",
    [
        MIXTURES[0],
        *IN_LAYERS[:2],
        *(pytest.param(f, marks=pytest.mark.soak) for f in (*MIXTURES[1:], *IN_LAYERS[2:])),
    ],
)
def test_lora_on_every_linear_answers_as_the_merged_model(
    family: str, bases: dict[str, Path], tmp_path: Path
) -> None:
    """On shared experts, their gates and routers, and linears of several parts. PEFT of today loses some of these when
    it loads a file that names them."""
    base, spec = bases[family], load_base_spec(bases[family])
    leaves = {site for _, site in spec.sites}
    shared = {"gate", "shared_expert_gate"} if family.startswith("qwen") else set()
    shared = {"router"} if family.startswith("granite") else {"proj"} if family == "gemma4-moe" else shared
    dense = {"gate_proj", "up_proj", "down_proj"}
    if family.startswith("granite"):
        dense = set() if family == "granitemoe" else {"input_linear", "output_linear"}
    assert shared | dense | {"o_proj"} <= leaves
    assert ({"in_proj_qkvz", "in_proj_ba"} <= leaves) == (family == "qwen3_next")
    changes = {"base": {}, "one": save_adapter(spec, tmp_path / "one", 8)}
    changes["two"] = save_adapter(spec, tmp_path / "two", 3, use_rslora=True)
    engine = LocalEngine(
        base, tmp_path / "work", dtype="float32", kv_cache_memory=16 << 20, adapter_memory=8 << 20,
        max_model_len=80, max_num_batched_tokens=40,
    )  # fmt: skip
    prompts = {name: [3 + (7 + len(name)) * number % (VOCAB - 3) for number in range(25)] for name in changes}
    try:
        for name, prompt in prompts.items():
            ref = None if name == "base" else engine.publish(tmp_path / name)
            engine.add(name, prompt, ref, max_tokens=TOKENS, logprobs=0)
        engine.run()
        for name, prompt in prompts.items():
            tokens = engine.tokens(name)
            with torch.no_grad():
                logits = merged(base, changes[name])(torch.tensor([prompt + tokens[:-1]])).logits[0]
            want = logits[len(prompt) - 1 :]
            assert tokens == want.argmax(-1).tolist(), name
            assert len(tokens) == TOKENS
            found = join_scores([e.scores for e in engine.events[name] if e.scores is not None]).output
            assert found is not None
            values = torch.frombuffer(bytearray(found.values), dtype=torch.float32).view(TOKENS, -1)[:, 0]
            expected = want.log_softmax(-1)[range(TOKENS), tokens]
            assert (values - expected).abs().max() <= 2.5e-4 * want.abs().max(), name
    finally:
        engine.close()


@pytest.mark.parametrize("family", [*MIXTURES, *IN_LAYERS])
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.soak)])
def test_a_row_has_the_same_bits_alone_and_beside_others(
    family: str, dtype: str, bases: dict[str, Path]
) -> None:
    model = load_model(bases[family], "cpu", dtype, kernels="numba", batch_invariant=True)
    rng = random.Random(family)
    prompts = [[rng.randrange(VOCAB) for _ in range(length)] for length in (2, 18, 40)]
    together = PagedRun(model, prompts)
    while left := [i for i, prompt in enumerate(prompts) if together.done[i] < len(prompt)]:
        chosen = rng.sample(left, rng.randint(1, len(left)))
        together.step({i: min(rng.choice([1, 5, 16]), len(prompts[i]) - together.done[i]) for i in chosen})
    for index, prompt in enumerate(prompts):
        alone = PagedRun(model, [prompt], seed=index)
        alone.step({0: len(prompt)})
        assert torch.equal(alone.result(0), together.result(index)), index


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("qwen3_5_moe", {"norm_topk_prob": False}, "norm_topk_prob is false"),
        ("qwen3_5_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step is 2"),
        ("qwen3_5_moe", {"mlp_only_layers": [1]}, "mlp_only_layers is [1]"),
        ("qwen3_5_moe", {"output_gate_type": "sigmoid"}, "output_gate_type is 'sigmoid'"),
        ("qwen3_5_moe", {"num_local_experts": 4}, "num_local_experts is 4"),
        ("qwen3_5_moe", {"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size 0"),
        ("qwen3_5_moe", {"num_experts": 0}, "num_experts 0"),
        ("qwen3_next", {"attn_output_gate": False}, "attn_output_gate is false"),
        ("qwen3_next", {"linear_num_key_heads": 3}, "linear_num_value_heads 4 is no multiple"),
        ("qwen3_next", {"decoder_sparse_step": 0}, "decoder_sparse_step 0"),
        ("qwen3_next", {"full_attention_interval": 4}, "full_attention_interval 4 and layer_types"),
        ("qwen3_next", {"num_experts_per_tok": 7}, "num_experts_per_tok 7"),
        ("qwen3_next", {"moe_intermediate_size": -1}, "moe_intermediate_size -1"),
        ("qwen2_moe", {"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size 0"),
        ("qwen2_moe", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ("gemma4-moe", {"top_k_experts": 7}, "top_k_experts 7"),
        ("gemma4-moe", {"num_experts": None}, "num_experts null"),
        ("gemma4-moe", {"moe_intermediate_size": 0}, "moe_intermediate_size 0"),
        ("gemma4-moe", {"hidden_activation": "silu"}, "hidden_activation is 'silu'"),
        ("granite4-tiny", {"num_experts_per_tok": 7}, "num_experts_per_tok 7"),
        ("granite4-tiny", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ("granitemoe", {"residual_multiplier": -1.0}, "residual_multiplier is -1.0"),
        ("granitemoeshared", {"num_local_experts": 0}, "num_experts 0"),
        ("glm4_moe", {"topk_group": 5}, "topk_group 5"),
        ("glm4_moe", {"n_shared_experts": 0}, "n_shared_experts 0"),
        ("glm4_moe", {"moe_intermediate_size": 0}, "moe_intermediate_size 0"),
        ("glm4_moe", {"num_nextn_predict_layers": 10**9}, "num_nextn_predict_layers is 1000000000"),
    ],
)
def test_a_config_that_means_something_else_is_refused_by_name(
    family: str, changes: dict[str, Any], words: str, bases: dict[str, Path], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_bytes((bases[family] / "config.json").read_bytes())
    edit_config(tmp_path, **changes)
    with pytest.raises(ModelUnsupported) as caught:
        plan_model(tmp_path)
    assert words in str(caught.value)
    with pytest.raises(ModelUnsupported) as caught:
        make_plan(tmp_path, ModelSettings(), kernels_elsewhere(GPU))
    assert words in str(caught.value)


@pytest.mark.parametrize("family", [*MIXTURES, *IN_LAYERS])
def test_experts_behind_states_are_refused_where_torch_computes_on_a_gpu(
    family: str, bases: dict[str, Path]
) -> None:
    assert make_plan(bases[family], ModelSettings(), kernels_elsewhere(GPU)).decoder == "fused"
    kernels = resolve_kernels("torch", GPU)
    if family in ELSEWHERE:
        assert make_plan(bases[family], ModelSettings(), kernels).decoder == "transformers"
        return
    where = {"gemma4-moe": "beside feed-forwards", "granite4-tiny": "behind Mamba-2"}
    words = f"experts {where.get(family, 'behind gated delta nets')}, .* choose --kernels auto"
    with pytest.raises(ModelUnsupported, match=words):
        make_plan(bases[family], ModelSettings(), kernels)


def copy_with(base: Path, out: Path, tensors: dict[str, torch.Tensor]) -> Path:
    out.mkdir(exist_ok=True)
    save_file(
        {name: t.contiguous() for name, t in tensors.items()}, out / "model.safetensors", {"format": "pt"}
    )
    (out / "config.json").write_bytes((base / "config.json").read_bytes())
    return out


def stacked(base: Path) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint, with experts as stacks [experts, out, in]."""
    tensors = load_file(base / "model.safetensors")
    for own in {name.partition("experts.0.")[0] for name in tensors if ".experts.0." in name}:
        count = len({name for name in tensors if name.startswith(f"{own}experts.") and "down_proj" in name})
        for whole, parts in STACKED.items():
            each = [
                torch.cat([tensors.pop(f"{own}experts.{expert}.{part}.weight") for part in parts])
                for expert in range(count)
            ]
            tensors[f"{own}experts.{whole}"] = torch.stack(each)
    return tensors


def logits_of(path: Path, **settings: Any) -> torch.Tensor:
    run = PagedRun(load_model(path, "cpu", "float32", **settings), [[5, 9, 40, 77, 3, 21]])
    run.step({0: 6})
    return run.result(0)


@pytest.mark.parametrize(
    "family", [MIXTURES[1], *(pytest.param(f, marks=pytest.mark.soak) for f in (MIXTURES[0], *MIXTURES[2:]))]
)
def test_stacks_of_experts_are_read_as_those_of_each_expert(
    family: str, bases: dict[str, Path], tmp_path: Path
) -> None:
    base = bases[family]
    tensors = stacked(base)
    assert any(name.endswith(".experts.gate_up_proj") for name in tensors)
    path = copy_with(base, tmp_path / "stacked", tensors)
    ours, theirs = load_base_spec(path), load_base_spec(base)
    assert (ours.sites, ours.experts, ours.fingerprint) == (theirs.sites, theirs.experts, theirs.fingerprint)
    for settings in ({}, {"quantise": True}):
        assert torch.equal(logits_of(path, **settings), logits_of(base, **settings))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda t: t.transpose(1, 2),
            r"experts\.0\.gate_proj\.weight has the shape \[16, 48\], not \[24, 32\]",
        ),
        (lambda t: t[:7], r"lacks .*experts\.7\.gate_proj"),
        (lambda t: torch.cat((t, t[:1])), r"experts\.8\.gate_proj"),
        (lambda t: t[:, :-1], r"lacks .*experts\.0\.gate_proj"),
        (lambda t: t[0], r"lacks .*experts\.0\.gate_proj"),
    ],
)
def test_stacks_of_another_shape_are_refused_by_name(
    change: Any, words: str, bases: dict[str, Path], tmp_path: Path
) -> None:
    tensors = stacked(bases["qwen3_5_moe"])
    name = "model.layers.0.mlp.experts.gate_up_proj"
    path = copy_with(bases["qwen3_5_moe"], tmp_path, tensors | {name: change(tensors[name])})
    with pytest.raises(ModelUnsupported, match=words):
        load_model(path, "cpu", "float32")


def test_a_head_that_predicts_further_tokens_is_not_read(bases: dict[str, Path], tmp_path: Path) -> None:
    """Nor does it take sites away."""
    base = bases["qwen3_next"]
    tensors = load_file(base / "model.safetensors")
    layer = {name: t for name, t in tensors.items() if name.startswith("model.layers.2.")}
    more = {name.replace("model.layers.2", "mtp.layers.0"): t.clone() for name, t in layer.items()}
    path = copy_with(base, tmp_path, tensors | more | {"mtp.fc.weight": torch.ones(2, 4)})
    assert load_base_spec(path).sites == load_base_spec(base).sites
    load_model(path, "cpu", "float32")


def test_the_text_part_of_a_gemma4_with_experts_computes_as_transformers(tmp_path: Path) -> None:
    base = save_tiny_with_vision(tmp_path, "gemma4", FAMILIES["gemma4-moe"])
    assert plan_model(base).explain().startswith("gemma4_text on the fused decoder")
    (want,) = reference_logits(base, [[5, 9, 40, 77, 3, 21]])
    assert (logits_of(base) - want).abs().max() < 2.5e-4
