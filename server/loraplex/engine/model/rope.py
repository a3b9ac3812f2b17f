"""A config's rotary position embedding: frequencies that hold for every position of every sequence.

Two kinds of RoPE take other frequencies once a sequence is longer than the model was trained for, which would turn
all keys before it wrong. Here the frequencies are chosen once, by the longest sequence that is served (ADR 0011).
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from loraplex.adapters.store.files import shown
from loraplex.engine.model.base import ModelUnsupported

STATIC_ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn"})
"""Kinds of RoPE whose frequencies do not depend on the length of a sequence."""

_COMMON_FIELDS = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})
_FIELDS: Mapping[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "dynamic": frozenset({"factor"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
    "yarn": frozenset(
        {
            "factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale",
            "mscale_all_dim", "truncate",
        }
    ),
    "proportional": frozenset({"factor"}),
    "longrope": frozenset(
        {"factor", "original_max_position_embeddings", "attention_factor", "short_factor", "long_factor"}
    ),
}  # fmt: skip
SCALE_FIELD = "llama_4_scaling_beta"
"""A number in rope_parameters that scales queries by their position."""
_MOST_SCALES = 1 << 16
"""Different scales of the positions of a model."""
_NO_ORIGINAL_LENGTH = frozenset({"default", "linear", "dynamic", "proportional"})
"""RoPE types for which transformers ignores original_max_position_embeddings. "proportional" turns pairs of the whole
head; the last pairs have the frequency 0."""


@dataclass(frozen=True, slots=True)
class Rope:
    """`inv_freq` are R/2 numbers, each a float32, for the first R of the head's dimensions; cos and sin are multiplied
    by `attention_factor`."""

    inv_freq: tuple[float, ...]
    attention_factor: float


_NONE = Rope((0.0,), 1.0)
"""Turns nothing: by an angle of 0."""


@dataclass(frozen=True, slots=True)
class QueryScale:
    """Queries are multiplied by 1 + `beta` · ln(1 + ⌊position ÷ `length`⌋)."""

    beta: float
    length: int


@dataclass(frozen=True, slots=True)
class RopePlan:
    """The different ropes of a model, and the longest sequence that they hold for. `query_scale`: None where no served
    position has another scale than 1."""

    ropes: tuple[Rope, ...]
    max_positions: int
    query_scale: QueryScale | None = None


def plan_rope(
    configs: Mapping[str, Any],
    head_dims: Mapping[str, int],
    max_model_len: int,
    *,
    partial: bool,
    others: Collection[str],
    by_kind: Collection[str] = (),
    rotates: bool = True,
) -> tuple[RopePlan, Mapping[str, int]]:
    """The plan, and the index of each kind of layer's rope. `configs`, `head_dims`: of the kinds of layers that the
    model has. `max_model_len` is the length that was asked for, 0 if none was. `partial`: the family rotates a part of
    each head where its config says so. `others`: names of parameters that no frequency depends
    on. `by_kind`: kinds that rope_parameters may hold a set for; empty: they are one set. `rotates`: whether any
    are.

    Raises ModelUnsupported.
    """
    config = next(iter(configs.values()))
    parameters = getattr(config, "rope_parameters", None) or {}
    stray = sorted(parameters.keys() - by_kind) if by_kind else ()
    if stray:
        raise ModelUnsupported(
            f"the RoPE parameters {', '.join(stray)} of {config.model_type} belong to no type of layer"
        )
    if not rotates:
        return RopePlan((_NONE,), config.max_position_embeddings), dict.fromkeys(head_dims, 0)
    ropes: list[Rope] = []
    limits: list[int] = []
    of_kind: dict[str, int] = {}
    for kind, head_dim in sorted(head_dims.items()):
        chosen = parameters.get(kind) if by_kind else parameters
        if not isinstance(chosen, dict) or not isinstance(chosen.get("rope_type", "default"), str):
            raise ModelUnsupported(
                f"the config has no RoPE parameters for {kind if by_kind else 'its layers'}"
            )
        chosen = {name: value for name, value in chosen.items() if name not in others}
        rope, limit = _rope(
            configs[kind], chosen, kind if by_kind else None, head_dim, max_model_len, partial
        )
        if rope not in ropes:
            ropes.append(rope)
        of_kind[kind] = ropes.index(rope)
        limits.append(limit)
    longest = min(limits)
    scale = (
        _query_scale(parameters, min(longest, max_model_len or longest)) if SCALE_FIELD in others else None
    )
    return RopePlan(tuple(ropes), longest, scale), of_kind


def _query_scale(parameters: Mapping[str, Any], longest: int) -> QueryScale | None:
    beta, length = parameters.get(SCALE_FIELD), parameters.get("original_max_position_embeddings")
    if not isinstance(beta, int | float) or type(length) is not int or length <= longest // _MOST_SCALES:
        raise ModelUnsupported(
            f"the RoPE parameters have {SCALE_FIELD} {shown(beta)} and original_max_position_embeddings "
            f"{shown(length)}, which give no scales of queries"
        )
    return QueryScale(float(beta), length) if longest > length else None


def _rope(
    config: Any,
    parameters: Mapping[str, Any],
    layer_type: str | None,
    head_dim: int,
    max_model_len: int,
    partial: bool,
) -> tuple[Rope, int]:
    rope_type = parameters.get("rope_type", "default")
    _check(parameters, rope_type, partial)
    try:
        if rope_type == "default":
            rotated = int(head_dim * (parameters.get("partial_rotary_factor") or 1.0))
            exponents = torch.arange(0, rotated, 2, dtype=torch.float32) / rotated
            inv_freq, factor = 1.0 / (parameters["rope_theta"] ** exponents), 1.0
            limit = config.max_position_embeddings
        else:
            length, limit = _length(config, parameters, rope_type, max_model_len)
            from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

            extra = {} if layer_type is None else {"layer_type": layer_type}
            own = copy.copy(config)
            own.head_dim = head_dim
            inv_freq, factor = ROPE_INIT_FUNCTIONS[rope_type](
                own, torch.device("cpu"), seq_len=length, **extra
            )
    except (KeyError, TypeError, ValueError, ArithmeticError, RuntimeError) as error:
        raise ModelUnsupported(
            f"the RoPE parameters of {shown(rope_type)} are not valid: {type(error).__name__}: {error}"
        ) from error
    for name in ("short_factor", "long_factor"):
        if name in parameters and len(parameters[name]) != len(inv_freq):
            raise ModelUnsupported(
                f"the RoPE parameters have {len(parameters[name])} numbers in {name}, not {len(inv_freq)}"
            )
    if not 0 < 2 * len(inv_freq) <= head_dim or not inv_freq.isfinite().all():
        raise ModelUnsupported(
            f"the RoPE parameters of {shown(rope_type)} do not fit heads of size {head_dim}"
        )
    return Rope(tuple(inv_freq.float().tolist()), float(factor)), limit


def _length(
    config: Any, parameters: Mapping[str, Any], rope_type: str, max_model_len: int
) -> tuple[int | None, int]:
    """The length to take the frequencies for, None for the model's own, and the longest that they serve."""
    trained = config.max_position_embeddings
    if rope_type == "longrope":
        original = parameters["original_max_position_embeddings"]
        if max_model_len > original:
            return original + 1, trained
        return None, min(original, trained)
    if rope_type == "dynamic" and max_model_len > trained:
        stretched = int(trained * parameters["factor"])
        return stretched, stretched
    return None, trained


def _check(parameters: Mapping[str, Any], rope_type: str, partial: bool) -> None:
    if rope_type not in _FIELDS:
        raise ModelUnsupported(
            f"rope_type {shown(rope_type)} is not supported; supported are {', '.join(sorted(_FIELDS))}"
        )
    known = _FIELDS[rope_type] | _COMMON_FIELDS
    if rope_type in _NO_ORIGINAL_LENGTH:
        known |= {"original_max_position_embeddings"}
    unknown = sorted(name for name, value in parameters.items() if value is not None and name not in known)
    if unknown:
        raise ModelUnsupported(
            f"the RoPE parameters {', '.join(unknown)} are not known for {shown(rope_type)}"
        )
    share = parameters.get("partial_rotary_factor")
    if share is not None and share != 1 and not (partial or rope_type == "proportional"):
        raise ModelUnsupported(
            f"the config's partial_rotary_factor is {shown(share)}, which is not supported"
        )
