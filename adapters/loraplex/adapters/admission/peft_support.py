"""The parts of PEFT's LoRA that are served, as tables: the checks read them, and docs/peft-support.md is printed from
them.

A field of adapter_config.json that is in no table is accepted with a neutral value (null, false, "", [], {}) and
refused as `unsupported_feature` with any other: what a PEFT of tomorrow writes is not ignored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from loraplex.adapters.errors import RefusalCode

_CONVERT = (
    "it trains against weights that it changed itself: save with path_initial_model_for_weight_conversion, which makes "
    "a plain LoRA of it"
)
_UNCHANGED = ("gaussian", "orthogonal", "eva", "mica")
"""Initialisations by name that leave the base as it is, and that compute plain LoRA afterwards."""


def is_neutral(value: Any) -> bool:
    """Whether a value asks for nothing. By type: 0 and 1 are settings, though they equal False and True."""
    return value is None or value is False or (isinstance(value, str | list | dict) and not value)


def is_text(value: Any) -> bool:
    return value is None or isinstance(value, str)


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _is_object(value: Any) -> bool:
    return value is None or isinstance(value, dict)


def _is_number_or_null(value: Any) -> bool:
    return value is None or is_number(value)


def _is_flag(value: Any) -> bool:
    return value is None or isinstance(value, bool)


def _is_plain_initialisation(value: Any) -> bool:
    return is_neutral(value) or value is True or value in _UNCHANGED


@dataclass(frozen=True, slots=True)
class ConfigField:
    """A field of adapter_config.json. `accepts` None: `peft_config` reads the value itself. `accepted` and `refused`
    are examples, which the tests give to the parser; `codes` is how it refuses. `note` is for the page, `advice` ends a
    refusal."""

    name: str
    accepts: Callable[[Any], bool] | None
    accepted: tuple[Any, ...]
    refused: tuple[Any, ...]
    note: str = ""
    advice: str = ""
    codes: tuple[RefusalCode, ...] = ("unsupported_feature",)


def _read(
    name: str,
    accepted: tuple[Any, ...],
    refused: tuple[Any, ...],
    note: str = "",
    codes: tuple[RefusalCode, ...] = ("config_invalid",),
) -> ConfigField:
    return ConfigField(name, None, accepted, refused, note, codes=codes)


def _neutral(name: str, refused: tuple[Any, ...], note: str = "", advice: str = "") -> ConfigField:
    kinds: dict[type, tuple[Any, ...]] = {dict: (None, {}), bool: (False, None)}
    neutral = kinds.get(type(refused[0]), (None, []))
    return ConfigField(name, is_neutral, neutral, refused, note, advice)


_INVALID_OR_NOT: tuple[RefusalCode, ...] = ("config_invalid", "unsupported_feature")
_OF_INIT = "of effect only with its `init_lora_weights`, which decides"

CONFIG_FIELDS: tuple[ConfigField, ...] = (
    ConfigField("peft_type", None, ("LORA",), ("ADALORA", "VERA", "LOHA"), advice="only LORA is served"),
    _read(
        "r",
        (1, 64),
        (0, "8"),
        "up to `--max-adapter-rank`; each site's own must agree with the tensors",
    ),
    _read("lora_alpha", (16, 0.5, -4), ("16", 10000000.0), "scaling is alpha/r"),
    _read("use_rslora", (True, False, None), ("yes",), "scaling is alpha/√r"),
    _read("use_dora", (True, False, None), ("yes",), "DoRA: every site must have its magnitudes"),
    _read(
        "rank_pattern",
        ({}, {"q_proj": 16}, {".*[qk]_proj": 16}),
        ({"q_proj": 0},),
        "regular expressions are not evaluated: the tensors tell the ranks",
        codes=_INVALID_OR_NOT,
    ),
    _read(
        "alpha_pattern",
        ({}, {"q_proj": 1.5}, {"^model.layers.0.mlp.up_proj$": 4}),
        ({"q_proj": "16"}, {"[qk]_proj": 16}),
        "literal names, which `^` and `$` may enclose",
        codes=_INVALID_OR_NOT,
    ),
    _read(
        "target_modules",
        (["q_proj"], "q_proj", "all-linear", "(q|v)_proj"),
        ([], 3),
        "a list, one name, or all; a regular expression is not evaluated: the tensors tell the modules",
    ),
    _read(
        "exclude_modules",
        (None, [], ["q_proj"], ".*mlp.*"),
        ([1], {"a": 1}),
        "a regular expression is not evaluated: the tensors tell the modules",
    ),
    _read("layers_to_transform", (None, 3, [0, 3]), ("1", [-1]), "needs `target_modules` as a list"),
    _read(
        "layers_pattern",
        (None, []),
        (["layers"], 7),
        "a plain name, only with `layers_to_transform`",
        codes=_INVALID_OR_NOT,
    ),
    _read(
        "fan_in_fan_out",
        (False, True, None),
        ("yes",),
        "without effect on linears, as in PEFT, which warns and takes it for false; the report warns too",
    ),
    ConfigField(
        "task_type",
        lambda value: is_neutral(value) or value == "CAUSAL_LM",
        (None, "CAUSAL_LM"),
        ("SEQ_CLS",),
        advice="only causal language models are served",
    ),
    ConfigField(
        "bias",
        lambda value: is_neutral(value) or value == "none",
        (None, "none"),
        ("all", "lora_only"),
        advice="it trains the base's own biases: train with bias none",
    ),
    ConfigField(
        "init_lora_weights",
        _is_plain_initialisation,
        (True, False, None, *_UNCHANGED),
        ("pissa", "pissa_niter_16", "olora", "corda", "lora_ga", "loftq"),
        "PiSSA, OLoRA, CorDA and LoRA-GA change the base: served once PEFT has converted them, not before",
        advice=_CONVERT,
    ),
    ConfigField("lora_dropout", _is_number_or_null, (0.0, 0.1, None), ("0.1",), "of effect in training only"),
    _read(
        "base_model_name_or_path",
        (None, "org/name"),
        (7,),
        "another name than the base's, or a copy's, only warns",
    ),
    ConfigField("inference_mode", _is_flag, (True, False), ("yes",), "without effect"),
    ConfigField("auto_mapping", _is_object, (None, {}), ("x",), "without effect"),
    ConfigField("peft_version", is_text, (None, "0.18.0"), (18,), "without effect"),
    ConfigField("revision", is_text, (None, "main"), (1,), "without effect"),
    ConfigField("runtime_config", _is_object, (None, {}), ("x",), "without effect"),
    ConfigField("megatron_core", is_text, (None, "megatron.core"), (1,), "without effect"),
    ConfigField(
        "qalora_group_size", _is_number_or_null, (None, 16), ("16",), "counts only with `use_qalora`"
    ),
    ConfigField("eva_config", _is_object, (None, {"rho": 2.0}), ("x",), _OF_INIT),
    ConfigField("corda_config", _is_object, (None, {"corda_method": "ipm"}), ("x",), _OF_INIT),
    ConfigField("loftq_config", _is_object, (None, {"loftq_bits": 4}), ("x",), _OF_INIT),
    ConfigField("lora_ga_config", _is_object, (None, {"scale": "stable"}), ("x",), _OF_INIT),
    _neutral(
        "modules_to_save",
        (["lm_head"],),
        "whole modules trained beside",
        "train the module by LoRA instead (lm_head can be a target), or not at all",
    ),
    _neutral("trainable_token_indices", ([1, 2], {"embed_tokens": [1]}), "rows of the embedding"),
    _neutral("lora_bias", (True,), "a bias on lora_B"),
    _neutral("ensure_weight_tying", (True,), "one adapter for head and embedding"),
    _neutral("layer_replication", ([[0, 2], [1, 3]],), "another depth than the base's"),
    _neutral("target_parameters", (["experts.gate_up_proj"],), "LoRA on bare parameters, as of experts"),
    _neutral("megatron_config", ({"hidden_size": 1},), "layers of another library"),
    _neutral("use_qalora", (True,), "for quantised bases"),
    _neutral("use_bdlora", ({"nblocks": 2},), "block-diagonal A and B"),
    _neutral("alora_invocation_tokens", ([1, 2],), "aLoRA: active from a token on"),
    _neutral("arrow_config", ({"top_k": 3},), "Arrow: routes between adapters"),
    _neutral("kasa_config", ({"gamma": 1},), "KaSA: changes the base"),
    _neutral("monteclora_config", ({"num_samples": 8},), "MonteCLoRA: samples its weights"),
    _neutral("velora_config", ({"num_groups": 64},), "VeLoRA: saves tensors of its own"),
)
"""Every field of PEFT's LoraConfig, and those that it writes beside. Any other one: see the module."""

