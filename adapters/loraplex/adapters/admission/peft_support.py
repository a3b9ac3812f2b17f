"""The parts of PEFT's LoRA that are served, as tables: the checks read them, and docs/peft-support.md is printed from
them.

A field of adapter_config.json that is in no table is accepted with a neutral value (null, false, "", [], {}) and
refused as `unsupported_feature` with any other: what a PEFT of tomorrow writes is not ignored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from loraplex.adapters.errors import RefusalCode

_CONVERTED_BY_PEFT = ("pissa", "corda", "olora", "lora_ga")
"""Initialisations whose trained adapters PEFT can convert to a plain LoRA for the unchanged base."""
_UNCHANGED = ("gaussian", "orthogonal", "eva", "mica")
"""Initialisations by name that leave the base as it is, and that compute plain LoRA afterwards."""
_SERVED_TASKS = (
    "CAUSAL_LM",
    "SEQ_2_SEQ_LM",
    "FEATURE_EXTRACTION",
    "QUESTION_ANS",
    "SEQ_CLS",
    "TOKEN_CLS",
)
HEAD_MODULES = ("score", "classifier")
"""Names of a classifier's head in modules_to_save. PEFT writes both for SEQ_CLS and TOKEN_CLS."""


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


def _is_served_task(value: Any) -> bool:
    return is_neutral(value) or value in _SERVED_TASKS


def is_of_heads(value: Any) -> bool:
    """Whether modules_to_save names nothing, or a classifier's head alone."""
    return is_neutral(value) or (isinstance(value, list) and all(name in HEAD_MODULES for name in value))


def _about_initialisation(value: Any, unconverted: Sequence[str]) -> str:
    started = "the training started from base weights that it had changed itself"
    if isinstance(value, str) and value.startswith(_CONVERTED_BY_PEFT):
        if unconverted:
            return (
                f"{started}, so lora_A and lora_B fit those and not this base; PEFT does not convert "
                f"{' and '.join(unconverted)}, so no file that PEFT makes of this training fits: train again from the "
                "unchanged base (init_lora_weights true)"
            )
        return (
            f"{started}, so lora_A and lora_B fit those and not this base; PEFT's save_pretrained with "
            "path_initial_model_for_weight_conversion makes a plain LoRA for this base of the trained model"
        )
    if value == "loftq":
        return f"{started} (LoftQ quantises them), so lora_A and lora_B fit those and not this base"
    return "what this initialisation does to the base is not known, so lora_A and lora_B may fit another base"


@dataclass(frozen=True, slots=True)
class ConfigField:
    """A field of adapter_config.json. `accepted` and `refused` are examples, which the tests give to the parser;
    `codes` is how it refuses. `note` is for the page.

    `accepts` None: `peft_config` reads the value itself. `about` ends the refusal of a value that is not accepted: what
    it means for the trained weights, and what makes an adapter that is served, if anything does. It never advises to
    change the field: the weights stay what they are. `idle`: no value changes what the trained weights compute; all are
    accepted, and one that `accepts` does not know draws a note in the report."""

    name: str
    accepts: Callable[[Any], bool] | None
    accepted: tuple[Any, ...]
    refused: tuple[Any, ...]
    note: str = ""
    about: str | Callable[[Any, Sequence[str]], str] = ""
    codes: tuple[RefusalCode, ...] = ("unsupported_feature",)
    idle: bool = False

    def explain(self, value: Any, unconverted: Sequence[str] = ()) -> str:
        """Explain what a refused value means for the trained weights. `unconverted`: what `not_converted` tells of the
        same adapter."""
        return self.about if isinstance(self.about, str) else self.about(value, unconverted)


def _read(
    name: str,
    accepted: tuple[Any, ...],
    refused: tuple[Any, ...],
    note: str = "",
    codes: tuple[RefusalCode, ...] = ("config_invalid",),
) -> ConfigField:
    return ConfigField(name, None, accepted, refused, note, codes=codes)


def _neutral(name: str, refused: tuple[Any, ...], about: str) -> ConfigField:
    kinds: dict[type, tuple[Any, ...]] = {dict: (None, {}), bool: (False, None)}
    neutral = kinds.get(type(refused[0]), (None, []))
    return ConfigField(name, is_neutral, neutral, refused, about=about)


