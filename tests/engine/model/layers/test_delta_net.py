"""Gated delta nets of Qwen3.5: what is refused, what is not read, the same bits, and answers with many adapters."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from loraplex.adapters.admission.base_model import load_base_spec
from loraplex.adapters.admission.inspection import inspect_adapter
from loraplex.adapters.admission.model_parts import DECODERS
from loraplex.adapters.errors import AdapterRefused
from loraplex.adapters.spec import SiteWeights
from loraplex.adapters.store.tensors import read_tensor
from loraplex.engine.devices import kernels_elsewhere
from loraplex.engine.execution.kv_cache import block_bytes
from loraplex.engine.kv.states import slot_bytes
from loraplex.engine.logprobs import join_scores
from loraplex.engine.model.base import ModelUnsupported
from loraplex.engine.model.model_plan import ModelSettings, make_plan
from support.adapters.peft_zoo import ALL_SITES, PeftReference
from support.adapters.tiny_adapters import save_adapters
from support.engine.local_engine import LocalEngine
from support.models.checkpoints import FAMILIES, VOCAB, PagedRun, edit_config, reference_logits, save_tiny
from support.models.loading import load_model, plan_model

pytestmark = pytest.mark.usefixtures("one_torch_thread")

SHAPES = ("qwen3_5-1", "qwen3_5-2", "qwen3_5-3")


def refusal(path: Path, **settings: Any) -> str:
    with pytest.raises(ModelUnsupported) as caught:
        plan_model(path, **settings)
    return str(caught.value)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("base"), FAMILIES["qwen3_5-3"])


@pytest.fixture(scope="module")
def nemotron(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("nemotron"), FAMILIES["nemotron_h"])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"attn_output_gate": False}, "attn_output_gate is false"),
        ({"output_gate_type": "sigmoid"}, "output_gate_type is 'sigmoid'"),
        ({"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype is 'bfloat16'"),
        ({"full_attention_interval": 4}, "full_attention_interval 4 and layer_types"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"linear_conv_kernel_dim": 5}, "linear_conv_kernel_dim 5"),
        ({"linear_key_head_dim": 40}, "linear_key_head_dim 40 is no multiple of 16"),
        ({"linear_num_key_heads": 2}, "linear_num_value_heads 3 is no multiple"),
        ({"linear_num_value_heads": 0}, "linear_num_value_heads is 0"),
        ({"layer_types": ["linear_attention"] * 3}, "none of its layers has attention (qwen3_5_text)"),
    ],
)  # fmt: skip
def test_a_config_that_means_something_else_is_refused_by_name(
    changes: dict[str, Any], words: str, base: Path, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_bytes((base / "config.json").read_bytes())
    edit_config(tmp_path, **changes)
    assert words in refusal(tmp_path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"time_step_limit": [0.0, 0.1]}, "time_step_limit [0.0, 0.1] is not served"),
        ({"mamba_proj_bias": True}, "mamba_proj_bias is true"),
        ({"residual_in_fp32": True}, "residual_in_fp32 is true"),
        ({"mlp_hidden_act": "silu"}, "mlp_hidden_act is 'silu'"),
        ({"mamba_hidden_act": "gelu"}, "mamba_hidden_act is 'gelu'"),
        ({"rms_norm_eps": 1e-3}, "rms_norm_eps is 0.001, and its layer_norm_epsilon says 1e-05"),
        ({"attention_head_dim": 16}, "attention_head_dim is 16, and its head_dim says 8"),
        ({"num_hidden_layers": 5}, "num_hidden_layers is 5, and its layers_block_type says 4"),
        ({"hybrid_override_pattern": "M*-*"}, "hybrid_override_pattern 'M*-*' and layers_block_type"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is true"),
        ({"attention_bias": True}, "attention_bias"),
        ({"sliding_window": 64}, "sliding_window 64"),
        ({"ssm_state_size": 24}, "ssm_state_size 24 is no multiple of 16"),
        ({"n_groups": 3}, "mamba_num_heads 4 is no multiple of n_groups 3"),
        ({"n_groups": 0}, "n_groups is 0"),
        ({"conv_kernel": 5}, "conv_kernel 5 is not served"),
        ({"time_step_min": -1.0}, "no range of a Mamba-2's steps"),
        ({"layers_block_type": ["mamba", "mlp"]}, "none of its layers has attention (nemotron_h)"),
        ({"layers_block_type": ["attention", "moe"]}, "its layers have experts"),
    ],
)  # fmt: skip
def test_a_nemotron_that_means_something_else_is_refused_by_name(
    changes: dict[str, Any], words: str, nemotron: Path, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_bytes((nemotron / "config.json").read_bytes())
    edit_config(tmp_path, **changes)
    assert words in refusal(tmp_path)


def test_nemotrons_layers_by_a_pattern_and_its_first_names(nemotron: Path, tmp_path: Path) -> None:
    """NVIDIA's files have both."""
    (tmp_path / "config.json").write_bytes((nemotron / "config.json").read_bytes())
    edit_config(
        tmp_path, layers_block_type=None, hybrid_override_pattern="M*-M", num_hidden_layers=4, rms_norm_eps=1e-5,
        attention_head_dim=8, time_step_limit=[0.0, math.inf],
    )  # fmt: skip
    (tmp_path / "model.safetensors").write_bytes((nemotron / "model.safetensors").read_bytes())
    spec, plain = plan_model(tmp_path).spec, plan_model(nemotron).spec
    assert spec is not None
    assert plain is not None
    assert spec.layers == plain.layers
    assert load_base_spec(tmp_path).sites == load_base_spec(nemotron).sites


