"""Lists as OpenAI has them: by time, from the object named `after` on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from sqlalchemy import Select, tuple_
from sqlalchemy.orm import Session

from loraplex.control.rules import InvalidCursor

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ListPage(Generic[T]):
    """A part of a list; `has_more`: another one follows it."""

    items: tuple[T, ...]
    has_more: bool


def read_page(
    session: Session,
    query: Select[Any],
    table: Any,
    convert: Callable[[Any], T],
    limit: int,
    after: str | None,
    *,
    newest_first: bool,
) -> ListPage[T]:
    """Rows of `query`, which has columns `id` and `created_at`, ordered by time. Raises InvalidCursor where `after` is
    none of them."""
    key = tuple_(table.created_at, table.id)
    if after is not None:
        last = session.scalars(query.where(table.id == after)).one_or_none()
        if last is None:
            raise InvalidCursor(f"There is nothing in this list with the id '{after[:80]}'.", param="after")
        place = tuple_(last.created_at, last.id)
        query = query.where(key < place if newest_first else key > place)
    order = (table.created_at, table.id)
    query = query.order_by(*(column.desc() if newest_first else column for column in order))
    rows = session.scalars(query.limit(limit + 1)).all()
    return ListPage(tuple(convert(row) for row in rows[:limit]), len(rows) > limit)
