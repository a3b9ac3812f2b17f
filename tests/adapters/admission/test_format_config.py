"""The config: each field of PEFT's LoraConfig, and what names and patterns mean."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loraplex.adapters.admission.peft_config import LoraSettings
from loraplex.adapters.errors import AdapterRefused
from support.adapters.drafts import ALL_SITES, attempt, peft_config, site_module
from support.adapters.whole_reads import parse_peft_config

MODULES = [site_module(layer, site) for layer in range(12) for site in ALL_SITES]


def parse(directory: Path, config: dict[str, Any] | bytes) -> LoraSettings:
    path = directory / "adapter_config.json"
    path.write_bytes(config if isinstance(config, bytes) else json.dumps(config).encode())
    return parse_peft_config(path, MODULES)


def refusal(directory: Path, config: dict[str, Any] | bytes) -> AdapterRefused:
    with pytest.raises(AdapterRefused) as caught:
        parse(directory, config)
    assert caught.value.message.isascii()
    return caught.value


# Per field: values that pass, values that are refused. `config_invalid` where the field is one that we read.
FIELDS: dict[str, tuple[list[Any], list[Any]]] = {
    "alora_invocation_tokens": (
        [None, [1], [1, 2, 1], [7] * 64],
        [[], [-1], [1.0], [True], ["1"], "1", 7, {"a": 1}, [7] * 65],
    ),
    "alpha_pattern": ([None, {}, {"q_proj": 16}, {"q_proj": 1.5}], [[], {"q_proj": "16"}, {"q_proj": True}]),
    "arrow_config": ([None], [{"top_k": 3}]),
    "auto_mapping": ([None, {"base_model_class": "X"}, "x"], []),
    "base_model_name_or_path": ([None, "org/name"], [7]),
    "bias": ([None, "none"], ["all", "lora_only"]),
    "corda_config": ([None, {"corda_method": "ipm"}, "x"], []),
    "ensure_weight_tying": ([False, True, None], ["yes"]),
    "eva_config": ([None, {"rho": 2.0}, "x"], []),
    "exclude_modules": ([None, [], "", ["q_proj"], "q_proj", ".*mlp.*"], [[1], {"a": 1}, [""]]),
    "fan_in_fan_out": ([False, True, None], ["yes", 1]),
    "inference_mode": ([True, False, "yes"], []),
    "init_lora_weights": (
        [True, False, None, "gaussian", "orthogonal", "eva", "mica"],
        ["pissa", "pissa_niter_16", "olora", "loftq", "corda", "lora_ga", "something", 1, ["eva"]],
    ),
    "kasa_config": ([None], [{"gamma": 1}]),
    "layer_replication": ([None, []], [[[0, 2], [1, 3]]]),
    "layers_pattern": ([None, [], "", "layers", ["layers"], "lay.*"], [7, [1]]),
    "layers_to_transform": ([None, [], 3, [0, 3]], ["1", [-1], [1.5], [True], {"a": 1}]),
    "loftq_config": ([None, {}, {"loftq_bits": 4}, "x"], []),
    "lora_alpha": ([1, 16, 0.5, -4], [None, "16", True, float("1e7"), []]),
    "lora_bias": ([False, None], [True]),
    "lora_dropout": ([0, 0.0, 0.1, None, "0.1"], []),
    "lora_ga_config": ([None, {"scale": "stable"}, "x"], []),
    "megatron_config": ([None, {}], [{"hidden_size": 1}]),
    "megatron_core": ([None, "megatron.core", 1], []),
    "modules_to_save": (
        [None, [], ["score"], ["classifier", "score"]],
        [["lm_head"], ["score", "lm_head"], ["score", 1], "score", {"score": 1}],
    ),
    "monteclora_config": ([None, {"num_samples": 8}, "x"], []),
    "peft_type": (["LORA"], [None, "ADALORA", "VERA", 3]),
    "peft_version": ([None, "0.18.0", 18], []),
    "qalora_group_size": ([16, None, "16"], []),
    "r": ([1, 8, 64], [0, -1, 8.0, "8", True, None, 10**30]),
    "rank_pattern": ([None, {}, {"q_proj": 16}], [[], {"q_proj": 0}, {"q_proj": 2.0}, {"q_proj": None}]),
    "revision": ([None, "main", 1], []),
    "runtime_config": ([None, {}, {"ephemeral_gpu_offload": False}, "x"], []),
    "target_modules": (
        [["q_proj"], "q_proj", "all-linear", r".*\.q_proj", "q_proj|v_proj", "(" * 999],
        [None, [], "", [1], ["q_proj", ""], {"a": 1}],
    ),
    "target_parameters": ([None, []], [["experts.gate_up_proj"]]),
    "task_type": (
        [None, "CAUSAL_LM", "SEQ_2_SEQ_LM", "FEATURE_EXTRACTION", "QUESTION_ANS", "SEQ_CLS", "TOKEN_CLS"],
        ["x", "PROMPT", ["SEQ_CLS"]],
    ),
    "trainable_token_indices": (
        [None, [], [1, 2], {"embed_tokens": [1]}, {"embed_tokens": [1], "lm_head": [2]}],
        [
            *([1, 1], [-1], [1.0], [True], ["1"], 7),
            *({"embed_tokens": []}, {"embed_tokens": 1}, {"a": [1], "b": [1], "c": [1]}),
        ],
    ),
    "use_bdlora": ([None], [{"nblocks": 2}]),
    "use_dora": ([False, True, None], [1, "true"]),
    "use_qalora": ([False], [True]),
    "use_rslora": ([False, True, None], ["yes", 1]),
    "velora_config": ([None, {"num_groups": 64}, "x"], []),
}
_READ = ("alpha_pattern", "base_model_name_or_path", "layers_pattern", "layers_to_transform", "lora_alpha")
_READ += (
    "r",
    "rank_pattern",
    "use_rslora",
    "use_dora",
    "fan_in_fan_out",
    "exclude_modules",
    "target_modules",
    "ensure_weight_tying",
    "trainable_token_indices",
    "alora_invocation_tokens",
)


@pytest.mark.parametrize("field", FIELDS)
def test_neutral_values_pass_and_all_others_are_refused(tmp_path: Path, field: str) -> None:
    passing, refused = FIELDS[field]
    for value in passing:
        parse(tmp_path, peft_config(**{field: value}))
    for value in refused:
        error = refusal(tmp_path, peft_config(**{field: value}))
        if field in _READ:
            assert error.code == "config_invalid", (field, value)
        elif field != "peft_type":
            assert (error.code, error.feature) == ("unsupported_feature", field), (field, value)


def test_every_field_that_peft_knows_is_in_the_table_and_its_default_passes(tmp_path: Path) -> None:
    from peft import LoraConfig

    fields = {field.name for field in dataclasses.fields(LoraConfig)}
    for name in fields - FIELDS.keys():  # one that a newer PEFT grew is refused all the same
        assert refusal(tmp_path, peft_config(**{name: {"on": True}})).feature == name
    assert fields - FIELDS.keys() == set(), "say in the table what the new fields may be"
    LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM").save_pretrained(str(tmp_path))
    parse(tmp_path, (tmp_path / "adapter_config.json").read_bytes())


@pytest.mark.parametrize("value", [None, False, "", [], {}])
def test_an_unknown_field_passes_when_neutral(tmp_path: Path, value: Any) -> None:
    parse(tmp_path, peft_config(from_the_future=value))


@pytest.mark.parametrize("value", [True, 0, 1, "x", [0], {"a": None}])
def test_an_unknown_field_is_refused_otherwise(tmp_path: Path, value: Any) -> None:
    error = refusal(tmp_path, peft_config(from_the_future=value))
    assert (error.code, error.feature) == ("unsupported_feature", "from_the_future")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"null",
        b"{",
        b"\xff\xfe{}",
        b'{"peft_type": "LORA", "r": 4, "r": 8, "target_modules": ["q_proj"]}',
        b'{"peft_type": "LORA", "lora_alpha": NaN, "target_modules": ["q_proj"]}',
        b'{"peft_type": "LORA", "lora_alpha": 1e999, "target_modules": ["q_proj"]}',
        b'{"peft_type": "LORA", "lora_alpha": ' + b"9" * 9999 + b"}",
        b'{"a":' * 90_000 + b"1" + b"}" * 90_000,
        b"[" * 500_000,
        b'{"peft_type": "LORA"}',
    ],
)
def test_malformed_config_is_invalid(tmp_path: Path, content: bytes) -> None:
    assert refusal(tmp_path, content).code == "config_invalid"


def test_an_oversized_config_is_refused_unread(tmp_path: Path) -> None:
    assert refusal(tmp_path, b'{"peft_type": "' + b"A" * (1 << 20) + b'"}').code == "too_large"


def test_absent_rank_and_alpha_are_peft_s_defaults(tmp_path: Path) -> None:
    found = parse(tmp_path, {"peft_type": "LORA", "target_modules": ["q_proj"]})
    assert found.rank_and_scaling(MODULES[0]) == (8, 1.0)


PATTERNS: list[dict[str, int]] = [
    {},
    {"q_proj": 2},
    {"proj": 2},
    {"self_attn.q_proj": 2, "q_proj": 3},
    {"q_proj": 3, "self_attn.q_proj": 2},
    {"layers.1.self_attn.q_proj": 2, "1.self_attn.k_proj": 5},
    {"model.layers.11.mlp.up_proj": 7, "up_proj": 6, "mlp.up_proj": 5},
    {"0.self_attn.q_proj": 2},
    {"layers.1": 9, "self_attn": 9},
    {"lm_head": 4, "v_proj": 5},
    {"base_model.model.model.layers.0.self_attn.q_proj": 4},
    {"^model.layers.0.self_attn.q_proj": 3, "q_proj": 5},
    {"q_proj": 5, "^model.layers.0.self_attn.q_proj$": 3},
    {"^q_proj": 3, "q_proj$": 7, r"mlp\.up_proj": 6, r"^model\.layers\.1\.mlp\.up_proj$": 2},
]


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("use_rslora", [False, True])
def test_literal_pattern_keys_mean_what_they_mean_to_peft(
    tmp_path: Path, pattern: dict[str, int], use_rslora: bool
) -> None:
    from peft.utils.other import get_pattern_key

    found = parse(tmp_path, peft_config(rank_pattern=pattern, alpha_pattern=pattern, use_rslora=use_rslora))
    for module in MODULES:
        rank = pattern.get(get_pattern_key(pattern.keys(), module), 4)
        alpha = pattern.get(get_pattern_key(pattern.keys(), module), 8)
        assert found.rank_and_scaling(module) == (rank, alpha / (rank**0.5 if use_rslora else rank)), module


def test_names_to_leave_out_leave_out_what_peft_does(tmp_path: Path) -> None:
    from peft import LoraConfig
    from peft.tuners.tuners_utils import check_target_module_exists

    for excluded in (["q_proj"], ["mlp.up_proj", "proj"], ["layers.1.self_attn.k_proj", MODULES[3]], []):
        fields = {"target_modules": list(ALL_SITES), "exclude_modules": excluded}
        theirs, ours = LoraConfig(**fields), parse(tmp_path, peft_config(**fields))
        assert ours.selection.exact
        for module in MODULES:
            assert ours.selection.selects(module) == (check_target_module_exists(theirs, module) is True), (
                module
            )


def test_an_expression_for_modules_is_not_evaluated_and_said_so(tmp_path: Path) -> None:
    for fields in ({"target_modules": "(a+)+$"}, {"exclude_modules": ".*"}, {"target_modules": ".*_proj"}):
        found = parse(tmp_path, peft_config(**fields))
        assert not found.selection.exact
        assert found.selection.selects(MODULES[0])
        assert any("not evaluated" in note for note in found.notes)
    assert parse(tmp_path, peft_config(target_modules="all-linear")).selection.exact
    assert not parse(tmp_path, peft_config(target_modules="all-linear")).selection.selects("lm_head")


@pytest.mark.parametrize("layers_pattern", [None, [], "layers", ["h", "layers"], ["mlp"], "blocks"])
@pytest.mark.parametrize("layers", [None, [], 1, [0, 11], [3]])
@pytest.mark.parametrize(
    "targets",
    [
        ["q_proj"],
        ["q_proj", "mlp.up_proj"],
        ["1.self_attn.k_proj"],
        ["model.layers.2.mlp.gate_proj", "v_proj"],
        ["proj", "attn.q_proj"],
    ],
)
def test_targets_select_what_peft_selects(
    tmp_path: Path, targets: list[str], layers: Any, layers_pattern: Any
) -> None:
    from peft import LoraConfig
    from peft.tuners.tuners_utils import check_target_module_exists

    if layers_pattern and layers is None:
        return
    fields = {"target_modules": targets, "layers_to_transform": layers, "layers_pattern": layers_pattern}
    theirs = LoraConfig(**fields)
    ours = parse(tmp_path, peft_config(**fields))
    for module in [*MODULES, *(module.removeprefix("model.") for module in MODULES)]:
        assert ours.selection.selects(module) == bool(check_target_module_exists(theirs, module)), module


def test_huge_lists_and_patterns_are_capped_and_fast(tmp_path: Path) -> None:
    begin = time.perf_counter()
    assert refusal(tmp_path, peft_config(target_modules=["x"] * 5000)).code == "config_invalid"
    assert (
        refusal(tmp_path, peft_config(rank_pattern={f"x{i}": 1 for i in range(5000)})).code
        == "config_invalid"
    )
    # As many keys as may be, each as long as a module's name and different from it at its end.
    near = {f"model.layers.0.self_attn.{i:06d}": 2 for i in range(4096)}
    assert {len(key) for key in near} == {len(MODULES[0])}
    parse(tmp_path, peft_config(rank_pattern=near, alpha_pattern=near))
    assert time.perf_counter() - begin < 5


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=6,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.dictionaries(st.sampled_from(sorted(FIELDS)) | st.text(max_size=12), values, max_size=4))
def test_fuzz_any_values_are_parsed_or_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    outcome = attempt(parse, tmp_path, peft_config(**changes))
    if isinstance(outcome, AdapterRefused):
        assert outcome.code in ("config_invalid", "unsupported_feature")
        assert outcome.message.isascii()
        assert outcome.feature is None or outcome.feature.isascii()
    else:
        rank, scaling = outcome.rank_and_scaling(MODULES[0])
        assert rank >= 1
        assert abs(scaling) <= 1e6


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(max_size=200))
def test_fuzz_any_bytes_are_refused(tmp_path: Path, content: bytes) -> None:
    assert refusal(tmp_path, content).code == "config_invalid"
