"""The check of the numbers of LoRA on routed experts: each expert is compared, in every form that is saved."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loraplex.adapters.numerics import TOLERANCE, NumbersCheck, NumbersVerdict, SiteOutputs, join_outputs
from loraplex.adapters.spec import ExpertShape
from support.adapters.served_outputs import Matrices, expert_matrices, expert_outputs
from support.adapters.whole_reads import check_numbers
from support.models.expert_adapters import Arrays, pairs, plain_base, stacks, three_dimensions, write

HIDDEN, INNER, COUNT, LAYERS = 96, 40, 6, (1, 2)
EXPERTS = {
    layer: ExpertShape(layer, f"model.layers.{layer}.mlp.experts", COUNT, HIDDEN, INNER) for layer in LAYERS
}
BOTH = {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"], "target_modules": []}


def doubled(rank: int) -> Arrays:
    """Gate and up with twice the rank of down, as conversions of names to parameters save them."""
    down = {name: array for name, array in stacks(EXPERTS, rank).items() if "base_layer" not in name}
    return down | {name: array for name, array in stacks(EXPERTS, 2 * rank).items() if "base_layer" in name}


def doubled_fields(rank: int) -> dict[str, Any]:
    key = r".*\.gate_up_proj"
    return BOTH | {"rank_pattern": {key: 2 * rank}, "alpha_pattern": {key: 16}}


FORMS: dict[str, Callable[[int], tuple[Arrays, dict[str, Any]]]] = {
    "pairs": lambda rank: (pairs(EXPERTS, rank), {}),
    "pairs by w1, w2, w3, rsLoRA": lambda rank: (
        pairs(EXPERTS, rank, ("w1", "w3", "w2")),
        {"target_modules": ["w1", "w2", "w3"], "use_rslora": True},
    ),
    "stacks": lambda rank: (stacks(EXPERTS, rank), BOTH),
    "stacks that lie turned": lambda rank: (
        stacks(EXPERTS, rank, turned=True),
        BOTH | {"peft_version": "0.18.1"},
    ),
    "doubled stacks": lambda rank: (doubled(rank), doubled_fields(rank)),
    "doubled stacks, rsLoRA": lambda rank: (doubled(rank), doubled_fields(rank) | {"use_rslora": True}),
    "a stack of down alone": lambda rank: (
        {n: a for n, a in stacks(EXPERTS, rank).items() if "base_layer" not in n},
        {"target_modules": [], "target_parameters": ["experts.down_proj"]},
    ),
    "another stack in each layer": lambda rank: (
        {
            name.replace(".base_layer", ""): array
            for name, array in stacks(EXPERTS, rank).items()
            if ("base_layer" in name) == ("layers.1." in name)
        },
        {
            "target_modules": [],
            "target_parameters": ["1.mlp.experts.gate_up_proj", "2.mlp.experts.down_proj"],
        },
    ),
    "three dimensions": lambda rank: (three_dimensions(EXPERTS, rank), {}),
}
RANKS = (1, 2, 3, 8, 12, 64)


def saved(form: str, rank: int, folder: Path) -> Path:
    tensors, fields = FORMS[form](rank)
    random = np.random.default_rng(rank)
    scaled = {
        name: array * np.float32(0.2 if ".lora_A." in name else 0.03 + 0.02 * random.random())
        for name, array in tensors.items()
    }
    return write(folder, scaled, **{"r": rank, "lora_alpha": 16} | fields)


def judged(folder: Path, outputs: SiteOutputs, model_type: str = "mixture") -> NumbersVerdict:
    base = replace(plain_base(EXPERTS), model_type=model_type)
    files = folder / "adapter_config.json", folder / "adapter_model.safetensors"
    verdict = check_numbers(*files, base, outputs)
    json.dumps(verdict.report, allow_nan=False)
    return verdict


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("form", FORMS)
def test_faultless_outputs_are_equal(form: str, rank: int, dtype: str, tmp_path: Path) -> None:
    folder = saved(form, rank, tmp_path)
    found = judged(folder, expert_outputs(expert_matrices(folder, EXPERTS), EXPERTS, dtype))
    assert found.ok, found.message
    # One row of sixteen sums varies more than the five of sixty-four that other sites have.
    assert found.report["max"] < 0.75 * TOLERANCE


def test_gate_and_up_that_a_file_has_in_turns_are_compared_as_halves(tmp_path: Path) -> None:
    folder = saved("stacks", 4, tmp_path)
    outputs = expert_outputs(expert_matrices(folder, EXPERTS, in_turns=True), EXPERTS, "bfloat16")
    assert judged(folder, outputs, "gpt_oss").ok
    assert not judged(folder, outputs).ok


def test_names_like_experts_beside_the_language_model_are_of_no_expert(tmp_path: Path) -> None:
    tensors, _ = FORMS["pairs"](4)
    outputs = expert_outputs(expert_matrices(write(tmp_path / "plain", tensors), EXPERTS), EXPERTS, "float32")
    named = ("layers.merger.experts.up", "layers.experts.up", "layers.1.experts.0.up_proj")
    for module in (f"visual.{name}" for name in named):
        for side in ("lora_A", "lora_B"):
            tensors[f"model.{module}.{side}.weight"] = np.ones((4, 4), np.float32)
    folder = write(tmp_path / "more", tensors)
    base = replace(plain_base(EXPERTS), model_type="mixture", multimodal="qwen3_5_moe")
    files = folder / "adapter_config.json", folder / "adapter_model.safetensors"
    assert check_numbers(*files, base, outputs).ok


def by_rank_as_by_expert(found: Matrices) -> None:
    """B of a stack, whose column i·E + e is expert e's, read as if expert e had columns e·r to e·r + r."""
    for layer in LAYERS:
        for site in {site for at, site, _ in found if at == layer}:
            b = np.stack([found[layer, site, e][1] for e in range(COUNT)], axis=-1)
            whole = b.reshape(len(b), -1)
            for e in range(COUNT):
                a, own = found[layer, site, e]
                rank = own.shape[1]
                found[layer, site, e] = a, whole[:, e * rank : (e + 1) * rank]


