"""Every form in which LoRA on routed experts is saved is read into what PEFT computes, or refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM

from loraplex.adapters.errors import AdapterRefused
from loraplex.adapters.spec import ExpertShape
from support.models import expert_adapters as made
from support.models.expert_adapters import (
    Arrays,
    changes,
    changes_in,
    pairs,
    read,
    stacks,
    three_dimensions,
    write,
)
from support.models.tiny_families import small_config

SEVEN = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
BOTH = ["experts.gate_up_proj", "experts.down_proj"]
RECIPES: dict[str, dict[str, Any]] = {
    "both": {"target_modules": ["q_proj"], "target_parameters": BOTH},
    "in another order, rsLoRA": {"target_modules": [], "target_parameters": BOTH[::-1], "use_rslora": True},
    "down alone": {"target_modules": [], "target_parameters": ["mlp.experts.down_proj"]},
    "gate and up alone": {"target_modules": [], "target_parameters": ["experts.gate_up_proj"]},
    "seven names": {"target_modules": SEVEN, "rank_pattern": {"q_proj": 2}},
    "all-linear": {"target_modules": "all-linear"},
}
CASES = [
    *(("qwen3_moe", recipe) for recipe in RECIPES),
    ("olmoe", "seven names"),
    ("mixtral", "all-linear"),
    ("glm4_moe", "seven names"),
    ("qwen3_5_moe_text", "both"),
    ("gpt_oss", "both"),
]
LAYERS = {layer: ExpertShape(layer, f"model.layers.{layer}.mlp.experts", 3, 16, 12) for layer in (1, 2)}
SQUARE = {0: ExpertShape(0, "model.layers.0.mlp.experts", 3, 16, 8)}
"""Experts whose gate and up make a square; with 16 as the inner size down does."""


def tiny(family: str) -> torch.nn.Module:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(small_config(family), dtype=torch.float32)


@pytest.mark.parametrize(("family", "recipe"), CASES)
def test_what_peft_saves_is_read_as_it_computes(family: str, recipe: str, tmp_path: Path) -> None:
    base, model = tiny(family), tiny(family)
    trained = get_peft_model(model, LoraConfig(r=4, lora_alpha=6, **RECIPES[recipe]))
    with torch.no_grad():
        for name, weight in trained.named_parameters():
            if ".lora_" in name:
                weight.normal_(0, 0.2)
    trained.save_pretrained(tmp_path)
    shapes = made.experts_of(base)
    forms = read(tmp_path, shapes)
    ours = changes(tmp_path, forms, shapes)
    theirs = changes_in(trained.merge_and_unload(), base, turned=family == "gpt_oss")
    assert forms.form == "stacks of all experts of a layer"
    for place, of in theirs.items():
        for site, change in of.items():
            mine = ours[place].get(site, np.zeros_like(change))
            np.testing.assert_allclose(mine, change, atol=2e-6, err_msg=f"{place} {site}")
    assert {weights.rank for weights in forms.weights} <= {4, 8}


def by_hand(tensors: Arrays, experts: dict[int, ExpertShape], scaling: float) -> dict[str, np.ndarray]:
    """scaling·B·A of each pair."""
    modules = {name.partition(".lora_")[0] for name in tensors}
    return {
        module: scaling * tensors[f"{module}.lora_B.weight"] @ tensors[f"{module}.lora_A.weight"]
        for module in modules
    }


@pytest.mark.parametrize("leaves", [("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")])
def test_a_pair_an_expert_is_read_as_it_was_trained(leaves: tuple[str, ...], tmp_path: Path) -> None:
    tensors = pairs(LAYERS, 4, leaves)
    folder = write(tmp_path, tensors, target_modules=list(leaves), use_rslora=True)
    forms = read(folder, LAYERS)
    found = changes(folder, forms, LAYERS)
    for path, change in by_hand(tensors, LAYERS, 8 / 2).items():
        _, _, layer, *_, expert, leaf = path.split(".")
        site = dict(zip(leaves, ("gate", "up", "down"), strict=True))[leaf]
        whole = found[int(layer), int(expert)]["down" if site == "down" else "gate_up"]
        mine = {"gate": whole[:12], "up": whole[12:], "down": whole}[site]
        np.testing.assert_allclose(mine, change, rtol=1e-5, atol=1e-5)
    assert forms.form == "a pair an expert"
    assert "1.41 times" in forms.notes[0]


def test_ranks_and_alphas_of_pairs_follow_their_patterns(tmp_path: Path) -> None:
    tensors = pairs(LAYERS, 4)
    for name in [name for name in tensors if ".gate_proj." in name]:
        tensors[name] = tensors[name][:2] if ".lora_A." in name else tensors[name][:, :2]
    patterns = {
        "rank_pattern": {"gate_proj": 2},
        "alpha_pattern": {"model.layers.1.mlp.experts.2.down_proj": 12, r".*\.layers\.2\..*up_proj": 2},
    }
    forms = read(write(tmp_path, tensors, **patterns), LAYERS)
    for weights in forms.weights:
        alpha = 8
        if (weights.layer, weights.site, weights.expert) == (1, "down", 2):
            alpha = 12
        if (weights.layer, weights.site) == (2, "up"):
            alpha = 2
        assert weights.rank == (2 if weights.site == "gate" else 4)
        assert weights.scaling == alpha / weights.rank


def test_stacks_that_lie_turned_are_told_by_their_shape(tmp_path: Path) -> None:
    """PEFT before 0.19.1 saves them so: A and B change places, and each is of the transposed weights."""
    right = stacks(LAYERS)
    turned: Arrays = {}
    for name, array in right.items():
        if ".lora_A." not in name:
            continue
        b = right[name.replace("lora_A", "lora_B")]
        a_of = array.reshape(3, 4, -1)
        b_of = b.reshape(len(b), 4, 3)
        turned[name] = np.ascontiguousarray(b_of.transpose(2, 1, 0).reshape(12, -1))
        turned[name.replace("lora_A", "lora_B")] = np.ascontiguousarray(
            a_of.transpose(2, 1, 0).reshape(-1, 12)
        )
    fields = {"target_parameters": BOTH, "target_modules": []}
    one, other = (
        write(tmp_path / "1", right, **fields),
        write(tmp_path / "2", turned, peft_version="0.18.1", **fields),
    )
    forms = read(other, LAYERS)
    assert "turned" in forms.form
    found, expected = changes(other, forms, LAYERS), changes(one, read(one, LAYERS), LAYERS)
    for place, of in expected.items():
        for site, change in of.items():
            np.testing.assert_allclose(found[place][site], change, atol=1e-5)


@pytest.mark.parametrize(
    ("version", "is_read"),
    [
        ("0.21.2", True),
        ("0.19.1", True),
        ("0.19.0", False),
        ("0.18.1", False),
        ("0.19.1.dev0", False),
        (None, False),
    ],
)
def test_a_file_of_square_stacks_is_told_by_its_release(
    version: str | None, is_read: bool, tmp_path: Path
) -> None:
    tensors = {name: array for name, array in stacks(SQUARE).items() if ".base_layer." in name}
    tensors = {name.replace(".base_layer", ""): array for name, array in tensors.items()}
    fields = {"target_parameters": ["experts.gate_up_proj"], "target_modules": [], "peft_version": version}
    folder = write(tmp_path / "alone", tensors, **fields)
    if is_read:
        assert not read(folder, SQUARE).weights[0].turned
    else:
        with pytest.raises(AdapterRefused) as caught:
            read(folder, SQUARE)
        assert (caught.value.code, caught.value.feature) == ("unsupported_feature", "experts_orientation")
    # Beside a stack that is not square, it lies as that one does.
    for turned in (False, True):
        both = write(
            tmp_path / str(turned), stacks(SQUARE, turned=turned), **fields | {"target_parameters": BOTH}
        )
        assert {weights.turned for weights in read(both, SQUARE).weights} == {turned}


@pytest.mark.parametrize(
    ("version", "is_read"),
    [("0.18.0", True), ("0.18.1", True), ("0.19.0", False), ("0.19.1", True), (None, False)],
)
def test_square_stacks_of_gpt_oss_are_turned_by_one_release_alone(
    version: str | None, is_read: bool, tmp_path: Path
) -> None:
    """gpt-oss's weights are [experts, in, out], which PEFT 0.18 takes all stacks for; down_proj is square."""
    experts = {0: ExpertShape(0, "model.layers.0.mlp.experts", 3, 24, 24, in_turns=True)}
    tensors = {name: array for name, array in stacks(experts).items() if ".base_layer." not in name}
    fields = {"target_parameters": ["experts.down_proj"], "target_modules": [], "peft_version": version}
    folder = write(tmp_path, tensors, **fields)
    if is_read:
        assert [weights.turned for weights in read(folder, experts).weights] == [False]
        return
    with pytest.raises(AdapterRefused) as caught:
        read(folder, experts)
    assert caught.value.feature == "experts_orientation"