@pytest.mark.parametrize("leaf", ["conv1d", "norm"])
def test_an_adapter_on_no_linear_of_nemotron_is_refused_by_name(
    leaf: str, nemotron: Path, tmp_path: Path
) -> None:
    options = {"r": 4, "lora_alpha": 8, "target_modules": ["in_proj"]}
    folder = save_adapters(nemotron, tmp_path, {"one": options})["one"]

    def change(tensors: dict[str, Any], config: dict[str, Any]) -> Any:
        old = "layers.0.mixer.in_proj"
        return {name.replace(old, f"layers.0.mixer.{leaf}"): t for name, t in tensors.items()}, config | {
            "target_modules": ["in_proj", leaf]
        }

    words = admission(nemotron, folder, change)
    assert leaf in words
    assert "not served" in words


def test_an_adapter_with_numbers_of_a_mamba_is_refused_by_name(nemotron: Path, tmp_path: Path) -> None:
    options = {"r": 4, "lora_alpha": 8, "target_modules": ["in_proj"]}
    folder = save_adapters(nemotron, tmp_path, {"one": options})["one"]
    name = "base_model.model.model.layers.0.mixer.A_log"
    words = admission(nemotron, folder, lambda tensors, config: (tensors | {name: torch.ones(4)}, config))
    assert f"unexpected tensor '{name}'" in words


