"""Usage: sums of what was served."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field, WithJsonSchema

from loraplex.admin.schemas import described
from loraplex.admin.schemas.fields import (
    GivenTime,
    OmittedNull,
    PageQuery,
    PlainText,
    ResponseBody,
    Timestamp,
)
from loraplex.control.usage.columns import GROUPS, Bucket, Group


def _groups(value: str | None) -> str | None:
    names = [] if value is None else value.split(",")
    if len(set(names)) < len(names) or not set(names) <= set(GROUPS):
        raise ValueError(f"some of {', '.join(GROUPS)}, each once, separated by commas")
    return value


class OwnUsageQuery(PageQuery):
    """The period is start ≤ time < end; without `start` the 30 days before `end`, without `end` until now."""

    start: Annotated[GivenTime | None, OmittedNull()] = None
    end: Annotated[GivenTime | None, OmittedNull()] = None
    bucket: Bucket = "day"
    group_by: Annotated[str | None, AfterValidator(_groups), WithJsonSchema(described.GROUP_BY)] = None

    @property
    def groups(self) -> list[Group]:
        given = set((self.group_by or "").split(","))
        return [name for name in GROUPS if name in given]


class UsageQuery(OwnUsageQuery):
    tenant: Annotated[Annotated[PlainText, Field(max_length=63)] | None, OmittedNull()] = None


class UsageSum(ResponseBody):
    """Sums of a group in a bucket that begins at `start`; null where they are not parted by that. `adapter` is
    `(base)` for the base model, whose `version` is null."""

    start: Timestamp | None
    tenant: str | None
    key: str | None
    adapter: str | None
    version: str | None
    status: str | None
    requests: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


class UsagePage(ResponseBody):
    data: list[UsageSum]
    next_cursor: str | None