def test_three_dimensions_share_a_side(tmp_path: Path) -> None:
    tensors = three_dimensions(LAYERS, 4)
    folder = write(tmp_path, tensors)
    forms = read(folder, LAYERS)
    found = changes(folder, forms, LAYERS)
    for (layer, expert), of in found.items():
        path = LAYERS[layer].module_path
        a = {leaf: tensors[f"{path}.{leaf}.lora_A.weight"] for leaf in ("w1", "w2", "w3")}
        b = {leaf: tensors[f"{path}.{leaf}.lora_B.weight"] for leaf in ("w1", "w2", "w3")}
        gate_up = np.concatenate([2 * b[leaf][expert] @ a[leaf][0] for leaf in ("w1", "w3")])
        np.testing.assert_allclose(of["gate_up"], gate_up, atol=1e-5)
        np.testing.assert_allclose(of["down"], 2 * b["w2"][0] @ a["w2"][expert], atol=1e-5)
    gates = [weights for weights in forms.weights if (weights.layer, weights.site) == (1, "gate")]
    assert len({weights.a for weights in gates}) == 1
    assert len({weights.b for weights in gates}) == 3


def _drop(tensors: Arrays, *ends: str) -> Arrays:
    return {name: array for name, array in tensors.items() if not any(end in name for end in ends)}


