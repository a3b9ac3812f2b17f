"""From a JSON value to a checked request, or to the first thing that is wrong with it."""

from __future__ import annotations

from typing import TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from loraplex.api.errors import ApiError, invalid
from loraplex.http.text import printable

M = TypeVar("M", bound=BaseModel)


def parse_request(schema: type[M], body: object) -> M:
    """Raises ApiError (400) for the first thing that is wrong, naming the field."""
    if not isinstance(body, dict):
        raise invalid(None, "The body must be a JSON object.")
    try:
        return schema.model_validate(body)
    except ValidationError as error:
        raise invalid_for(error.errors(include_url=False, include_input=False)[0]) from None


def invalid_for(problem: ErrorDetails) -> ApiError:
    """The 400 for what pydantic found wrong."""
    context = problem.get("ctx", {})
    path = _path(problem)
    if "field" in context:
        field = str(context["field"])
        param = f"{path}{'' if not field or field.startswith('[') or not path else '.'}{field}"
        code = problem["type"] if problem["type"] == "unsupported_field" else "invalid_value"
        return invalid(printable(param), context["reason"], code)
    if problem["type"] == "missing":
        return invalid(path, f"Missing required field: '{path}'.")
    return invalid(path, f"Invalid value for '{path}': {_lower_first(problem['msg'])}.")


def _path(problem: ErrorDetails) -> str:
    path = ""
    for part in problem["loc"]:
        if isinstance(part, str) and part.startswith("<"):
            continue  # a kind of a union (`loraplex.api.openai.unions`), which clients do not know
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else str(part)
    return printable(path)


def _lower_first(text: str) -> str:
    return text[:1].lower() + text[1:]