def _idle(
    name: str, usual: Callable[[Any], bool], accepted: tuple[Any, ...], note: str = "without effect"
) -> ConfigField:
    return ConfigField(name, usual, accepted, (), note, idle=True)


_INVALID_OR_NOT: tuple[RefusalCode, ...] = ("config_invalid", "unsupported_feature")
_OF_INIT = "of effect only with its `init_lora_weights`, which decides"
_IN_TRAINING = "of effect in training only; the tensors that it leaves are dropped"
_REST = "is not served, and the rest of the adapter alone is not what was trained"

CONFIG_FIELDS: tuple[ConfigField, ...] = (
    ConfigField(
        "peft_type",
        None,
        ("LORA",),
        ("ADALORA", "VERA", "LOHA"),
        about="such an adapter computes something else",
    ),
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
    ),
    _read(
        "alpha_pattern",
        ({}, {"q_proj": 1.5}, {"^model.layers.0.mlp.up_proj$": 4}, {r".*\.(0|1)\..*[qk]_proj": 16}),
        ({"q_proj": "16"}, {"(?!q)._proj": 16}),
        "names and regular expressions, which are matched in linear time: no look-around, references or flags",
        codes=_INVALID_OR_NOT,
    ),
    _read(
        "target_modules",
        (["q_proj"], "q_proj", "all-linear", "(q|v)_proj"),
        ([], 3),
        "a list, one name, or all; a name that the base lacks only warns; a regular expression is not evaluated: the "
        "tensors tell the modules",
    ),
    _read(
        "exclude_modules",
        (None, [], ["q_proj"], ".*mlp.*"),
        ([1], {"a": 1}),
        "a regular expression is not evaluated: the tensors tell the modules",
    ),
    _read(
        "layers_to_transform",
        (None, 3, [0, 3]),
        ("1", [-1]),
        "for `target_modules` as a list; else the tensors tell the layers",
    ),
    _read(
        "layers_pattern",
        (None, [], ["layers"]),
        (7,),
        "without effect unless `layers_to_transform` names layers; with a regular expression the tensors tell them",
    ),
    _read(
        "fan_in_fan_out",
        (False, True, None),
        ("yes",),
        "not read: as in PEFT, how the base stores its linears decides, and the report warns",
    ),
    _read(
        "ensure_weight_tying",
        (True, False, None),
        ("yes",),
        "a tied head has the embedding's adapter too; without effect where nothing is tied; refused where the head was "
        "a target and the embedding was not",
        codes=_INVALID_OR_NOT,
    ),
    ConfigField(
        "task_type",
        _is_served_task,
        (None, *_SERVED_TASKS),
        ("x",),
        "chooses PEFT's Python class, and nothing that LoRA computes; SEQ_CLS and TOKEN_CLS have a head, of a prompt's "
        "last token and of every token",
        about="no task of PEFT has this name, so what was trained is not known",
    ),
    ConfigField(
        "bias",
        lambda value: is_neutral(value) or value == "none",
        (None, "none"),
        ("all", "lora_only"),
        about="biases of the base itself were trained beside the LoRA; they are not served, and the LoRA alone is not "
        "what was trained",
    ),
    ConfigField(
        "init_lora_weights",
        _is_plain_initialisation,
        (True, False, None, *_UNCHANGED),
        ("pissa", "pissa_niter_16", "olora", "corda", "lora_ga", "loftq"),
        "PiSSA, OLoRA, CorDA and LoRA-GA change the base: served once PEFT has converted them, not before; PEFT does "
        "not convert DoRA, trained tokens, LoRA on an embedding, `modules_to_save`, and patterns under rsLoRA",
        about=_about_initialisation,
    ),
    _idle("lora_dropout", _is_number_or_null, (0.0, 0.1, None, "0.1"), "of effect in training only"),
    _read(
        "base_model_name_or_path",
        (None, "org/name"),
        (7,),
        "another name than the base's, or a copy's, only warns",
    ),
    _idle("inference_mode", _is_flag, (True, False, "yes")),
    _idle("auto_mapping", _is_object, (None, {}, "x")),
    _idle("peft_version", is_text, (None, "0.18.0", 18)),
    _idle("revision", is_text, (None, "main", 1)),
    _idle("runtime_config", _is_object, (None, {}, "x")),
    _idle("merge_weights", _is_flag, (True, False, None), "of PEFT 0.2 and before; without effect"),
    _idle("megatron_core", is_text, (None, "megatron.core", 1)),
    _idle("qalora_group_size", _is_number_or_null, (None, 16, "16"), "of effect only with `use_qalora`"),
    _idle("eva_config", _is_object, (None, {"rho": 2.0}, "x"), _OF_INIT),
    _idle("corda_config", _is_object, (None, {"corda_method": "ipm"}, "x"), _OF_INIT),
    _idle("loftq_config", _is_object, (None, {"loftq_bits": 4}, "x"), _OF_INIT),
    _idle("lora_ga_config", _is_object, (None, {"scale": "stable"}, "x"), _OF_INIT),
    ConfigField(
        "modules_to_save",
        is_of_heads,
        (None, [], ["score"], ["classifier", "score"]),
        (["lm_head"], ["score", "lm_head"]),
        "`score` and `classifier`, the head of SEQ_CLS or TOKEN_CLS: one linear; nothing else",
        about="whole modules were trained and saved beside the LoRA; they are not served, and the LoRA alone is not "
        "what was trained. LoRA on such a module is served where it is a linear of the table above (lm_head is one)",
    ),
    _read(
        "trainable_token_indices",
        (None, [], [1, 2], {"embed_tokens": [1]}, {"lm_head": [3, 1]}),
        ([1, 1], [-1], {"embed_tokens": "1"}, "1"),
        "rows of the embedding, of the head where it is tied to it, or of `lm_head`; up to 1024 of each. Where PEFT "
        "has saved the rows of a tied head too, they must equal the embedding's",
    ),
    _neutral("lora_bias", (True,), f"a bias was trained beside each lora_B; it {_REST}"),
    _neutral(
        "enable_lora",
        ([True, False, True],),
        "of PEFT 0.2 and before: LoRA on parts of a fused linear, whose lora_A and lora_B hold several matrices; to a "
        "plain LoRA the same tensors are other matrices",
    ),
    _neutral(
        "layer_replication",
        ([[0, 2], [1, 3]],),
        "the training had a deeper model, made of layers of this base several times over; the adapter's layers are not "
        "the base's",
    ),
    _neutral(
        "target_parameters",
        (["experts.gate_up_proj"],),
        f"LoRA was trained on bare parameters, as the experts of a mixture have; it {_REST}. PEFT adds them "
        "where a name in target_modules is an expert's too; a training on q_proj, k_proj, v_proj and o_proj alone has "
        "none",
    ),
    _neutral(
        "megatron_config",
        ({"hidden_size": 1},),
        "the LoRA was trained on the parallel layers of Megatron, not on the linears of this base",
    ),
    _neutral(
        "use_qalora",
        (True,),
        "the training summed the inputs of lora_A by groups of `qalora_group_size`, which a plain LoRA does not do",
    ),
    _neutral(
        "use_bdlora",
        ({"nblocks": 2},),
        "lora_A or lora_B is a matrix of blocks along its diagonal; to a plain LoRA the same tensor is another matrix",
    ),
    _read(
        "alora_invocation_tokens",
        (None, [1, 2]),
        ([], [-1], "1"),
        "1 to 64 token ids: the adapter acts from their last occurrence in a prompt on (aLoRA); not beside `use_dora`, "
        "and on linears alone",
    ),
    _neutral(
        "arrow_config",
        ({"top_k": 3},),
        "Arrow routes each token to some of several adapters; this one alone is not what was set up",
    ),
    _neutral(
        "kasa_config",
        ({"gamma": 1},),
        "KaSA cuts off a part of the base's weights and trains a diagonal between lora_A and lora_B; a plain LoRA has "
        "neither",
    ),
    _idle("monteclora_config", _is_object, (None, {"num_samples": 8}), _IN_TRAINING),
    _idle("velora_config", _is_object, (None, {"num_groups": 64}), _IN_TRAINING),
)
"""Every field of LoraConfig in PEFT 0.2 to 0.21, and those that it writes beside. Any other one: see the module."""