FIELD_RULES: Mapping[str, ConfigField] = {field.name: field for field in CONFIG_FIELDS}
READ_FIELDS = frozenset(field.name for field in CONFIG_FIELDS if field.accepts is None)
"""The fields whose values count."""


@dataclass(frozen=True, slots=True)
class TensorKind:
    """Tensors of an adapter that are known by a part of their name. `feature` is what they belong to where they are
    refused, None where they are served."""

    part: str
    feature: str | None
    note: str = ""


TENSOR_KINDS: tuple[TensorKind, ...] = (
    TensorKind("lora_A", None, "[r, in]"),
    TensorKind("lora_B", None, "[out, r]"),
    TensorKind("lora_magnitude_vector", None, "[out]; DoRA's, only with `use_dora`"),
    TensorKind(
        "base_layer",
        None,
        "a copy of the base's weight or bias, as PEFT saves of a targeted lm_head: dropped where it equals it",
    ),
    TensorKind("lora_embedding_A", "lora_embedding", "LoRA on embeddings"),
    TensorKind("lora_embedding_B", "lora_embedding", "LoRA on embeddings"),
    TensorKind("modules_to_save", "modules_to_save", "whole modules trained beside"),
    TensorKind("original_module", "modules_to_save", "whole modules trained beside"),
    TensorKind("token_adapter", "trainable_token_indices", "rows of the embedding"),
    TensorKind("lora_velora_embed", "velora_config", "VeLoRA"),
    TensorKind("lora_diag", "kasa_config", "KaSA"),
)
REFUSED_TENSORS: Mapping[str, str] = {kind.part: kind.feature for kind in TENSOR_KINDS if kind.feature}
