"""Adapters on all linears of the tiny models of `support.models.checkpoints`, made and saved by PEFT."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from loraplex.adapters.admission.base_families import ROUTED
from support.adapters.peft_zoo import ALL_SITES, any_linear, train

ADAPTERS: dict[str, dict[str, Any]] = {
    "all": {"r": 8, "lora_alpha": 16, "target_modules": ALL_SITES},
    "some": {"r": 3, "lora_alpha": 5, "target_modules": ["k_proj", "o_proj", "up_proj"], "layers_to_transform": [0, 2]},
    "many-ranks": {
        "r": 20, "lora_alpha": 10, "use_rslora": True, "target_modules": ["q_proj", "v_proj", "down_proj"],
        "rank_pattern": {"v_proj": 1},
    },
}  # fmt: skip

KINDS: dict[str, dict[str, Any]] = {
    "dora": {"r": 5, "lora_alpha": 8, "use_dora": True, "target_modules": ALL_SITES},
    "dora-some": {
        "r": 9, "lora_alpha": 4, "use_dora": True, "target_modules": ["k_proj", "gate_proj", "o_proj"],
        "layers_to_transform": [1], "fan_in_fan_out": True,
    },
    "head": {"r": 4, "lora_alpha": 8, "target_modules": ["lm_head"]},
    "dora-head": {
        "r": 3, "lora_alpha": 6, "use_dora": True, "target_modules": ["lm_head", "v_proj"],
        "rank_pattern": {"lm_head": 12},
    },
}  # fmt: skip
"""What adapters may be beside plain LoRA in the layers."""

BY_TOKEN: dict[str, dict[str, Any]] = {
    "embedding": {"r": 5, "lora_alpha": 9, "target_modules": ["embed_tokens"]},
    "embedding-rslora-and-layers": {
        "r": 12, "lora_alpha": 8, "use_rslora": True, "target_modules": [*ALL_SITES, "embed_tokens"],
        "rank_pattern": {"q_proj": 3, "embed_tokens": 20}, "alpha_pattern": {"embed_tokens": 30},
    },
    "embedding-and-head": {"r": 3, "lora_alpha": 6, "target_modules": ["embed_tokens", "lm_head"]},
    "embedding-tied": {"r": 4, "lora_alpha": 6, "target_modules": ["embed_tokens"], "ensure_weight_tying": True},
    "rows": {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], "trainable_token_indices": [9, 5, 130, 77, 6]},
    "rows-and-head": {
        "r": 4, "lora_alpha": 8, "target_modules": ["v_proj", "lm_head"], "trainable_token_indices": [40, 41, 42],
    },
    "rows-of-embedding": {
        "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"],
        "trainable_token_indices": {"model.embed_tokens": [3, 100, 4, 7]},
    },
    "rows-of-head": {
        "r": 2, "lora_alpha": 4, "target_modules": ["embed_tokens", "k_proj"],
        "trainable_token_indices": {"lm_head": list(range(120, 10, -1))},
    },
    "rows-of-both": {
        "r": 2, "lora_alpha": 4, "target_modules": ["o_proj"],
        "trainable_token_indices": {"embed_tokens": [30, 20], "lm_head": [30, 20]},
    },
    "other-rows-of-head": {
        "r": 2, "lora_alpha": 4, "target_modules": ["o_proj"],
        "trainable_token_indices": {"embed_tokens": [30, 20, 50], "lm_head": [50, 60]},
    },
}  # fmt: skip
"""What adapters may change by token: the embedding by LoRA, and rows of it and of the head."""

GATES = ["per_layer_input_gate", "per_layer_projection", "per_layer_model_projection"]
"""Sites of layers that have inputs of their own."""


def with_gates(chosen: dict[str, dict[str, Any]], family: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """These adapters, `all` on the sites of layers' own inputs too where the family has them."""
    if not family.get("hidden_size_per_layer_input"):
        return chosen
    return chosen | {"all": chosen["all"] | {"target_modules": [*chosen["all"]["target_modules"], *GATES]}}