UNKNOWN_FIELD = (
    "this server does not know the field, so not what it does to the trained weights; the adapter could compute "
    "something else than was trained"
)
"""Ends the refusal of a field that is in no table."""
FIELD_RULES: Mapping[str, ConfigField] = {field.name: field for field in CONFIG_FIELDS}
READ_FIELDS = frozenset(field.name for field in CONFIG_FIELDS if field.accepts is None)
"""The fields whose values count."""


@dataclass(frozen=True, slots=True)
class TensorKind:
    """Tensors of an adapter that are known by a part of their name. `feature` is what they belong to where they are
    refused, None where they are served. `about` ends a refusal, where no field of the config says it."""

    part: str
    feature: str | None
    note: str = ""
    about: str = ""

    def explain(self) -> str:
        """Explain what refused tensors mean for the others."""
        rule = FIELD_RULES.get(self.feature or "")
        return self.about or (rule.explain(None) if rule else "")


_NOT_CONVERTED = (
    ("lora_magnitude_vector", "DoRA's magnitudes"),
    ("trainable_tokens_delta", "rows of trained tokens"),
    ("lora_embedding_A", "LoRA on an embedding"),
)
"""Tensors that PEFT leaves out of an adapter that it converts to a plain LoRA (`subtract_mutated_init`), without an
error."""