def _renamed(tensors: Arrays, old: str, new: str) -> Arrays:
    return {name.replace(old, new): array for name, array in tensors.items()}


STACKED = {"target_parameters": BOTH, "target_modules": []}
M1 = "model.layers.1.mlp.experts"
REFUSED: dict[str, tuple[Any, dict[str, Any], tuple[str, str | None]]] = {
    "DoRA": (
        lambda: pairs(LAYERS) | {f"{M1}.0.up_proj.lora_magnitude_vector": np.ones(12, np.float32)},
        {"use_dora": True},
        ("unsupported_feature", "experts_dora"),
    ),
    "a bias": (lambda: stacks(LAYERS), STACKED | {"target_parameters": [*BOTH, "experts.down_proj_bias"]},
               ("unsupported_feature", "experts_bias")),
    "a third parameter": (
        lambda: stacks(LAYERS) | {
            f"{M1}.base_layer.base_layer.lora_{side}.weight": np.ones((12, 12), np.float32) for side in "AB"
        },
        STACKED,
        ("unsupported_feature", "experts_bias"),
    ),
    "a list of modules": (lambda: _renamed(pairs(LAYERS), ".1.gate_proj", ".gate_up_projs.1"), {},
                          ("unsupported_feature", "experts_layout")),
    "two dimensions for all": (lambda: _renamed(three_dimensions(LAYERS, 4), "x", "x") | {
        f"{M1}.w1.lora_A.weight": np.ones((4, 16), np.float32)}, {}, ("unsupported_feature", "experts_layout")),
    "three of two experts": (lambda: three_dimensions(LAYERS, 4) | {
        f"{M1}.w2.lora_A.weight": np.ones((2, 4, 12), np.float32)}, {}, ("unsupported_feature", "experts_layout")),
    "one expert lacks one": (lambda: _drop(pairs(LAYERS), "layers.2.mlp.experts.1.up_proj"), {},
                             ("missing_tensor", None)),
    "one layer lacks all": (lambda: _drop(pairs(LAYERS), "layers.2"), {}, ("missing_tensor", None)),
    "A without B": (lambda: _drop(pairs(LAYERS), "layers.2.mlp.experts.1.up_proj.lora_B"), {},
                    ("missing_tensor", None)),
    "pairs that the config does not name": (lambda: pairs(LAYERS), {"target_modules": ["up_proj"]},
                                            ("unexpected_tensor", None)),
    "an expert beyond": (lambda: _renamed(pairs(LAYERS), "experts.2.", "experts.3."), {}, ("base_mismatch", None)),
    "another size": (lambda: pairs({1: ExpertShape(1, M1, 3, 16, 20)}), {"target_modules": ".*proj"},
                     ("base_mismatch", None)),
    "stacks of another size": (lambda: stacks(LAYERS) | stacks({1: ExpertShape(1, M1, 3, 20, 12)}), STACKED,
                               ("base_mismatch", None)),
    "stacks of a layer alone": (lambda: _drop(stacks(LAYERS), "layers.2"), STACKED, ("missing_tensor", None)),
    "one of two stacks": (lambda: _drop(stacks(LAYERS), "base_layer"), STACKED, ("missing_tensor", None)),
    "a stack that is not named": (lambda: stacks(LAYERS), STACKED | {"target_parameters": BOTH[1:]},
                                  ("unexpected_tensor", None)),
    "both ways": (lambda: stacks(LAYERS) | _drop(stacks(LAYERS, turned=True), "layers.1"), STACKED,
                  ("unexpected_tensor", None)),
    "stacks and pairs": (lambda: stacks(LAYERS) | pairs(LAYERS), STACKED, ("unexpected_tensor", None)),
    "two names for one expert": (lambda: pairs(LAYERS) | pairs(LAYERS, 4, ("w1", "w3", "w2")), {},
                                 ("unexpected_tensor", None)),
    "two stacks for one layer": (lambda: stacks(LAYERS) | _renamed(stacks(LAYERS), ".mlp.", ".ffn."), STACKED,
                                 ("unexpected_tensor", None)),
    "rows of no stack": (lambda: _cut_rows(stacks(LAYERS)), STACKED, ("shape_mismatch", None)),
    "another rank": (lambda: stacks(LAYERS, 2), STACKED, ("shape_mismatch", None)),
    "a rank beyond": (lambda: pairs(LAYERS, 17), {"r": 17}, ("rank_exceeds_max", None)),
    "a rank beyond twice": (lambda: stacks(LAYERS, 33), STACKED | {"r": 33}, ("rank_exceeds_max", None)),
    "integers": (lambda: {n: a.astype(np.int8) for n, a in pairs(LAYERS).items()}, {},
                 ("unsupported_feature", "dtype_I8")),
}  # fmt: skip


