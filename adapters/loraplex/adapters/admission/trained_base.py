"""The form of the base that an adapter was trained on, by the name in its config, beside the form that is served.

QLoRA trains over a base of 4 bits; over other weights its adapter answers a little differently. Only the name tells: a
training that quantises while it loads names the full-precision base.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

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
_NOT_MEASURED = "the change of its answers was not measured"
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
        forms = f"was trained on {self.trained_on} of this base and is served over {self.served}"
        return f"the adapter {forms}: {self.reason}"

    def as_dict(self) -> dict[str, str]:
        return {"trained_on": self.trained_on, "served": self.served, "reason": self.reason}


def compare_bases(name: str | None, base: BaseSpec) -> BaseError | None:
    """The base that a config names beside the served one; None where it names none, or the same in the same form."""
    if not name:
        return None
    stored = base.stored or FULL_PRECISION
    served = _INT8_AT_LOAD if base.quantise == "int8" and base.stored in ("", _FP8) else stored
    if not names_base(name, base):
        return BaseError(shown(name), served, _ANOTHER, is_this_base=False)
    trained = stored if is_same_copy(name, base) else _form_of(name, stored)
    if trained == served:
        return None
    if trained == stored or (not base.stored and trained in (NF4, INT8_ROWS)):
        reason = _NOT_MEASURED
    elif base.stored:
        reason = _CODES_SERVED
    else:
        reason = _UNKNOWN
    return BaseError(trained, served, reason, is_this_base=True)


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