def not_converted(config: Mapping[str, Any], tensors: Iterable[str]) -> list[str]:
    """Name what PEFT's conversion of an initialisation leaves out of an adapter with these tensors."""
    names = list(tensors)
    found = [words for part, words in _NOT_CONVERTED if any(f".{part}" in name for name in names)]
    if not is_neutral(config.get("modules_to_save")):
        found.append("modules_to_save")
    if config.get("use_rslora") and (config.get("rank_pattern") or config.get("alpha_pattern")):
        found.append("use_rslora beside rank_pattern or alpha_pattern")
    return found


_HEADS = ("score", "classifier", "qa_outputs", "v_head")
_HEAD = (
    "it is of a head that was trained beside the LoRA; of heads one linear is served (score or classifier, as "
    "modules_to_save has it), and neither LoRA on a head nor one of several layers; the LoRA without its head does not "
    "compute what was trained"
)

TENSOR_KINDS: tuple[TensorKind, ...] = (
    TensorKind("lora_A", None, "[r, in]"),
    TensorKind("lora_B", None, "[out, r]"),
    TensorKind("lora_magnitude_vector", None, "[out]; DoRA's, only with `use_dora`"),
    TensorKind(
        "base_layer",
        None,
        "a copy of the base's weight or bias, as PEFT saves of a targeted lm_head: dropped where it equals it",
    ),
    TensorKind("lora_embedding_A", None, "[r, vocabulary]; of `embed_tokens`"),
    TensorKind("lora_embedding_B", None, "[hidden size, r]"),
    TensorKind("trainable_tokens_delta", None, "[tokens, hidden size]; of `trainable_token_indices`"),
    TensorKind("modules_to_save", "modules_to_save", "whole modules trained beside"),
    TensorKind("original_module", "modules_to_save", "whole modules trained beside"),
    *(
        TensorKind(
            part,
            "modules_to_save",
            "a head that is trained beside"
            + (": served as `….weight` [labels, hidden size] and `….bias`" if part in HEAD_MODULES else ""),
            _HEAD,
        )
        for part in _HEADS
    ),
    TensorKind("lora_velora_embed", None, "VeLoRA's, of use in training only: dropped"),
    TensorKind("lora_monteclora_sampler", None, "MonteCLoRA's, of use in training only: dropped"),
    TensorKind("lora_diag", "kasa_config", "KaSA"),
)
OF_TRAINING = frozenset({"lora_velora_embed", "lora_monteclora_sampler"})
"""Parts of the names of tensors that PEFT computes with in training alone."""
REFUSED_TENSORS: Mapping[str, TensorKind] = {kind.part: kind for kind in TENSOR_KINDS if kind.feature}
