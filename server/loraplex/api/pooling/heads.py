"""Heads of versions: checks of what each can answer, and refusals of what it cannot."""

from __future__ import annotations

from loraplex.adapters.pooled import Head
from loraplex.api.errors import ApiError, invalid
from loraplex.control.types import ResolvedModel
from loraplex.engine.reports import EngineInfo


def head_of(model: ResolvedModel, info: EngineInfo) -> Head | None:
    """The version's own head, else that of a base model that classifies."""
    return model.head or info.head


def check_text(model: ResolvedModel, info: EngineInfo) -> None:
    """Raises ApiError (400) where the model classifies: PEFT trains such an adapter under a head of its own, and
    nothing of it writes text."""
    head = head_of(model, info)
    if head is not None:
        raise _cannot(f"{head.described}, and writes no text: ask POST /classify.")


def classifying_head(model: ResolvedModel, info: EngineInfo) -> Head:
    """Raises ApiError (400) where there is none."""
    head = head_of(model, info)
    if head is None:
        raise _cannot(
            "writes text and has no head: an adapter classifies whose modules_to_save has score or classifier "
            "(PEFT's SEQ_CLS and TOKEN_CLS)."
        )
    return head


def scoring_head(model: ResolvedModel, info: EngineInfo) -> Head:
    """Raises ApiError (400) where it gives no score of a whole prompt: with one label that is the score, with two it
    is the second's probability."""
    head = classifying_head(model, info)
    if head.task != "classify" or len(head.labels) > 2:
        raise _cannot(f"{head.described}: a reranker has one label for each text, or two.")
    return head


def _cannot(what: str) -> ApiError:
    return invalid("model", f"This model {what}", "unsupported_field")
