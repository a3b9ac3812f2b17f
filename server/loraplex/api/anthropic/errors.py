"""Refusals of the routes below `/v1/messages`, in Anthropic's shape."""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from loraplex.api.codec import dumps
from loraplex.api.errors import ANSWERS, ApiError

PATH = "/v1/messages"
OVERLOADED = 529
TYPES: dict[int, str] = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "request_too_large",
    415: "invalid_request_error",
    429: "rate_limit_error",
    500: "api_error",
    503: "api_error",
    504: "timeout_error",
    OVERLOADED: "overloaded_error",
}
STATUSES: dict[str, tuple[int, str]] = {
    code: (status, TYPES[status])
    for code, status in (
        (code, OVERLOADED if code == "server_overloaded" else status) for code, (status, _) in ANSWERS.items()
    )
}
"""HTTP status and `error.type` of each code."""


def is_anthropic(path: str) -> bool:
    """Whether a path is answered in this shape, also one that no route has."""
    return path == PATH or path.startswith(PATH + "/")


def error_body(error: ApiError, request_id: str) -> dict[str, Any]:
    """The shape has no field for `error.param`, so the message begins with it."""
    message, field = error.sentence, error.param
    if field is not None and f"'{field}'" not in message:
        message = f"{field}: {message}"
    body = {"type": STATUSES[error.code][1], "message": message}
    return {"type": "error", "error": body, "request_id": request_id}


def anthropic_error(error: ApiError, request_id: str) -> Response:
    status = STATUSES[error.code][0]
    return Response(dumps(error_body(error, request_id)), status, error.headers(), "application/json")