_FUSED_TARGETS = {"q_proj": "qkv_proj", "v_proj": "qkv_proj", "k_proj": "qkv_proj",
                 "gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}  # fmt: skip

_PACKED_TARGETS = {"gate_proj": "input_linear", "up_proj": "input_linear", "down_proj": "output_linear"}
BY_PARAMETER = {
    **dict.fromkeys(("qwen2_moe", "qwen3_5_moe_text"), "gate.weight"),
    **dict.fromkeys(("gpt_oss", "granitemoe", "granitemoeshared"), "router.weight"),
}
"""Types of mixtures whose experts PEFT does not convert, and whose routers it knows by their parameter alone."""
BESIDE = frozenset({"gemma4", "gemma4_text", "granitemoehybrid"})
"""Types with experts in some models, whose names PEFT leaves as they are."""
_TARGETS: dict[str, dict[str, str]] = {
    # PEFT takes these names for the experts', where it converts them.
    **dict.fromkeys(
        {*ROUTED, "glm4_moe"} - {"qwen2_moe", "qwen3_5_moe_text"} - BESIDE,
        dict.fromkeys(("gate_proj", "up_proj", "down_proj"), "o_proj"),
    ),
    "phi3": _FUSED_TARGETS,
    "phi": {"o_proj": "dense", "gate_proj": "fc1", "up_proj": "fc1", "down_proj": "fc2"},
    "opt": {"o_proj": "out_proj", "gate_proj": "fc1", "up_proj": "fc1", "down_proj": "fc2"},
    "lfm2": {"o_proj": "out_proj", "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"},
    "nemotron_h": {"embed_tokens": "embeddings", "model.embed_tokens": "model.embeddings"},
    **dict.fromkeys(("granitemoehybrid", "granitemoeshared"), _PACKED_TARGETS),
    "lfm3": {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"},
    "starcoder2": {"gate_proj": "c_fc", "up_proj": "c_fc", "down_proj": "c_proj"},
    "gpt_neox": {
        **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "query_key_value"),
        "o_proj": "dense", "gate_proj": "dense_h_to_4h", "up_proj": "dense_h_to_4h",
        "down_proj": "dense_4h_to_h",
    },
}  # fmt: skip
"""What families call the linears that have these names in Llama, by model type."""


DELTA = {"q_proj": ["in_proj_qkv", "in_proj_z", "in_proj_a"], "k_proj": ["in_proj_b"], "o_proj": ["out_proj"]}
"""Sites of the layers of Qwen3.5 that have none of these."""
DELTA_OF = {
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": DELTA | {"v_proj": ["shared_expert_gate"]},
    "qwen2_moe": {"v_proj": ["shared_expert_gate"]},
    "qwen3_next": {
        "q_proj": ["in_proj_qkvz"],
        "k_proj": ["in_proj_ba"],
        "o_proj": ["out_proj", "shared_expert_gate"],
    },
}


def named_for(model_type: str, options: dict[str, Any]) -> dict[str, Any]:
    """The same adapter for a base whose linears have other names, or hold several of Llama's."""
    names = _TARGETS.get(model_type, {})
    targets = list(dict.fromkeys(names.get(name, name) for name in options["target_modules"]))
    if model_type in ("lfm2", "lfm3") and "q_proj" in targets:
        targets += ["in_proj"]  # of the layers that have no q_proj
        targets += ["out_proj", "g_proj"] if model_type == "lfm3" else []
    targets += [
        site for known, sites in DELTA_OF.get(model_type, {}).items() if known in targets for site in sites
    ]
    if model_type in ("granitemoehybrid", "nemotron_h"):
        targets += [
            site for known, site in (("q_proj", "in_proj"), ("o_proj", "out_proj")) if known in targets
        ]
    only_linears = options.get("use_dora") or "alora_invocation_tokens" in options  # by PEFT
    if model_type in ROUTED - BESIDE and "gate_proj" in options["target_modules"] and not only_linears:
        if model_type in BY_PARAMETER:
            options = options | {"target_parameters": [BY_PARAMETER[model_type]]}
        else:
            targets += ["gate"]
    if model_type == "olmo_hybrid" and "q_proj" in targets:
        targets += ["g_proj", "b_proj", "a_proj"]
    by_name = {
        field: {names.get(name, name): value for name, value in options[field].items()}
        for field in ("rank_pattern", "alpha_pattern", "trainable_token_indices")
        if isinstance(options.get(field), dict)
    }
    return options | {"target_modules": targets} | by_name


def save_adapters(
    base: Path, out: Path, chosen: dict[str, dict[str, Any]] = ADAPTERS, *, std: float = 0.3
) -> dict[str, Path]:
    """These adapters for a base, random in A and B, one directory each below `out`."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    made: dict[str, Path] = {}
    model_type = json.loads((base / "config.json").read_text())["model_type"]
    adapters = {name: named_for(model_type, options) for name, options in chosen.items()}
    if model_type in ("gemma3", "gemma4", "gemma4_unified"):  # only the text part is served
        adapters = {n: options | {"exclude_modules": ".*vision_tower.*"} for n, options in chosen.items()}
    for number, (name, options) in enumerate(adapters.items()):
        plain = AutoModelForCausalLM.from_pretrained(base)
        with any_linear():
            model = get_peft_model(plain, LoraConfig(task_type="CAUSAL_LM", **options))
        train(model, number, std)
        model.create_or_update_model_card = lambda folder: (
            None
        )  # a page that nobody reads takes a third of the time
        made[name] = out / name
        model.save_pretrained(made[name])
        config = made[name] / "adapter_config.json"
        if model_type == "gemma4":  # PEFT does not load it without: it changes no linear of that tower
            continue
        fields = json.loads(config.read_text())
        by_parameter = fields.get("target_parameters") == ["gate.weight"]
        if by_parameter and model_type not in BY_PARAMETER:  # as PEFT had it over transformers 4
            fields |= {"target_parameters": None, "target_modules": [*fields["target_modules"], "gate"]}
        config.write_text(json.dumps(fields | {"exclude_modules": None}))
    return made