def test_fields_that_transformers_does_not_read_may_say_what_it_computes(base: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((base / "config.json").read_bytes())
    plain = plan_model(tmp_path).spec
    edit_config(
        tmp_path, attn_output_gate=True, output_gate_type="swish", mamba_ssm_dtype="float32", mtp_num_hidden_layers=1,
        layer_types=["linear_attention", "full_attention", "linear_attention"], full_attention_interval=2,
    )  # fmt: skip
    spec = plan_model(tmp_path).spec
    assert spec is not None
    assert plain is not None
    assert spec.ignored == ()
    assert sorted(map(repr, spec.layers)) == sorted(map(repr, plain.layers))


@pytest.mark.parametrize("shape", [SHAPES[2], "olmo_hybrid", "granite4-h", "nemotron_h"])
def test_a_plan_for_a_gpu_has_the_states_of_one_for_a_cpu(shape: str, tmp_path: Path) -> None:
    base = save_tiny(tmp_path, FAMILIES[shape])
    plan = make_plan(base, ModelSettings(dtype="float32"), kernels_elsewhere(torch.device("cuda")))
    assert plan.shape == plan_model(base).shape
    assert slot_bytes(plan.shape.caches) > 0


def test_a_head_that_predicts_further_tokens_is_not_read(base: Path, tmp_path: Path) -> None:
    """Nor does it take sites away: it has as many linears in layer 0 as the model."""
    tensors = load_file(base / "model.safetensors")
    layer = {name: t for name, t in tensors.items() if name.startswith("model.layers.0.")}
    more = {name.replace("model.", "mtp.", 1): t.clone() for name, t in layer.items()}
    save_file(tensors | more | {"mtp.fc.weight": torch.ones(2, 4)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((base / "config.json").read_bytes())
    assert load_base_spec(tmp_path).sites == load_base_spec(base).sites
    load_model(tmp_path, "cpu", "float32")


def test_gates_stay_floats_where_linears_become_codes(tmp_path: Path) -> None:
    base = save_tiny(tmp_path, FAMILIES["qwen3_5-2"] | {"hidden_size": 64})
    run = {}
    for quantise in (False, True):
        model = load_model(base, "cpu", "float32", quantise=quantise)
        run[quantise] = next(layer.mixer for layer in model._layers if hasattr(layer.mixer, "gates"))  # type: ignore[attr-defined]
    x = torch.randn(4, 64)
    assert torch.equal(run[True].gates.weight(x, None), run[False].gates.weight(x, None))
    assert not torch.equal(run[True].given.weight(x, None), run[False].given.weight(x, None))


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.soak)])
def test_a_row_has_the_same_bits_whoever_rides_along(dtype: str, base: Path) -> None:
    """In any slices beside any others, in states and windows full of NaN."""
    model = load_model(base, "cpu", dtype, kernels="numba", batch_invariant=True)
    rng = random.Random(dtype)
    prompts = [[rng.randrange(VOCAB) for _ in range(length)] for length in (1, 2, 18, 40, 40)]
    alone = []
    for prompt in prompts:
        run = PagedRun(model, [prompt])
        run.step({0: len(prompt)}, None)
        alone.append(run.result(0))
    run = PagedRun(model, prompts)
    while left := [i for i, prompt in enumerate(prompts) if run.done[i] < len(prompt)]:
        chosen = rng.sample(left, rng.randint(1, len(left)))
        run.step({i: min(rng.choice([1, 1, 5, 16]), len(prompts[i]) - run.done[i]) for i in chosen}, None)
    for index, want in enumerate(alone):
        assert torch.equal(run.result(index), want), index


WIDE = {
    **FAMILIES["qwen3_5-2"], "hidden_size": 512, "intermediate_size": 1792, "head_dim": 256, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_num_key_heads": 8, "linear_num_value_heads": 8, "num_hidden_layers": 8,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"] + ["linear_attention"] * 3 + ["full_attention"],
}  # fmt: skip
"""A third of the sizes of Qwen3.5-0.8B, with its heads."""


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(s, marks=() if s == SHAPES[2] else pytest.mark.soak)
        for s in (*SHAPES, "wide", "qwen3_5_moe", "qwen3_next", "glm4_moe")
    ],
)
def test_bfloat16_errs_no_more_than_transformers(shape: str, tmp_path: Path) -> None:
    """Both beside the same weights in float32."""
    base = save_tiny(tmp_path / "own", FAMILIES.get(shape, WIDE))
    tensors = {name: t.bfloat16() for name, t in load_file(base / "model.safetensors").items()}
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    rng = random.Random(shape)
    prompts = [[rng.randrange(VOCAB) for _ in range(length)] for length in (5, 17, 40, 65, 90)]
    exact = torch.cat(reference_logits(base, prompts))
    theirs = torch.cat(reference_logits(base, prompts, torch.bfloat16))
    run = PagedRun(load_model(base, "cpu", "bfloat16", kernels="numba"), prompts)
    run.step({i: len(prompt) for i, prompt in enumerate(prompts)}, None)
    ours = torch.cat([run.result(i) for i in range(len(prompts))])

    def errors(found: torch.Tensor) -> tuple[float, float]:
        """The root of the mean square of a logit, and the mean of a log probability."""
        of_logits = (found - exact).square().mean(1).mean().sqrt()
        return float(of_logits), float((found.log_softmax(1) - exact.log_softmax(1)).abs().mean())

    for kind, error, peers_error in zip(("logits", "log p"), errors(ours), errors(theirs), strict=True):
        print(f"{shape}, {kind}: {error:.5f}, transformers' {peers_error:.5f}, {error / peers_error:.3f}")
        assert error <= 1.2 * peers_error


def long_run(*args: Any) -> Any:
    return pytest.param(*args, marks=pytest.mark.soak)


