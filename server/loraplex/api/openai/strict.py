"""Rules for every object of a request: names are known, and what is unknown or not supported asks for nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, NoReturn

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

from loraplex.api.openai.described import Rule
from loraplex.http.text import did_you_mean, printable

NEUTRAL: tuple[object, ...] = (None, False, [], {}, "auto")
"""Values that ask for nothing, whatever the field that is known and not supported."""
EMPTY: tuple[object, ...] = (None, [], {})
"""Values that ask for nothing even where nobody knows the field. A false may ask for something: its default may be
true."""
MAX_EMPTY = 64
"""Fields of one object that nobody knows, where all that are known are there."""


def _same(value: object, neutral: object) -> bool:
    return type(value) is type(neutral) and value == neutral


def or_neutral(value: object) -> object:
    """Accept a field's old neutral values, which passed before it was supported."""
    return None if any(_same(value, neutral) for neutral in NEUTRAL) else value


def is_empty(value: object) -> bool:
    """Whether a field that nobody knows passes with this value."""
    return any(_same(value, empty) for empty in EMPTY)


def refuse(field: str, reason: str) -> NoReturn:
    """`field` is told relative to the value that is being checked; `reason` is the whole message."""
    raise PydanticCustomError("invalid_value", "{reason}", {"reason": reason, "field": field})


def refuse_unsupported(field: str, reason: str) -> NoReturn:
    raise PydanticCustomError("unsupported_field", "{reason}", {"reason": reason, "field": field})


def refuse_unknown(field: str, name: str, known: Iterable[str]) -> NoReturn:
    """Refuse a field. `field` is where the unknown `name` stands, beside which `known` ones may stand."""
    refuse_unsupported(field, f"Unknown field: '{printable(name)}'{did_you_mean(name, known) or '.'}")


def must(reason: str) -> PydanticCustomError:
    """The value itself is wrong: `Invalid value for 'stop': must have …`."""
    return PydanticCustomError("invalid_value", "{reason}", {"reason": reason})


def _describe_unsupported(schema: dict[str, Any], model: type[Any]) -> None:
    """Add the unsupported and unknown fields to the OpenAPI document, with the values that pass."""
    for name, values in model.UNSUPPORTED.items():
        schema["properties"][name] = {"enum": [*NEUTRAL, *values], "description": "Not supported."}
    schema["additionalProperties"] = {"enum": [*EMPTY]}
    schema["maxProperties"] = model.max_fields()
    if model.RULES:
        schema["allOf"] = list(model.RULES)


class Strict(BaseModel):
    """Checks the names before the values, so that a body of a million strange keys costs one error."""

    model_config = ConfigDict(
        strict=True,
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        json_schema_extra=_describe_unsupported,
    )
    KNOWN: ClassVar[frozenset[str]] = frozenset()
    """The fields' names as clients write them."""
    UNSUPPORTED: ClassVar[Mapping[str, tuple[object, ...]]] = {}
    RULES: ClassVar[tuple[Rule, ...]] = ()
    """Rules between fields, for the OpenAPI document."""

    @classmethod
    def __pydantic_init_subclass__(cls, **options: Any) -> None:
        super().__pydantic_init_subclass__(**options)
        cls.KNOWN = frozenset(field.alias or name for name, field in cls.model_fields.items())

    @classmethod
    def max_fields(cls) -> int:
        return len(cls.model_fields) + len(cls.UNSUPPORTED) + MAX_EMPTY

    @model_validator(mode="before")
    @classmethod
    def _only_what_is_known(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        kept = {}
        for name, value in body.items():
            if name in cls.KNOWN:
                kept[name] = value
            elif name not in cls.UNSUPPORTED:
                if not is_empty(value) or len(body) > cls.max_fields():
                    refuse_unknown(name, name, cls.KNOWN)
            elif not any(_same(value, neutral) for neutral in (*NEUTRAL, *cls.UNSUPPORTED[name])):
                refuse_unsupported(name, f"'{name}' is not supported here with this value; leave it out.")
        return kept
