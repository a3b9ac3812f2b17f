"""From these objects to one grammar, or to the field that cannot be one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from loraplex.api.errors import ApiError, invalid
from loraplex.api.openai.structured_output.fields import ResponseFormat, StructuredOutputs
from loraplex.http.text import printable
from loraplex.serving.errors import GrammarRefused
from loraplex.serving.grammar import builders
from loraplex.serving.grammar.schema_rules import locate

MAX_PATH = 200
"""Characters of a place in a schema, in an error."""
MAX_REASON = 400


@dataclass(frozen=True)
class Constraint:
    """One grammar that an answer must follow. `field` asks for it; `schema` is the JSON schema that stands there.
    `gbnf`: the text is GBNF, still to be converted."""

    field: str
    text: str
    schema: Any = None
    gbnf: bool = False

    def refusal(self, error: GrammarRefused) -> ApiError:
        """The 400 for a grammar that the checker has refused."""
        path, reason = ("", error.message) if self.schema is None else locate(self.schema, error.message)
        return _refusal(self.field, path, reason)


def constraint_of(
    response_format: ResponseFormat | None, structured: StructuredOutputs | None
) -> Constraint | None:
    """The constraint that these two fields set together; None for any text. Raises ApiError (400)."""
    asked = response_format if response_format is not None and response_format.type != "text" else None
    if asked is not None and structured is not None:
        message = "'response_format' and 'structured_outputs' both constrain the answer; give one."
        raise invalid("structured_outputs", message)
    if asked is not None:
        if asked.json_schema is None:
            return Constraint("response_format", builders.json_object())
        return _json("response_format.json_schema.schema", asked.json_schema.schema_)
    return None if structured is None else _structured(structured)


def _structured(asked: StructuredOutputs) -> Constraint:
    compact = bool(asked.disable_any_whitespace)
    if asked.json_ is not None:
        return _json("structured_outputs.json", asked.json_, compact=compact)
    if asked.json_object:
        return Constraint("structured_outputs.json_object", builders.json_object(compact=compact))
    if asked.regex is not None:
        return _built("structured_outputs.regex", partial(builders.regex, asked.regex))
    if asked.choice is not None:
        return _built("structured_outputs.choice", partial(builders.choice, asked.choice))
    text, field = asked.grammar or "", "structured_outputs.grammar"
    if not builders.is_gbnf(text):
        return _built(field, partial(builders.lark, text))
    return replace(_built(field, partial(builders.gbnf, text)), gbnf=True)


def _json(field: str, schema: dict[str, Any], *, compact: bool = False) -> Constraint:
    built = _built(field, partial(builders.json_schema, schema, compact=compact))
    return replace(built, schema=schema)


def _built(field: str, build: Callable[[], str]) -> Constraint:
    try:
        return Constraint(field, build())
    except GrammarRefused as error:
        raise _refusal(field, error.path, error.message) from error


def _refusal(field: str, path: str, reason: str) -> ApiError:
    where = printable(f"{field}.{path}" if path and not path.startswith("[") else f"{field}{path}", MAX_PATH)
    return invalid(
        where, f"'{where}' cannot be used: {printable(' '.join(reason.split()), MAX_REASON).rstrip('.')}."
    )
