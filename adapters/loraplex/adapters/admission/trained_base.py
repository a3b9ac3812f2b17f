"""The form of the base that an adapter was trained on, by the name in its config, beside the form that is served.

QLoRA trains over a base of 4 bits; over other weights its adapter answers a little differently. Only the name tells: a
training that quantises while it loads names the full-precision base.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from loraplex.adapters.admission.base_names import format_words, is_same_copy, names_base
from loraplex.adapters.spec import BaseSpec
from loraplex.adapters.store.files import shown

FULL_PRECISION = "full precision"
NF4 = "bitsandbytes nf4"
INT8_ROWS = "bitsandbytes int8"
_INT8_AT_LOAD = "int8 codes made at the load"
_FP8 = "fp8"
_COUNT_OF_BITS = re.compile(r"\b([2-8])-?bits?\b")
_FLOATS = frozenset({"bf16", "fp16", "f16", "fp32", "f32", "hf", "safetensors", "unsloth"})
_OF_MODELS = frozenset({"hf", "safetensors"})
_BY_WORDS = {
    frozenset({"4bit"}): NF4,
    frozenset({"bnb", "4bit"}): NF4,
    frozenset({"nf4"}): NF4,
    frozenset({"bnb", "nf4"}): NF4,
    frozenset({"8bit"}): INT8_ROWS,
    frozenset({"bnb", "8bit"}): INT8_ROWS,
    frozenset({"bnb", "int8"}): INT8_ROWS,
}
NOT_MEASURED_YET = "the change of its answers has not been measured yet"
"""The reason in a report whose figures can be computed, until they are."""
CHECK = "base_form"
"""The name of the report's check."""
_ANOTHER = "the config names another model, whose weights are not here"
_CODES_SERVED = (
    "the served checkpoint is quantised itself, and the weights of the training cannot be computed from it"
)
_UNKNOWN = "weights of that form cannot be computed from the served checkpoint"


@dataclass(frozen=True, slots=True)
class BaseError:
    """A base that is not the served one, or the same in another form. `trained_on` and `served`: the two forms, or the
    other model's name; `reason`: why there is no figure for the difference. All are short ASCII."""

    trained_on: str
    served: str
    reason: str
    is_this_base: bool

    @property
    def warning(self) -> str:
        return f"{_forms(self.trained_on, self.served)}: {self.reason}"

    def as_dict(self) -> dict[str, Any]:
        figures = {"kl": None, "top1": None, "tokens": None}
        return {"trained_on": self.trained_on, "served": self.served, "reason": self.reason, **figures}


def compare_bases(name: str | None, base: BaseSpec) -> BaseError | None:
    """The base that a config names beside the served one; None where it names none, or the same in the same form."""
    if not name:
        return None
    stored, served = base.stored or FULL_PRECISION, served_form(base)
    if not names_base(name, base):
        return BaseError(shown(name), served, _ANOTHER, is_this_base=False)
    trained = stored if is_same_copy(name, base) else _form_of(name, stored)
    if trained == served:
        return None
    if trained == stored or (not base.stored and trained in (NF4, INT8_ROWS)):
        reason = NOT_MEASURED_YET
    elif base.stored:
        reason = _CODES_SERVED
    else:
        reason = _UNKNOWN
    return BaseError(trained, served, reason, is_this_base=True)


def served_form(base: BaseSpec) -> str:
    """The form of the base that is served."""
    if base.quantise == "int8" and base.stored in ("", _FP8):
        return _INT8_AT_LOAD
    return base.stored or FULL_PRECISION


def is_to_be_measured(report: Mapping[str, Any]) -> bool:
    """Whether a version's report has forms whose difference can be computed, and no figure of it."""
    found = report.get("base_error")
    return isinstance(found, dict) and found.get("reason") == NOT_MEASURED_YET


def with_figures(
    report: Mapping[str, Any], figures: Mapping[str, Any], *, warn_above: float
) -> dict[str, Any]:
    """A version's report with the `kl`, `top1`, `tokens` and `reason` of its base_error, and its check of them:
    `warn_above` is the least divergence in nats a token that warns. Without a figure it warns too."""
    error = dict(report["base_error"]) | {name: figures[name] for name in ("kl", "top1", "tokens", "reason")}
    kl, detail = error["kl"], _forms(error["trained_on"], error["served"])
    if kl is None:
        detail += f": {error['reason']}"
    else:
        detail += (
            f", which changes its answers by {kl:.2g} nat a token and {1 - error['top1']:.1%} of their most likely "
            f"tokens ({error['tokens']} tokens of fixed prompts)"
        )
    ok = kl is not None and kl < warn_above
    check = {"name": CHECK, "ok": ok, "detail": detail if ok else f"warning: {detail}"}
    checks = [check if each.get("name") == CHECK else each for each in report["checks"]]
    return {**report, "checks": checks, "base_error": error}


def _forms(trained_on: str, served: str) -> str:
    return f"the adapter was trained on {trained_on} of this base and is served over {served}"


def _form_of(name: str, stored: str) -> str:
    """The form that a name tells; `stored` where its words are of that form."""
    words = _COUNT_OF_BITS.sub(r"\1bit", "-".join(format_words(name))).split("-")
    telling = frozenset(words) - _OF_MODELS - {""}
    if telling <= _FLOATS:
        return FULL_PRECISION
    # MLX's 4 bits have even steps; the organisation alone tells them from bitsandbytes'.
    if "mlx" in re.split(r"[^a-z0-9]+", name.lower()):
        return "MLX " + "-".join(word for word in words if word != "mlx")
    form = _BY_WORDS.get(telling)
    if form is None and _is_stored_form(telling, stored):
        return stored
    return form or "-".join(words)


def _is_stored_form(words: frozenset[str], stored: str) -> bool:
    """Whether "gptq", "int4" means "gptq int4": the same tool, and no other count of bits."""
    tool, *kind = stored.split()
    counts = {word for word in words if re.fullmatch(r"int\d|\dbit", word)}
    return tool in words and counts <= {*kind, *(each.replace("int", "") + "bit" for each in kind)}