@pytest.mark.parametrize(
    ("shape", "seeds", "count", "turns"),
    [
        (SHAPES[2], 1, 5, 1),
        ("olmo_hybrid", 1, 4, 1),
        ("granite4-h", 1, 4, 1),
        ("nemotron_h", 1, 4, 1),
        long_run("nemotron_h-biases", 1, 4, 1),
        long_run("qwen3_next", 1, 4, 1),
        long_run("qwen3_5_moe", 1, 4, 1),
        *(
            long_run(shape, 10, 20, 2)
            for shape in (*SHAPES, "olmo_hybrid", "granite4-h", "nemotron_h", "qwen3_next", "qwen3_5_moe")
        ),
    ],
)
def test_adapters_and_the_base_in_one_engine(
    shape: str, seeds: int, count: int, turns: int, tmp_path: Path
) -> None:
    """LoRA, rsLoRA and DoRA of several ranks, in steps of 40 rows, on so few blocks that sequences start over. Greedy
    tokens are those of transformers and PEFT, and log probabilities within 1e-4 of the largest logit; a second turn
    goes on from the first."""
    chosen = {
        f"a{n}": {
            "r": 1 + n, "lora_alpha": 8, "target_modules": ALL_SITES, "use_rslora": n % 3 == 1, "use_dora": n % 3 == 2,
        }
        for n in range(count)
    }  # fmt: skip
    sizes = {"head_dim": 128, "linear_value_head_dim": 32}
    for seed in range(seeds):
        folder = tmp_path / str(seed)
        base = save_tiny(folder / "base", FAMILIES[shape] | sizes, seed=seed)
        adapters = save_adapters(base, folder, chosen)
        caches = plan_model(base, dtype="float32").shape.caches
        memory = max(8 * slot_bytes(caches), (6 + 10 * turns) * block_bytes(caches, torch.float32))
        engine = LocalEngine(
            base, folder / "work", dtype="float32", max_model_len=80 + 20 * turns, max_num_batched_tokens=40,
            max_num_seqs=8, kv_cache_memory=memory, adapter_memory=8 << 20, adapter_cpu_memory=8 << 20, num_threads=1,
        )  # fmt: skip
        if (shape, turns) == (SHAPES[2], 1):
            assert engine.built.info.max_num_seqs == 4  # states take half of the memory
        refs = {name: engine.publish(path, name=name) for name, path in adapters.items()}
        rng = random.Random(f"{shape} {seed}")
        names = (*adapters, None, None, None)
        lengths = [(44, 2, 40, 9)[number % 4] for number in range(len(names))]
        prompts = [[rng.randrange(3, VOCAB) for _ in range(length)] for length in lengths]
        reference = PeftReference(base, adapters, torch.float32)
        for turn in range(turns):
            for number, name in enumerate(names):
                engine.add(
                    f"{turn}-{number}",
                    prompts[number],
                    None if name is None else refs[name],
                    max_tokens=30,
                    logprobs=0,
                )
            engine.run()
            for number, name in enumerate(names):
                tokens = check_tokens(engine, f"{turn}-{number}", reference, name, prompts[number])
                prompts[number] = [*prompts[number], *tokens, 5, 9]
        assert engine.core.stats().num_preemptions > 0
        engine.close()


def check_tokens(
    engine: LocalEngine, key: str, reference: PeftReference, name: str | None, prompt: list[int]
) -> list[int]:
    tokens = engine.tokens(key)
    want = reference.logits(name, prompt + tokens[:-1])[len(prompt) - 1 :]
    assert tokens == want.argmax(-1).tolist(), key
    found = join_scores([event.scores for event in engine.events[key] if event.scores is not None]).output
    assert found is not None
    values = torch.frombuffer(bytearray(found.values), dtype=torch.float32).view(len(tokens), -1)[:, 0]
    expected = want.log_softmax(-1)[range(len(tokens)), tokens]
    assert (values - expected).abs().max() <= 1e-4 * want.abs().max(), key
    return tokens


