"""The rope of a GGUF file, from its metadata and its tensors of factors, as a config.json has it.

Read as llama.cpp reads it: without a type a factor scales linearly, `none` never scales, and factors by frequency
divide the angles.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from loraplex.adapters.store.files import shown

FREQUENCIES = "rope_freqs.weight"
"""The tensor of Llama 3's rope."""
SHORT, LONG = "rope_factors_short.weight", "rope_factors_long.weight"
FACTOR_TENSORS = (FREQUENCIES, SHORT, LONG)
_TYPES = ("none", "linear", "yarn", "longrope", "su")
"""llama.cpp's names; "su" is an older one of longrope."""


class RopeUnsupported(Exception):
    """A rope that is not computed here; the message names the key or the tensor."""


class _Keys(Protocol):
    """A file's keys behind the name of its architecture."""

    def get(self, name: str, default: Any = None) -> Any: ...

    def key(self, name: str) -> str: ...


def rope_parameters(
    keys: _Keys, factors: Mapping[str, Sequence[float]], *, rotated: int, context: int, by_factors: bool
) -> dict[str, Any]:
    """The `rope_parameters` of config.json. `factors`: the numbers of those of `FACTOR_TENSORS` that the file has;
    `rotated`: dimensions of a head that are rotated; `context`: the file's context length; `by_factors`: a file without
    a type, but with factors for long texts, has longrope. Raises RopeUnsupported."""
    rope = _Rope(keys)
    theta = rope.number("freq_base", 10_000.0)
    kind = keys.get("rope.scaling.type", "longrope" if by_factors and LONG in factors else "linear")
    if kind not in _TYPES:
        raise RopeUnsupported(
            f"its metadata's {keys.key('rope.scaling.type')} is {shown(kind)}; served are {', '.join(_TYPES)}"
        )
    for name in factors:
        _check_factors(name, factors[name], rotated)
    scale = rope.number("scaling.factor", rope.number("scale_linear", 0.0, zero=True), zero=True) or 1.0
    original = rope.number("scaling.original_context_length", 0.0, zero=True) or float(context)
    if original != int(original):
        raise RopeUnsupported(
            f"its metadata's {rope.key('scaling.original_context_length')} is no whole number"
        )
    if kind in ("longrope", "su"):
        found = _long(rope, factors, scale, context, int(original))
    else:
        stray = [name for name in (SHORT, LONG) if name in factors]
        if stray:
            raise RopeUnsupported(
                f"it has {stray[0]}, and its metadata's {rope.key('scaling.type')} is no longrope"
            )
        rope.only("scaling.attn_factor", 1.0)
        frequencies = factors.get(FREQUENCIES)
        if kind == "yarn":
            found = _yarn(rope, frequencies, scale, int(original))
        else:
            found = _linear(rope, frequencies, 1.0 if kind == "none" else scale, context)
    return {"rope_theta": theta, **found}


class _Rope:
    """The numbers behind "rope."."""

    def __init__(self, keys: _Keys) -> None:
        self._keys = keys

    def key(self, name: str) -> str:
        return self._keys.key(f"rope.{name}")

    def number(self, name: str, default: float, *, zero: bool = False) -> float:
        """A number above 0; `zero`: 0 stands for one that is not given. Raises RopeUnsupported."""
        value = self._keys.get(f"rope.{name}", default)
        wrong = isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value)
        if wrong or value < 0 or (value == 0 and not zero):
            raise RopeUnsupported(f"its metadata's {self.key(name)} is {shown(value)}, no number above 0")
        return float(value)

    def only(self, name: str, *harmless: float) -> None:
        """Raises RopeUnsupported for another value, where there is one."""
        value = self._keys.get(f"rope.{name}", harmless[0])
        if isinstance(value, bool) or value not in harmless:
            raise RopeUnsupported(
                f"its metadata's {self.key(name)} is {shown(value)}, which is not served with this "
                f"{self.key('scaling.type')}"
            )

    def has(self, name: str) -> bool:
        return self._keys.get(f"rope.{name}") is not None


def _check_factors(name: str, values: Sequence[float], rotated: int) -> None:
    if len(values) != rotated // 2 or not all(math.isfinite(value) and value > 0 for value in values):
        raise RopeUnsupported(f"its tensor {name} is not {rotated // 2} numbers above 0")


def _linear(rope: _Rope, frequencies: Sequence[float] | None, scale: float, context: int) -> dict[str, Any]:
    rope.only("scaling.yarn_ext_factor", -1.0, 0.0)
    rope.only("scaling.yarn_attn_factor", 1.0)
    if frequencies is not None and any(value != 1.0 for value in frequencies):
        # Any factors can be written as longrope's: equal for all lengths, without its factor for attention.
        each = [value * scale for value in frequencies]
        return _as_longrope(each, each, 1.0, context, context)
    return {"rope_type": "default"} if scale == 1.0 else {"rope_type": "linear", "factor": scale}


def _yarn(rope: _Rope, frequencies: Sequence[float] | None, scale: float, original: int) -> dict[str, Any]:
    if frequencies is not None:
        raise RopeUnsupported(
            f"it has {FREQUENCIES}, and its metadata's {rope.key('scaling.type')} is yarn: both at once are not served"
        )
    rope.only("scaling.yarn_ext_factor", -1.0, 1.0)
    found: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": scale,
        "original_max_position_embeddings": original,
        "beta_fast": rope.number("scaling.yarn_beta_fast", 32.0),
        "beta_slow": rope.number("scaling.yarn_beta_slow", 1.0),
    }
    if rope.has("scaling.yarn_attn_factor"):
        # llama.cpp's converter writes config.json's attention_factor here.
        found["attention_factor"] = rope.number("scaling.yarn_attn_factor", 1.0)
    return found


def _long(
    rope: _Rope, factors: Mapping[str, Sequence[float]], scale: float, context: int, original: int
) -> dict[str, Any]:
    for name in (SHORT, LONG):
        if name not in factors:
            raise RopeUnsupported(
                f"its metadata's {rope.key('scaling.type')} is longrope, and it has no {name}"
            )
    if scale != 1.0:
        raise RopeUnsupported(
            f"its metadata's {rope.key('scaling.factor')} is {scale}, which is not served with longrope"
        )
    attention = rope.number("scaling.attn_factor", 1.0)
    return _as_longrope(factors[SHORT], factors[LONG], attention, context, original)


def _as_longrope(
    short: Sequence[float], long: Sequence[float], attention: float, context: int, original: int
) -> dict[str, Any]:
    return {
        "rope_type": "longrope",
        "factor": max(1.0, context / original),
        "short_factor": list(short),
        "long_factor": list(long),
        "attention_factor": attention,
        "original_max_position_embeddings": original,
    }
