"""From a JSON value to a checked request, or to the first thing that is wrong with it."""

from __future__ import annotations

from typing import TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from loraplex.api.errors import ApiError, invalid

M = TypeVar("M", bound=BaseModel)


def parse_request(schema: type[M], body: object) -> M:
    """Raises ApiError (400) for the first thing that is wrong, naming the field."""
    if not isinstance(body, dict):
        raise invalid(None, "The body must be a JSON object.")
    try:
        return schema.model_validate(body)
    except ValidationError as error:
        raise _first_problem(error) from None


def _first_problem(error: ValidationError) -> ApiError:
    problem = error.errors(include_url=False, include_input=False)[0]
    context = problem.get("ctx", {})
    path = _path(problem)
    if "field" in context:
        field = str(context["field"])
        param = f"{path}{'' if field.startswith('[') or not path else '.'}{field}"
        code = problem["type"] if problem["type"] == "unsupported_field" else "invalid_value"
        return invalid(printable(param), context["reason"], code)
    if problem["type"] == "missing":
        return invalid(path, f"Missing required field: '{path}'.")
    return invalid(path, f"Invalid value for '{path}': {_lower_first(problem['msg'])}.")


def _path(problem: ErrorDetails) -> str:
    path = ""
    for part in problem["loc"]:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else str(part)
    return printable(path)


def printable(text: str, length: int = 128) -> str:
    return "".join(c if c.isprintable() else "?" for c in text[:length])


def _lower_first(text: str) -> str:
    return text[:1].lower() + text[1:]
