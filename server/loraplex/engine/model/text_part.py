"""The part of a config that a text server can serve, or why there is none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from loraplex.engine.model.base import ModelUnsupported

_OTHER_INPUTS = ("vision_config", "audio_config", "vision_tower", "speech_config", "vq_config")
_MULTIMODAL_TYPES = frozenset({"phi4_multimodal"})
"""Those that have no config for what they see or hear where `_OTHER_INPUTS` would find it."""
_TEXT_OF = {"gemma3": "gemma3_text"}
"""Multimodal types whose text part alone is served, and the type that it is."""
_OTHER_PARTS = ("model.vision_tower.", "model.multi_modal_projector.")


@dataclass(frozen=True, slots=True)
class TextPart:
    """The served part: a text model's config, its JSON, and the names of tensors (by how they begin) that belong to
    other parts and are not read."""

    config: Any
    raw: Mapping[str, Any]
    unread: tuple[str, ...] = ()


def text_part(config: Any, raw: Mapping[str, Any]) -> TextPart:
    """`config` itself for a text model; the text model in it for a Gemma 3 that also sees. Raises ModelUnsupported,
    in one line, for what is no decoder of text."""
    kind = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise ModelUnsupported(f"{kind} is an encoder with a decoder; only decoders are served")
    inner = _TEXT_OF.get(kind)
    if inner is None:
        if kind in _MULTIMODAL_TYPES or any(getattr(config, n, None) is not None for n in _OTHER_INPUTS):
            raise ModelUnsupported(
                f"{kind} is multimodal; only models of text are served, and of Gemma 3 the text part"
            )
        return TextPart(config, raw)
    text, text_raw = config.get_text_config(), raw.get("text_config")
    if text.model_type != inner or not isinstance(text_raw, dict):
        raise ModelUnsupported(f"the text_config of {kind} is not one of {inner}")
    if bool(config.tie_word_embeddings) != bool(text.tie_word_embeddings):
        raise ModelUnsupported(f"tie_word_embeddings of {kind} differs between the model and its text part")
    return TextPart(text, text_raw, _OTHER_PARTS)
