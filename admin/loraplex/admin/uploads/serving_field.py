"""The form field `serving` of an upload: how the version's output is to be read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast, get_args

from loraplex.adapters.admission.strict_json import parse_object
from loraplex.adapters.errors import AdapterRefused
from loraplex.adapters.store.files import shown
from loraplex.admin.problem import Problem
from loraplex.control.types import Serving, WithoutInvocation
from loraplex.serving.errors import ServingError
from loraplex.serving.output.formats import ReasoningFormatName, ToolFormatName

FORMATS: dict[str, tuple[str, ...]] = {
    "tool_format": get_args(ToolFormatName),
    "reasoning_format": get_args(ReasoningFormatName),
}
ALORA = ("refuse", *get_args(WithoutInvocation))
CheckFormats = Callable[[str | None, str | None], None]
"""Raises ServingError where the base's template or tokenizer does not keep a format."""


def read_serving(data: bytes) -> Serving:
    """Raises Problem (400). A null is the same as leaving a field out."""
    try:
        value = parse_object(data) if data.strip() else {}
    except ValueError as error:
        detail = f"The part serving must be a JSON object, and cannot be read as one: {error}."
        raise Problem("invalid_value", detail, param="serving") from None
    for name in value:
        if name not in FORMATS and name != "alora":
            raise Problem("unknown_field", f"serving has no field {shown(name)}.", param="serving")
    formats = {name: _choice(name, value.get(name), known) for name, known in FORMATS.items()}
    return Serving(**formats, alora=without_invocation(_choice("alora", value.get("alora"), ALORA)))


def without_invocation(chosen: str | None) -> WithoutInvocation | None:
    """`Serving.alora` of a value of `ALORA`; "refuse" is the same as none."""
    return None if chosen == "refuse" else cast(WithoutInvocation | None, chosen)


def _choice(name: str, value: Any, choices: tuple[str, ...]) -> str | None:
    if value is None or (isinstance(value, str) and value in choices):
        return value
    known = ", ".join(choices)
    raise Problem("invalid_value", f"{name} must be one of {known}.", param=f"serving.{name}")


def check_serving(serving: Serving, check_formats: CheckFormats) -> None:
    """Renders a conversation with a call in the format, and reads it back. Raises AdapterRefused."""
    for name, formats in (
        ("tool_format", (serving.tool_format, None)),
        ("reasoning_format", (None, serving.reasoning_format)),
    ):
        try:
            check_formats(*formats)
        except ServingError as error:
            raise AdapterRefused(
                "unsupported_feature",
                f"This base model cannot be served with the {name} '{formats[0] or formats[1]}': {error.message}.",
                feature=name,
            ) from error
