"""Prints docs/peft-support.md from the tables that decide: `python -m loraplex.adapters.admission.support_page >
PAGE`."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from loraplex.adapters.admission.module_names import DECODERS, HEADS
from loraplex.adapters.admission.peft_support import CONFIG_FIELDS, TENSOR_KINDS, ConfigField
from loraplex.adapters.store.tensors import NUMPY_DTYPES
from loraplex.kernels.lora.site_groups import HEAD, LAYER_SITES

_INTRODUCTION = """\
# What of PEFT is served

Printed from the tables that the checks read (`adapters/admission/peft_support.py`), by `python -m
loraplex.adapters.admission.support_page > docs/peft-support.md`; a test fails where it differs. How to train and push
is in [adapters.md](adapters.md).

Served is LoRA as PEFT (0.18 and later) computes it, y += scaling · B·(A·x), and DoRA, each site with its own rank, in
any mix. LoRA+ and other ways to train that leave nothing in the file need nothing. Everything else is refused by name,
with a code and with what can be done: an adapter that is accepted computes what it was trained to compute.
"""

_MODULES = """\
Fused names (`qkv_proj`, `gate_up_proj`) are those of bases whose checkpoints have them as one linear (Phi-3); on others
they are refused as `base_mismatch`, as every module is that the base does not have. The names from `dense` on are those
of bases that run through transformers: Phi and OPT (`dense`, `out_proj`, `fc1`, `fc2`), StarCoder2 (`c_fc`, `c_proj`),
GPT-NeoX. LoRA on any other module of the base is `unsupported_feature`, with the module's name.
"""

_NAMES = """\
A module may go by any of these names, with the same result, whichever of them the base's own checkpoint has. The same
holds for whole paths in `target_modules`, `exclude_modules`, `rank_pattern` and `alpha_pattern`. A file that uses two
names for the layers, or for the head, is refused as `unexpected_tensor`.
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


def render() -> str:
    """The whole page."""
    parts = [
        _INTRODUCTION,
        "## Modules\n",
        _table(("module", "where"), _modules()),
        _MODULES,
        "## Names of modules\n",
        _NAMES,
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


def _modules() -> Iterable[tuple[str, ...]]:
    for site in LAYER_SITES:
        yield _code(site), "each layer"
    yield (
        _code(HEAD),
        "behind the last layer; where the base ties it to its embedding, the head alone changes",
    )


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
    print(render(), end="")
