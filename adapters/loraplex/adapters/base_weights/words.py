"""The settings of quantization_config: those that decide what codes stand for, and those that only tell how they were
found."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from loraplex.adapters.base_weights.tensors import QuantisationUnsupported
from loraplex.adapters.store.files import shown

CHANGES = (
    "rotat", "hadamard", "quarot", "spinquant", "flatquant", "duquant", "ostquant", "smoothquant", "smoothscale",
    "smoothfactor", "prequantscale", "equaliz", "transform", "permut", "codebook", "spars", "adapter", "outlier",
    "lowrank", "kvcache",
)  # fmt: skip
"""Parts of names of settings that change the weights, or what is computed with them, in any tool: without regard to
case, `_` and `-`."""
CHANGING_WORDS = frozenset({"had", "kv", "lora", "eora", "lut", "luts", "super", "svd", "svdquant", "rot"})
"""The same, as whole words of a name (`use_kv`, `superBits`)."""
_METHODS = frozenset({
    "rotation", "rotate", "hadamard", "quarot", "spinquant", "flatquant", "duquant", "ostquant", "smoothquant",
})  # fmt: skip
"""Values that say the same under any name."""
_CHANGES = re.compile("|".join(CHANGES).replace("transform", "transform(?!er)"))
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
_OFF = (None, False, 0, "", "none", "null", "false", "no", "off", "disabled", "0")
_FLOAT_BITS = 16
OF_RULES = {
    "bits": None,
    "group_size": None,
    "sym": None,
    "zero_point": None,
    "data_type": "int",
    "act_bits": 16,
}
"""Settings of a rule that change what codes stand for, with their defaults."""


@dataclass(frozen=True, slots=True)
class Words:
    """The settings of a format whose tensors say the rest: any other setting is neutral, unless its name says that it
    changes the weights."""

    what: str
    """The format, for messages."""
    values: Mapping[str, tuple[Any, ...]]
    """Settings with the values that are served. None: not given."""
    rules: tuple[str, ...] = ("dynamic", "extra_config", "regex_config", "layer_config")
    """Settings by module: those are served that leave modules out, or say what is said for all."""

    def check(self, given: Mapping[str, Any]) -> None:
        """Raises QuantisationUnsupported for a setting that is not served."""
        for name, value in given.items():
            served = self.values.get(name)
            if served is not None and _plain(value) not in served:
                known = ", ".join(shown(each).strip("'") for each in served if each is not None)
                raise QuantisationUnsupported(
                    f"{self.what}'s {name} {shown(value, 40)} is not served; served: {known}"
                )
            if name in self.rules:
                self._check_rules(name, value, given)
            elif served is None and (found := changing({name: value})):
                raise QuantisationUnsupported(
                    f"{self.what}'s quantization_config has {found}, which changes the weights"
                )

    def _check_rules(self, field: str, rules: object, given: Mapping[str, Any]) -> None:
        if rules is not None and not isinstance(rules, dict):
            raise QuantisationUnsupported(f"{self.what}'s {field} is {shown(rules, 40)}, not an object")
        for name, rule in (rules or {}).items():
            if name.startswith("-:"):
                continue
            if not isinstance(rule, dict):
                raise QuantisationUnsupported(f"{self.what}'s {field} {shown(name, 60)} is not an object")
            if leaves_out(rule):
                continue
            for word, value in rule.items():
                differs = word in OF_RULES and value not in (None, given.get(word, OF_RULES[word]))
                if differs or changing({word: value}):
                    raise QuantisationUnsupported(
                        f"{self.what}'s {field} gives {shown(name, 60)} {shown(word, 30)} {shown(value, 20)}, another "
                        "than the other modules: settings by module are not served"
                    )


def leaves_out(rule: Mapping[str, Any]) -> bool:
    """Whether a rule leaves its modules as floats."""
    bits = rule.get("bits")
    return type(bits) is int and bits >= _FLOAT_BITS


def changing(given: Mapping[str, Any]) -> str:
    """The name of a setting that changes the weights and is neither off nor empty, at any depth, quoted for messages;
    behind it the setting that it lies in. Empty where there is none."""
    waiting: list[tuple[str, str, str, object]] = [("", name, name, value) for name, value in given.items()]
    while waiting:
        found, name, top, value = waiting.pop()
        found = found or (name if _changes(name) else "")
        if isinstance(value, Mapping):
            if value.get("enabled", True) not in _OFF:
                waiting.extend((found, key, top, each) for key, each in value.items())
        elif isinstance(value, list):
            waiting.extend((found, name, top, each) for each in value)
        elif not _is_off(value) and (found or _is_method(value)):
            word = found or name
            return shown(word, 40) if word == top else f"{shown(word, 40)} in {shown(top, 40)}"
    return ""


def _changes(name: str) -> bool:
    return bool(_CHANGES.search(_joined(name))) or not CHANGING_WORDS.isdisjoint(
        word.lower() for word in _WORD.findall(name)
    )


def _is_off(value: object) -> bool:
    return (value.strip().lower() if isinstance(value, str) else value) in _OFF


def _is_method(value: object) -> bool:
    return isinstance(value, str) and _joined(value[:40]).removeprefix("random") in _METHODS


def _joined(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _plain(value: object) -> object:
    """A value as `Words.values` has it: names are written in both cases, and dtypes with torch's name before them."""
    if isinstance(value, str):
        return value.lower().removeprefix("torch.")
    if isinstance(value, bool | int | float):
        return value
    return ... if value else None


def flag(what: str, name: str, value: object) -> bool | None:
    """A setting that is true, false or not given. Raises QuantisationUnsupported."""
    found = {"true": True, "false": False}.get(value.lower()) if isinstance(value, str) else value
    if (found is None and value is not None) or not isinstance(found, bool | None):
        raise QuantisationUnsupported(f"{what}'s {name} is {shown(value, 40)}, not true or false")
    return found


_SHARED: Mapping[str, tuple[Any, ...]] = {
    "pack_dtype": (None, "int32"),
    "data_type": (None, "int", "int_sym", "int_asym"),
    "act_bits": (None, 16, 32),
}
GPTQ = Words(
    "GPTQ",
    {
        "method": (None, "gptq"),
        "checkpoint_format": (None, "gptq", "gptq_v2"),
        "format": (None, "gptq", "gptq_v2"),
        "is_marlin_format": (None, False),
        **_SHARED,
    },
)
AWQ = Words(
    "AWQ",
    {
        "method": (None, "awq"),
        "version": (None, "gemm"),
        "checkpoint_format": (None, "gemm"),
        "format": (None, "gemm"),
        **_SHARED,
    },
)
