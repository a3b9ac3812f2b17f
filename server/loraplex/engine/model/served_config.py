"""A checkpoint's config as transformers reads it, and the part of it that a text server can serve."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loraplex.adapters.admission.base_families import obstacle_of, text_fields, whole_fields
from loraplex.adapters.admission.model_parts import parts_of
from loraplex.adapters.base_weights.schemes import read_scheme
from loraplex.adapters.base_weights.tensors import QuantisationUnsupported
from loraplex.adapters.store.files import shown
from loraplex.engine.kv.layers import CacheKind
from loraplex.engine.model.base import ModelShape, ModelUnsupported
from loraplex.engine.model.config_fields import check_sizes, refusing
from loraplex.engine.model.families.own_attention import (
    ALIBI_SIZE,
    LONGEST_ALIBI,
    check_own_attention,
    own_kv_heads,
    uses_alibi,
)
from loraplex.engine.model.rope import STATIC_ROPE_TYPES

_NO_LIMIT = 1 << 62
_LONGEST = ("max_position_embeddings", "max_seq_len", "seq_length")
"""Fields of the longest sequence; MPT's and BLOOM's are the last."""
_LONGEST_BLOOM = 2048
"""BLOOM's where its config says nothing, as most do."""


@dataclass(frozen=True, slots=True)
class ServedConfig:
    """transformers' config of a checkpoint (`whole`) and of its served part, a text model (`text`), the JSON of that,
    and the names of tensors (by how they begin) that belong to other parts and are not read."""

    whole: Any
    text: Any
    raw: Mapping[str, Any]
    unread: tuple[str, ...] = ()


def read_served_config(model_dir: Path, raw: Mapping[str, Any]) -> ServedConfig:
    """`raw`: the directory's config.json. `text` is the config itself for a text model, and the text model in it for a
    type of `model_parts.MULTIMODAL`. Raises ModelUnsupported, in one line, also for what is no decoder of text."""
    config = _config(model_dir, raw)
    parts = parts_of(config.model_type)
    if not parts.others:
        return ServedConfig(config, config, raw, parts.unread)
    config, raw = getattr(config, "thinker_config", config), whole_fields(raw)
    text, text_raw = copy.copy(config.get_text_config(decoder=True)), raw.get("text_config")
    # The head is the whole's.
    text.tie_word_embeddings = bool(getattr(config, "tie_word_embeddings", False))
    if not isinstance(text_raw, dict):
        # Files from before transformers 4.52 have the text part's fields beside the others.
        own = type(config).__annotations__
        text_raw = {name: value for name, value in raw.items() if name not in own}
    unread = *(f"model.{part}" for part in parts.others), *parts.unread
    return ServedConfig(config, text, text_raw, unread)


def _config(model_dir: Path, raw: Mapping[str, Any]) -> Any:
    # Before transformers, which has another reason of its own for an old config, and none for many families.
    _refuse(raw, model_dir)
    fields = text_fields(raw)
    check_sizes(fields)
    try:
        read_scheme(fields)
    except QuantisationUnsupported as error:
        raise ModelUnsupported(f"{error.message} ({model_dir})") from error
    from transformers import AutoConfig

    scaling = raw.get("rope_scaling")
    with refusing(f"transformers does not accept {model_dir / 'config.json'}"):
        if isinstance(scaling, dict) and scaling.get("type") == "su":
            # The first name of longrope, which transformers takes no parameters for any more.
            config = AutoConfig.for_model(**{**raw, "rope_scaling": scaling | {"type": "longrope"}})
        else:
            config = AutoConfig.from_pretrained(model_dir, trust_remote_code=False, local_files_only=True)
        # What transformers works out, where the file does not say it.
        for made in (config, config.get_text_config()):
            _refuse(made.to_dict(), model_dir)
    return config


def _refuse(config: Mapping[str, Any], model_dir: Path) -> None:
    if (obstacle := obstacle_of(config)) is not None:
        raise ModelUnsupported(f"{obstacle} ({model_dir})")


def wrapped_shape(config: Any) -> ModelShape:
    """The sizes of a model that runs through transformers. Raises ModelUnsupported."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and not parts_of(config.model_type).others:
        raise ModelUnsupported(
            f"{config.model_type} is not served: transformers has no model of it that writes text"
        )
    text = config.get_text_config()
    if by_layer := sorted(getattr(text, "per_layer_attributes", None) or ()):
        raise ModelUnsupported(
            f"the layers of {config.model_type} differ in {', '.join(by_layer)} by its per_layer_config, which models "
            "that run through transformers cannot have here"
        )
    check_own_attention(text)
    heads = _number(text, "num_attention_heads")
    kv_heads = own_kv_heads(text) or getattr(text, "num_key_value_heads", None) or heads
    head_dim = getattr(text, "head_dim", None) or _number(text, "hidden_size") // heads
    if uses_alibi(text):
        head_dim += ALIBI_SIZE
    max_positions = min(_longest(text), *_rope_limits(text))
    return ModelShape(
        caches=tuple(CacheKind(kv_heads, head_dim, window) for window in _windows(text, max_positions)),
        vocab_size=_number(text, "vocab_size"),
        max_positions=max_positions,
    )


def _windows(config: Any, max_positions: int) -> list[int | None]:
    """The window of each layer where the config names it by layer, None where the layer sees all."""
    count = _number(config, "num_hidden_layers")
    types, window = (getattr(config, name, None) for name in ("layer_types", "sliding_window"))
    if not isinstance(types, list) or len(types) != count or type(window) is not int:
        return [None] * count
    is_shorter = 0 < window < max_positions
    return [window if is_shorter and kind == "sliding_attention" else None for kind in types]


def _longest(config: Any) -> int:
    name = next((name for name in _LONGEST if getattr(config, name, None) is not None), None)
    if name is None and config.model_type == "bloom":
        return _LONGEST_BLOOM
    longest = _number(config, name or _LONGEST[0])
    return min(longest, LONGEST_ALIBI) if uses_alibi(config) else longest


def _number(config: Any, name: str) -> int:
    value = getattr(config, name, None)
    if not isinstance(value, int) or value < 1:
        raise ModelUnsupported(f"the config of {config.model_type} has no {name}")
    return value


def _rope_limits(config: Any) -> list[int]:
    """Where RoPE's frequencies would change with the longest row of a batch, so that neighbours would matter: up to
    these positions they do not."""
    parameters = getattr(config, "rope_parameters", None) or {}
    kinds = parameters.values() if all(isinstance(v, dict) for v in parameters.values()) else [parameters]
    limits = [_NO_LIMIT]
    for kind in kinds:
        rope_type = kind.get("rope_type", "default")
        if rope_type == "longrope":
            limit = kind.get("original_max_position_embeddings") or getattr(
                config, "original_max_position_embeddings", None
            )
            if not limit:
                raise ModelUnsupported("rope_type 'longrope' without original_max_position_embeddings")
            limits.append(limit)
        elif rope_type not in STATIC_ROPE_TYPES | {"proportional", "dynamic"}:
            raise ModelUnsupported(f"rope_type {shown(rope_type)} is not supported")
    return limits