def olmo_with(base: Path, folder: Path, cut: Any) -> Path:
    """A copy of an OLMo Hybrid whose convolutions are stored as `cut` makes them, of [channels, 1, 4]."""
    folder.mkdir()
    (folder / "config.json").write_bytes((base / "config.json").read_bytes())
    tensors = load_file(base / "model.safetensors")
    for own in {name.rpartition("q_conv1d")[0] for name in tensors if "q_conv1d" in name}:
        whole = torch.cat([tensors.pop(f"{own}{part}_conv1d.weight") for part in "qkv"])
        tensors |= {f"{own}{name}.weight": part.clone() for name, part in cut(whole).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def in_parts(*sizes: int) -> Any:
    return lambda whole: {f"{part}_conv1d": t for part, t in zip("qkv", whole.split(sizes), strict=True)}


def test_convolutions_of_olmo_hybrid_in_each_form_that_files_have(tmp_path: Path) -> None:
    """transformers saves thirds of the channels, whatever is whose."""
    base = save_tiny(tmp_path / "base", FAMILIES["olmo_hybrid"])
    assert load_file(base / "model.safetensors")["model.layers.0.linear_attn.q_conv1d.weight"].shape[0] == 86
    folders = [
        base,
        olmo_with(base, tmp_path / "parts", in_parts(64, 64, 128)),
        olmo_with(base, tmp_path / "whole", lambda whole: {"conv1d": whole}),
    ]
    found = []
    for folder in folders:
        run = PagedRun(load_model(folder, "cpu", "float32"), [[5, 9, 40, 77, 3, 21]])
        run.step({0: 6}, None)
        found.append(run.result(0))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    with pytest.raises(ModelUnsupported, match=r"q_conv1d.weight has the shape \[128, 1, 4\], not \[86"):
        load_model(olmo_with(base, tmp_path / "other", in_parts(128, 64, 64)), "cpu", "float32")


def admission(base: Path, folder: Path, change: Any) -> str:
    """The refusal of an adapter whose tensors and config were changed; empty where it is served."""
    path, config = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    tensors, settings = change(load_file(path), json.loads(config.read_text()))
    save_file(tensors, path, metadata={"format": "pt"})
    config.write_text(json.dumps(settings))
    try:
        inspect_adapter(config, path, load_base_spec(base), max_rank=64)
    except AdapterRefused as error:
        return str(error)
    return ""


def test_every_name_of_the_decoder_is_the_same_adapter(base: Path, tmp_path: Path) -> None:
    """Other servers load names of the text class, or of the wrapper, onto no module, and answer as the base."""
    chosen = {"all": {"r": 4, "lora_alpha": 8, "target_modules": ALL_SITES}}
    path = save_adapters(base, tmp_path, chosen)["all"] / "adapter_model.safetensors"
    tensors, before, found = load_file(path), "base_model.model.", []
    for decoder, _ in DECODERS:
        named = {name.replace(f"{before}model.", before + decoder): t for name, t in tensors.items()}
        save_file(named, path, metadata={"format": "pt"})
        spec = inspect_adapter(path.parent / "adapter_config.json", path, load_base_spec(base), max_rank=64)
        found.append({(s.layer, s.site): load_site(path, s) for s in spec.sites})
    assert len(found[0]) == 3 * 3 + 4 + 2 * 5
    for other in found[1:]:
        assert other.keys() == found[0].keys()
        assert all(torch.equal(other[site], change) for site, change in found[0].items())


def load_site(path: Path, site: SiteWeights) -> torch.Tensor:
    return site.scaling * torch.from_numpy(read_tensor(path, site.b) @ read_tensor(path, site.a))


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (
            "in_proj_b",
            None,
            "the config names model.layers.1.linear_attn.in_proj_b, but no tensors came for it",
        ),
        (
            "in_proj_a",
            None,
            "the config names model.layers.1.linear_attn.in_proj_a, but no tensors came for it",
        ),
        ("in_proj_qkv", "in_proj_qkvz", "the order of its rows is not known"),
        ("in_proj_b", "in_proj_ba", "the order of its rows is not known"),
        ("out_proj", "conv1d", "LoRA on 'model.layers.1.linear_attn.conv1d' and 1 more is not served"),
    ],
)
def test_what_other_servers_drop_or_misread_is_refused(
    old: str, new: str | None, words: str, base: Path, tmp_path: Path
) -> None:
    """Adapters that lack tensors their config names, as SGLang served them (sglang#31522), and linears that other tools
    fuse."""
    folder = save_adapters(base, tmp_path, {"all": {"r": 4, "lora_alpha": 8, "target_modules": ALL_SITES}})[
        "all"
    ]

    def change(tensors: dict[str, Any], config: dict[str, Any]) -> Any:
        if new is None:
            return {name: t for name, t in tensors.items() if f".{old}." not in name}, config
        config["target_modules"] = [new if name == old else name for name in config["target_modules"]]
        return {name.replace(f".{old}.", f".{new}."): t for name, t in tensors.items()}, config

    assert words in admission(base, folder, change)