def _cut_rows(tensors: Arrays) -> Arrays:
    return {
        name: array[:-1] if ".lora_A." in name else array[:, :-1].copy() for name, array in tensors.items()
    }


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_read_is_refused_by_name(case: str, tmp_path: Path) -> None:
    tensors, fields, expected = REFUSED[case]
    folder = write(tmp_path, tensors(), **fields)
    with pytest.raises(AdapterRefused) as caught:
        read(folder, LAYERS)
    assert caught.value.message.isascii()
    assert (caught.value.code, caught.value.feature) == expected, caught.value.message
    assert load_file(folder / "adapter_model.safetensors")


def test_twice_the_rank_is_taken_of_a_whole_gate_up(tmp_path: Path) -> None:
    """PEFT makes one LoRA of twice the rank of two."""
    patterns = {"rank_pattern": {r".*\.gate_up_proj": 32}, "alpha_pattern": {r".*\.gate_up_proj": 64}}
    down = {name: a for name, a in stacks(LAYERS, 16).items() if "base_layer" not in name}
    whole = {name: a for name, a in stacks(LAYERS, 32).items() if "base_layer" in name}
    forms = read(write(tmp_path, down | whole, r=16, lora_alpha=32, **patterns, **STACKED), LAYERS)
    assert {(weights.site, weights.rank, weights.scaling) for weights in forms.weights} == {
        ("gate_up", 32, 2.0), ("down", 16, 2.0),
    }  # fmt: skip


def test_experts_may_lie_right_in_their_layer(tmp_path: Path) -> None:
    layers = {layer: ExpertShape(layer, f"model.layers.{layer}.experts", 3, 16, 12) for layer in (1, 2)}
    parameters = [
        f"model.layers.{layer}.experts.{name}_proj" for layer in layers for name in ("gate_up", "down")
    ]
    fields = {"target_modules": [], "target_parameters": parameters, "alpha_pattern": {parameters[-1]: 12}}
    forms = read(write(tmp_path, stacks(layers), **fields), layers)
    assert {(w.layer, w.site): w.scaling for w in forms.weights} == {
        (1, "gate_up"): 2.0, (1, "down"): 2.0, (2, "gate_up"): 2.0, (2, "down"): 3.0,
    }  # fmt: skip


def test_paths_of_a_file_are_quoted_in_messages(tmp_path: Path) -> None:
    tensors = _renamed(pairs(LAYERS, 17), ".mlp.", ".m_p.")
    with pytest.raises(AdapterRefused, match=r"^'model\.layers\.1\.m_p\.experts\.0\.\w+' has rank 17"):
        read(write(tmp_path, tensors, r=17), LAYERS)
