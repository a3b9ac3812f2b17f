"""Prints the tables of docs/peft-support.md from those that decide: `python -m tools.support_page`. What stands behind
`END` is written by hand, and stays."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loraplex.adapters.admission.model_parts import DECODERS
from loraplex.adapters.admission.module_names import HEADS, WRAPPERS
from loraplex.adapters.admission.peft_support import CONFIG_FIELDS, TENSOR_KINDS, ConfigField
from loraplex.adapters.store.tensors import NUMPY_DTYPES
from loraplex.kernels.lora.site_groups import EMBEDDING, HEAD, LAYER_SITES, MODEL_PROJECTION

PAGE = Path(__file__).resolve().parents[1] / "docs/peft-support.md"
END = "<!-- The end of what tools/support_page.py prints. -->\n"
_INTRODUCTION = """\
# What of PEFT is served

Printed from the tables that the checks read (`adapters/admission/peft_support.py`), by `python -m
tools.support_page`; a test fails where they differ. How to train and push is in [adapters.md](adapters.md), and what
surprises about an upload [behind the tables](#uploads-that-surprise).

Served is LoRA as PEFT (0.18 and later) computes it, y += scaling · B·(A·x), DoRA and aLoRA, each site with its own
rank, in any mix. LoRA+ and other ways to train that leave nothing in the file need nothing. Everything else is refused
by name, with a code and with what it means for the trained weights. An adapter that is accepted computes what it was
trained to compute.
"""

_MODULES = """\
Fused names (`qkv_proj`, `gate_up_proj`) are those of bases whose checkpoints have them as one linear (Phi-3); on
others they are refused as `base_mismatch`, as every module is that the base does not have. The names from `dense` on
are those of bases that run through transformers: Phi and OPT (`dense`, `out_proj`, `fc1`, `fc2`), StarCoder2 (`c_fc`,
`c_proj`), GPT-NeoX, Laguna (`g_proj`), and from `c_attn` on StarCoder, GPT-2, GPT-J, CodeGen and MPT, where
`attn_c_proj` stands for the `c_proj` of an attention; the others are LFM2's and LFM3's, Qwen3.5's and OLMo Hybrid's,
and Granite 4's (`in_proj`, `out_proj`, `input_linear`, `output_linear`). `gate` is the router of Mixtral, OLMoE,
Qwen3-MoE, Qwen2-MoE, Qwen3-Next and Qwen3.5-MoE, `shared_expert_gate` the gate of the last three's shared experts;
`router` is that of gpt-oss and Granite, `proj` (in `router.proj`) Gemma 4's; `in_proj_qkvz` and `in_proj_ba` are
Qwen3-Next's. A module may have another size in some layers, or be missing there. A shared expert, which all tokens go
through, has sites as a dense layer has. LoRA on any other module of the base is `unsupported_feature`, with the
module's name; on the routed experts of a mixture with `experts`, and [the form that was
found](#lora-on-routed-experts). On the vision or audio part of a multimodal model it is left out, or refused with
`other_towers` ([models.md](models.md#multimodal-models)).
"""

_KINDS_OF_ADAPTERS = """\
Public adapters as they were found, before the last of these kinds were served:

| what | seen | verdict |
|---|---|---|
| config files, of 80 repositories | 205 | 59 are for a base that can be served |
| of those, accepted | 54 of 59 | 42 were compared with PEFT, and 42 were equal |
| weights in MLX's form | 11 of 106 | refused then; converted now |
| weights that are pointers of Git LFS | 24 of 64 | refused |

A test builds each kind below with PEFT. For a kind that is served it compares A, B, magnitudes, scaling and the change
that they make with those of the layers that PEFT loads from the same files.
"""

_NAMES = """\
A module may go by any of these names, with the same result, whichever of them the base's own checkpoint has. The same
holds for whole paths in `target_modules`, `exclude_modules`, `rank_pattern` and `alpha_pattern`. A file that uses two
names for the layers, or for the head, is refused as `unexpected_tensor`. Words that wrappers put into names are left
out: WRAPPERS; and `module.` before `base_model.model.`.
"""

_DTYPES = """\
Tensors may be stored as DTYPES (safetensors' names), and are refused as
`unsupported_feature` with the feature `dtype_<NAME>` otherwise. A and B are rounded once, from float32, to the dtype
that the base is served in. What is made of magnitudes stays in float32.
"""

_FIELDS = """\
A field that is not in this table is accepted with a value that asks for nothing (`null`, `false`, `""`, `[]`, `{}`) and
refused as `unsupported_feature` with any other. The feature of a refusal is the field's name.
"""


@dataclass(frozen=True, slots=True)
class AdapterKind:
    """A kind of adapters as they are found in public. `refused` is the feature of its refusal, as
    `unsupported_feature`; None: served, and equal to PEFT. `warns`: the report has a warning of it."""

    name: str
    refused: str | None
    why: str
    warns: bool = False


ADAPTER_KINDS: tuple[AdapterKind, ...] = (
    AdapterKind("a list of names", None, ""),
    AdapterKind("`all-linear`", None, ""),
    AdapterKind("an expression in `target_modules`", None, "the tensors tell the modules", warns=True),
    AdapterKind("some layers", None, ""),
    AdapterKind("rsLoRA", None, ""),
    AdapterKind("DoRA", None, ""),
    AdapterKind("aLoRA", None, "acts from its invocation on: [alora.md](alora.md)"),
    AdapterKind("LoRA on `lm_head`", None, "the copy of its weight is dropped"),
    AdapterKind("LoRA on `embed_tokens`", None, "the copy of its weight is dropped"),
    AdapterKind("`trainable_token_indices`", None, "rows of the embedding and of a tied head"),
    AdapterKind("ranks and alphas by names of modules", None, ""),
    AdapterKind("alphas by expressions", None, "matched in linear time"),
    AdapterKind(
        "a list of names made for many models",
        None,
        "the base lacks some; the tensors tell",
        warns=True,
    ),
    AdapterKind("layers beyond the base's", None, "the tensors tell", warns=True),
    AdapterKind("`task_type` of embeddings", None, "chooses a Python class"),
    AdapterKind("`task_type` of an encoder and decoder", None, "chooses a Python class"),
    AdapterKind(
        "`task_type` of questions, with a head's name but no head",
        None,
        "PEFT adds the name",
        warns=True,
    ),
    AdapterKind("`ensure_weight_tying` where nothing is tied", None, "without effect", warns=True),
    AdapterKind("VeLoRA", None, "differs in training only"),
    AdapterKind("MonteCLoRA", None, "differs in training only"),
    AdapterKind("PiSSA, converted by PEFT", None, "a plain LoRA of twice the rank"),
    AdapterKind("PiSSA, not converted", "init_lora_weights", "A and B fit another base"),
    AdapterKind("a classifier with its head", None, "[classifies](adapters.md#versions-that-classify)"),
    AdapterKind("a classifier without its head", "task_type", "its answers come from the head"),
    AdapterKind("`lm_head` as a whole", "modules_to_save", "whole modules are not served"),
    AdapterKind("trained biases", "bias", "the LoRA alone is not what was trained"),
    AdapterKind("a bias beside lora_B", "lora_bias", "the LoRA alone is not what was trained"),
    AdapterKind("repeated layers", "layer_replication", "the base has other layers"),
    AdapterKind(
        "the experts of a mixture that takes none, a pair each",
        "experts",
        "served are [some mixtures](#lora-on-routed-experts)",
    ),
    AdapterKind(
        "the experts of a mixture that takes none, stacked",
        "experts",
        "served are [some mixtures](#lora-on-routed-experts)",
    ),
    AdapterKind("LoHa, VeRA and other methods", "peft_type", "only LoRA"),
)


def render() -> str:
    """The whole page."""
    parts = [
        _INTRODUCTION,
        "## Kinds of adapters\n",
        _KINDS_OF_ADAPTERS,
        _table(("kind", "verdict", "warning", "why"), _kinds()),
        "## Modules\n",
        _table(("module", "where"), _modules()),
        _MODULES,
        "## Names of modules\n",
        _NAMES.replace(
            "WRAPPERS", "; ".join(f"{_code(f'{word}.')} of {wrapper}" for word, wrapper in WRAPPERS)
        ),
        _table(("name behind `base_model.model.`", "is a name in"), _names()),
        "## Dtypes\n",
        _DTYPES.replace("DTYPES", _list(_code(name) for name in NUMPY_DTYPES)),
        "## Tensors\n",
        _table(("part of the name", "verdict", "what it is"), _tensors()),
        "## Fields of adapter_config.json\n",
        _FIELDS,
        _table(("field", "accepted", "refused, for example", "code", "note"), _fields()),
    ]
    return "\n".join(parts)


def _kinds() -> Iterable[tuple[str, ...]]:
    for kind in ADAPTER_KINDS:
        verdict = "served, equal to PEFT" if kind.refused is None else f"refused, {_code(kind.refused)}"
        yield kind.name, verdict, "yes" if kind.warns else "", kind.why


def _modules() -> Iterable[tuple[str, ...]]:
    for site in LAYER_SITES:
        yield _code(site), "each layer"
    yield (
        _code(HEAD),
        "behind the last layer; where the base ties it to its embedding, the head alone changes",
    )
    yield (
        _code(EMBEDDING),
        "before the first layer, without DoRA; a tied head changes with it only by `ensure_weight_tying`, as in PEFT",
    )
    yield _code(MODEL_PROJECTION), "before the first layer, of families whose layers have inputs of their own"


def _names() -> Iterable[tuple[str, ...]]:
    for decoder, model in DECODERS:
        yield _code(f"{decoder}layers.0.…"), model
    for head, model in HEADS:
        yield _code(head), model


def _tensors() -> Iterable[tuple[str, ...]]:
    for kind in TENSOR_KINDS:
        verdict = "served" if kind.feature is None else f"`unsupported_feature`, {_code(kind.feature)}"
        yield _code(kind.part), verdict, kind.note


def _fields() -> Iterable[tuple[str, ...]]:
    for field in CONFIG_FIELDS:
        about = field.explain(field.refused[0]) if field.refused else ""
        notes = "; ".join(text for text in (field.note, about) if text)
        yield _code(field.name), _examples(field.accepted), _examples(field.refused), _refusal(field), notes


def _refusal(field: ConfigField) -> str:
    if field.idle:
        return "none"
    return ", ".join(_code(code) for code in field.codes)


def _examples(values: Iterable[Any]) -> str:
    return ", ".join(_code(json.dumps(value)) for value in values)


def _code(text: str) -> str:
    return f"`{text}`".replace("|", "\\|")


def _list(names: Iterable[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} or {last}"


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = ["| " + " | ".join(cells) + " |" for cells in (head, *rows)]
    return "\n".join((lines[0], "|---" * len(head) + "|", *lines[1:])) + "\n"


if __name__ == "__main__":
    PAGE.write_text(render() + END + PAGE.read_text("utf-8").partition(END)[2], "utf-8")