def without(found: Matrices, is_dropped: Callable[[int, str, int], bool]) -> None:
    for key in [key for key in found if is_dropped(*key)]:
        del found[key]


def scaled(found: Matrices, factor: float, is_scaled: Callable[[int, str, int], bool]) -> None:
    for key in [key for key in found if is_scaled(*key)]:
        a, b = found[key]
        found[key] = a, b * np.float32(factor)


def exchange(found: Matrices, one: tuple[int, str, int], other: tuple[int, str, int]) -> None:
    found[one], found[other] = found[other], found[one]


def up_from_gates_a(found: Matrices) -> None:
    """Give up the A of gate in pairs, and the second half of ranks the A of the first in a doubled whole."""
    for (layer, site, expert), (a, b) in list(found.items()):
        if site == "up":
            found[layer, site, expert] = found[layer, "gate", expert][0], b
        if site == "gate_up":
            half = len(a) // 2
            found[layer, site, expert] = np.concatenate((a[:half], a[: len(a) - half])), b


FAULTS: dict[str, Callable[[Matrices], None]] = {
    "B read by expert instead of by rank": by_rank_as_by_expert,
    "gate and up dropped": lambda found: without(found, lambda _, site, __: site != "down"),
    "down dropped": lambda found: without(found, lambda _, site, __: site == "down"),
    "one expert of one layer dropped": lambda found: without(found, lambda at, _, e: (at, e) == (2, 4)),
    "the root of 2 on gate and up": lambda found: scaled(found, 2**0.5, lambda _, site, __: site != "down"),
    "one expert's scale": lambda found: scaled(found, 1.1, lambda *key: key == (2, "down", 3)),
    "two experts exchanged": lambda found: exchange(found, (1, "down", 2), (1, "down", 5)),
    "up from gate's A": up_from_gates_a,
    "a scale that is 2 % off": lambda found: scaled(found, 1.02, lambda *key: key == (1, "down", 0)),
    "an expert of another layer": lambda found: exchange(found, (1, "down", 2), (2, "down", 2)),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rank", [1, 8, 64])
@pytest.mark.parametrize("form", ["pairs", "doubled stacks"])
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_single_experts_are_found(
    fault: str, form: str, rank: int, dtype: str, tmp_path: Path
) -> None:
    folder = saved(form, rank, tmp_path)
    found = expert_matrices(folder, EXPERTS)
    FAULTS[fault](found)
    verdict = judged(folder, expert_outputs(found, EXPERTS, dtype))
    if fault == "B read by expert instead of by rank" and (form, rank) == ("pairs", 1):
        assert verdict.ok  # of rank 1 the two orders are one
        return
    assert verdict.report["verdict"] == "mismatch"
    assert verdict.report["max"] > 1.5 * TOLERANCE
    if fault == "one expert's scale":
        assert verdict.report["worst_module"] == "model.layers.2.mlp.experts.down of expert 3"
        assert verdict.report["worst_module"] in verdict.message
        errors = verdict.report["errors"]
        assert [module for module, error in errors.items() if error > TOLERANCE] == [
            "model.layers.2.mlp.experts.down"
        ]


@pytest.mark.parametrize("rank", RANKS)
def test_a_turned_stack_that_is_read_straight_is_found(rank: int, tmp_path: Path) -> None:
    """Where a matrix is square nothing but the numbers tells."""
    experts = {1: ExpertShape(1, "model.layers.1.mlp.experts", 5, 32, 16)}
    tensors = {n: 0.1 * a for n, a in stacks(experts, rank, turned=True).items()}
    folder = write(tmp_path, tensors, r=rank, **BOTH)
    files = folder / "adapter_config.json", folder / "adapter_model.safetensors"
    right = expert_matrices(folder, experts)
    wrong = dict(right)
    for expert in range(5):
        a, b = right[1, "gate_up", expert]  # the square one
        scaling = 8 / rank
        wrong[1, "gate_up", expert] = b.T / scaling, a.T * scaling
    for matrices, is_right in ((right, True), (wrong, False)):
        verdict = check_numbers(*files, plain_base(experts), expert_outputs(matrices, experts, "bfloat16"))
        assert verdict.ok is is_right, verdict.message


def test_what_the_upload_has_not_and_what_is_not_finite_is_named(tmp_path: Path) -> None:
    folder = saved("a stack of down alone", 4, tmp_path)
    found = expert_matrices(folder, EXPERTS)
    more = found | {
        (1, "gate_up", 3): expert_matrices(saved("stacks", 4, tmp_path / "2"), EXPERTS)[1, "gate_up", 3]
    }
    verdict = judged(folder, expert_outputs(more, EXPERTS, "float32"))
    assert verdict.report["verdict"] == "mismatch"
    assert verdict.report["worst_module"] == "expert 3 of layer 1, gate_up"
    tensors, fields = FORMS["pairs"](4)
    name = "model.layers.1.mlp.experts.4.up_proj.lora_B.weight"
    large = {each: array * np.float32(1e20 if each == name else 1) for each, array in tensors.items()}
    folder = write(tmp_path / "large", large, **fields)
    with np.errstate(over="ignore"):
        outputs = expert_outputs(expert_matrices(folder, EXPERTS), EXPERTS, "float16")
    verdict = judged(folder, outputs)
    assert verdict.report["verdict"] == "overflow"
    assert verdict.report["worst_module"] == "model.layers.1.mlp.experts.up of expert 4"


def test_a_check_goes_on_in_parts_and_parts_of_outputs_join(tmp_path: Path) -> None:
    folder = saved("stacks", 2, tmp_path)
    found = expert_matrices(folder, EXPERTS)
    parts = [
        expert_outputs({key: pair for key, pair in found.items() if key[0] == layer}, EXPERTS, "bfloat16")
        for layer in LAYERS
    ]
    files = folder / "adapter_config.json", folder / "adapter_model.safetensors"
    check = NumbersCheck(*files, plain_base(EXPERTS), join_outputs(parts))
    runs = 1
    while (verdict := check.run(0)) is None:
        runs += 1
    assert verdict.ok
    assert runs == 2 * COUNT * len(LAYERS)
    assert verdict.report == check_numbers(*files, plain_base(EXPERTS), join_outputs(parts)).report
    norms = {
        f"{EXPERTS[layer].module_path}.{site}": np.sqrt(
            sum(
                np.linalg.norm(b @ a) ** 2
                for (at, of, _), (a, b) in found.items()
                if (at, of) == (layer, site)
            )
        )
        for layer in LAYERS
        for site in ("gate_up", "down")
    }
    assert verdict.report["norms"] == pytest.approx(norms, rel=0.01)
