"""The objects `response_format` and `structured_outputs`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from loraplex.api.codec import InvalidJson, loads
from loraplex.api.openai import described
from loraplex.api.openai.strict import Strict, must, or_neutral, refuse
from loraplex.serving.grammar import builders
from loraplex.serving.grammar.schema_rules import MAX_SCHEMA_BYTES

MAX_DESCRIPTION = 4096
UNSUPPORTED_STRUCTURED: Mapping[str, tuple[object, ...]] = {
    "disable_additional_properties": (),
    "structural_tag": (),
    "whitespace_pattern": (),
}


class JsonSchema(Strict):
    """A schema with its name. `strict` changes nothing: what a schema says is always enforced, or refused."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    description: Annotated[str, Field(max_length=MAX_DESCRIPTION)] | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class ResponseFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    RULES = (described.SCHEMA_OF_THE_FORMAT,)

    @model_validator(mode="after")
    def _schema_where_it_belongs(self) -> ResponseFormat:
        if (self.json_schema is None) == (self.type == "json_schema"):
            wanted = "needs" if self.type == "json_schema" else "can't have"
            refuse("json_schema", f"A response format of the type '{self.type}' {wanted} 'json_schema'.")
        return self


def _schema_or_its_text(value: object) -> object:
    """vLLM takes a schema as an object or as its text."""
    if isinstance(value, str):
        if len(value) > MAX_SCHEMA_BYTES:
            raise must(f"must have at most {MAX_SCHEMA_BYTES} characters")
        try:
            value = loads(value.encode("utf-8", "replace"))
        except InvalidJson as error:
            raise must(f"must be a JSON schema; this text is not JSON: {error}") from None
    if value is not None and not isinstance(value, dict):
        raise must("must be a JSON schema, as an object or as its text")
    return value


_Text = Annotated[str, Field(max_length=builders.MAX_GRAMMAR_BYTES)]
_GivenSchema = dict[str, Any] | Annotated[str, Field(max_length=MAX_SCHEMA_BYTES)] | None
KINDS = ("json", "regex", "choice", "grammar", "json_object")


class StructuredOutputs(Strict):
    """Exactly one of `json`, `regex`, `choice`, `grammar` and `json_object`. Not beside a `response_format` other than
    text."""

    json_: Annotated[
        dict[str, Any] | None,
        BeforeValidator(_schema_or_its_text, json_schema_input_type=_GivenSchema),
        Field(alias="json"),
    ] = None
    regex: Annotated[str, Field(max_length=builders.MAX_REGEX_BYTES)] | None = None
    choice: Annotated[list[_Text], Field(min_length=1, max_length=builders.MAX_CHOICES)] | None = None
    grammar: _Text | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool | None = None
    disable_fallback: bool | None = None  # there is only one library, and nothing to fall back to
    UNSUPPORTED = UNSUPPORTED_STRUCTURED
    RULES = (described.ONE_STRUCTURE,)

    @model_validator(mode="after")
    def _exactly_one(self) -> StructuredOutputs:
        given = [
            name for name in KINDS if getattr(self, "json_" if name == "json" else name) not in (None, False)
        ]
        if len(given) != 1:
            found = " and ".join(f"'{name}'" for name in given) if given else "none"
            refuse("", f"'structured_outputs' must have exactly one of {', '.join(KINDS)}; it has {found}.")
        if self.disable_any_whitespace and given[0] not in ("json", "json_object"):
            refuse("disable_any_whitespace", "'disable_any_whitespace' is only allowed with 'json'.")
        return self


Format = Annotated[ResponseFormat | None, BeforeValidator(or_neutral)]
Structure = Annotated[StructuredOutputs | None, BeforeValidator(or_neutral)]
