"""Fields of requests that classify, score pairs of texts, or rank documents."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from loraplex.api.embeddings.schemas import MAX_INPUTS, GivenInput, inputs_of
from loraplex.api.openai.strict import Strict, must, refuse

MAX_DOCUMENTS = 1000
"""Pairs of one request, as many as Cohere's API takes."""
MAX_PAIR_CHARS = 4 << 20
"""Characters of all pairs of one request. A query counts with each of its documents."""

_UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    "cache_salt": (),
    "chat_template": (),
    "chat_template_kwargs": (),
    "messages": (),
    "mm_processor_kwargs": (),
    "truncate_prompt_tokens": (),
    "truncation_side": (),
}
_RERANK_UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    **_UNSUPPORTED,
    "max_chunks_per_doc": (),
    "max_tokens_per_doc": (4096,),
    "rank_fields": (["text"],),
    "truncation": (),
}
"""Known to Cohere, Jina and vLLM. No document is cut here: one that is too long is refused."""

Text = Annotated[str, Field(min_length=1)]
_GivenTexts = Text | Annotated[list[Text], Field(min_length=1, max_length=MAX_DOCUMENTS)]


def _texts(value: object) -> object:
    """A text or texts as a list."""
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) and text for text in texts):
        raise must("must be a text or a list of texts, none of them empty")
    if len(texts) > MAX_DOCUMENTS:
        raise must(f"must have at most {MAX_DOCUMENTS} texts")
    return texts


def _documents(value: object) -> object:
    """Texts, or objects with a `text`, as texts."""
    if isinstance(value, list):
        value = [document.get("text") if isinstance(document, dict) else document for document in value]
    return _texts(value if isinstance(value, list) else None)


_GivenDocument = Text | dict[str, Any]
_GivenDocuments = Annotated[list[_GivenDocument], Field(min_length=1, max_length=MAX_DOCUMENTS)]
Texts = Annotated[list[str], BeforeValidator(_texts, json_schema_input_type=_GivenTexts)]


class PooledFields(Strict):
    """Fields of all these requests. A null is the same as leaving a field out. `use_activation`: false for logits."""

    model: Annotated[str, Field(min_length=1, max_length=512)]
    user: Annotated[str, Field(max_length=512)] | None = None
    priority: Annotated[int, Field(ge=-1000, le=1000)] | None = None
    use_activation: bool | None = None
    encoding_format: Literal["float"] | None = None
    UNSUPPORTED = _UNSUPPORTED


class ClassifyRequest(PooledFields):
    input: Annotated[list[Any], BeforeValidator(inputs_of, json_schema_input_type=GivenInput)]
    add_special_tokens: bool | None = None
    MAX_INPUTS: ClassVar[int] = MAX_INPUTS


class RerankRequest(PooledFields):
    query: Text
    documents: Annotated[list[str], BeforeValidator(_documents, json_schema_input_type=_GivenDocuments)]
    top_n: Annotated[int, Field(ge=0, le=1 << 31)] | None = None
    return_documents: bool | None = None
    UNSUPPORTED = _RERANK_UNSUPPORTED

    @property
    def pairs(self) -> list[tuple[str, str]]:
        return [(self.query, document) for document in self.documents]

    @property
    def source(self) -> str:
        return "documents"

    @model_validator(mode="after")
    def _is_bounded(self) -> RerankRequest:
        _check_chars(self.source, [self.query], self.documents)
        return self


_SIDES = (("text_1", "text_2"), ("queries", "documents"), ("data_1", "data_2"), ("queries", "items"))
"""Names of the two sides: versions of vLLM take one pair of names each."""


class ScoreRequest(PooledFields):
    text_1: Texts | None = None
    text_2: Texts | None = None
    queries: Texts | None = None
    documents: Texts | None = None
    items: Texts | None = None
    data_1: Texts | None = None
    data_2: Texts | None = None

    @property
    def source(self) -> str:
        return self._sides[1]

    @property
    def pairs(self) -> list[tuple[str, str]]:
        first, second = (getattr(self, side) for side in self._sides)
        return [
            (text, other) for text, other in zip(first * (len(second) // len(first)), second, strict=True)
        ]

    @property
    def _sides(self) -> tuple[str, str]:
        return next(sides for sides in _SIDES if None not in (getattr(self, side) for side in sides))

    @model_validator(mode="after")
    def _has_two_sides(self) -> ScoreRequest:
        given = {name for sides in _SIDES for name in sides if getattr(self, name) is not None}
        if given not in [set(sides) for sides in _SIDES]:
            refuse(
                "text_1",
                "Give the two sides of the pairs as 'text_1' and 'text_2', or 'queries' and 'documents'.",
            )
        (first, second), (left, right) = self._sides, (getattr(self, side) for side in self._sides)
        if len(left) not in (1, len(right)):
            refuse(
                second,
                f"'{second}' has {len(right)} texts and '{first}' has {len(left)}: give one for all, or as many.",
            )
        _check_chars(second, left, right)
        return self


def _check_chars(field: str, left: list[str], right: list[str]) -> None:
    count = sum(map(len, left)) * (len(right) // len(left)) + sum(map(len, right))
    if count > MAX_PAIR_CHARS:
        refuse(
            field,
            f"The pairs have {count} characters; a request may have {MAX_PAIR_CHARS}, and a query counts with each of "
            "its documents.",
        )
