"""Base classes and field types that the models share."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    PlainSerializer,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from loraplex.admin.schemas import described
from loraplex.control.rules import DEFAULT_PAGE, MAX_PAGE, is_plain_text

_BIGGEST = 2**53 - 1  # what every JSON reader holds exactly


def _rfc3339(value: datetime) -> str:
    aware = value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)
    return aware.isoformat(timespec="milliseconds" if aware.microsecond else "seconds").replace("+00:00", "Z")


def _with_zone(value: datetime) -> datetime:
    if value.tzinfo is None:
        raise ValueError("a time needs its zone, for example 2030-01-31T00:00:00Z")
    try:
        return value.astimezone(UTC)
    except OverflowError:
        raise ValueError("a time must lie in the years 1 to 9999 in UTC too") from None


def _plain_text(value: str) -> str:
    if not is_plain_text(value):
        raise ValueError("control characters are not allowed")
    return value


class OmittedNull:
    """Marks a query parameter that is None when it is left out: a query cannot say null, so its schema does not."""

    def __get_pydantic_json_schema__(
        self, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        schema = handler(core_schema)
        kinds: list[JsonSchemaValue] = schema.get("anyOf", [schema])
        return next(kind for kind in kinds if kind != {"type": "null"})


Timestamp = Annotated[datetime, PlainSerializer(_rfc3339, return_type=str)]
GivenTime = Annotated[datetime, AfterValidator(_with_zone)]
PlainText = Annotated[
    str, AfterValidator(_plain_text), Field(json_schema_extra={"pattern": described.PLAIN_TEXT})
]
Label = Annotated[PlainText, Field(max_length=200)]
PositiveCount = Annotated[int, Field(ge=1, le=_BIGGEST)]
VersionName = Annotated[str, Field(pattern=described.VERSION)]


class RequestBody(BaseModel):
    """A body that a client sends."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class QueryParameters(BaseModel):
    """The query of a request."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class ResponseBody(BaseModel):
    """A body that the server sends."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @classmethod
    def of(cls, value: object) -> Self:
        """The body that shows `value`: its attributes of the fields' names, and theirs in turn."""
        return cls.model_validate(value, from_attributes=True)


class PageQuery(QueryParameters):
    limit: Annotated[int, Field(ge=1, le=MAX_PAGE)] = DEFAULT_PAGE
    cursor: Annotated[
        Annotated[str, Field(max_length=512, json_schema_extra=described.CURSOR)] | None, OmittedNull()
    ] = None
