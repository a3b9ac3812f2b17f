"""Values that are one of several kinds. A kind is chosen by the value, so that an error is of that kind alone."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

from pydantic import Discriminator, Tag

from loraplex.api.openai.strict import must, refuse, refuse_unsupported
from loraplex.http.text import printable


def kind(name: str) -> Tag:
    """Marks a member of a union. `loraplex.api.openai.parsing` leaves it out of a field's name."""
    return Tag(f"<{name}>")


def by_type(default: str | None = None, field: str = "type") -> Discriminator:
    """A discriminator by the object's `type`, or another field; an object without one is a `default`."""

    def choose(value: Any) -> str | None:
        get = value.get if isinstance(value, dict) else partial(getattr, value)
        return f"<{get(field, default)}>"

    return Discriminator(choose)


def text_or(other: str) -> Discriminator:
    """Return `<text>` for a string, the kind `other` for anything else."""
    return Discriminator(lambda value: "<text>" if isinstance(value, str) else f"<{other}>")


def text_or_object(default: str | None = None) -> Discriminator:
    """Return `<text>` for a string, else by the object's `type`."""
    objects = by_type(default).discriminator
    assert callable(objects)
    return Discriminator(lambda value: "<text>" if isinstance(value, str) else objects(value))


def of_kinds(
    what: str,
    kinds: Collection[str],
    default: str | None = None,
    *,
    field: str = "type",
    or_text: bool = False,
) -> Callable[[Any], Any]:
    """A BeforeValidator of the union: it refuses non-objects, and a `type` that is not among `kinds`. `what` is
    what the objects are called, in the plural."""

    def check(value: Any) -> Any:
        if or_text and isinstance(value, str):
            return value
        if not isinstance(value, dict):
            raise must("must be an object" + (" or a string" if or_text else ""))
        named = value.get(field, default)
        if not isinstance(named, str):
            refuse(field, f"Each of these {what} must have a '{field}'.")
        if named not in kinds:
            refuse_unsupported(
                field, f"{what.capitalize()} of the {field} '{printable(named)}' are not supported."
            )
        return value

    return check
