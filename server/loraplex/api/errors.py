"""Every error of the data plane, and the one place where lower layers' errors become OpenAI's.

The body is always `{"error": {"message", "type", "param", "code"}}`. Lower layers raise `LoraplexError`s with a
`code`; the table here says which HTTP answer a code is. What is not in the table is our own bug: 500, with a
message that tells nothing of the inside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, get_args

from starlette.responses import Response

from loraplex.adapters.errors import LoraplexError, RefusalCode
from loraplex.api.codec import dumps
from loraplex.api.limit_headers import duration, limit_headers, whole_seconds
from loraplex.control.errors import RateLimited
from loraplex.engine.types import EngineError
from loraplex.http.errors import (
    BearerInvalid,
    BodyEncoded,
    BodyTooLarge,
    BodyTooSlow,
    MethodNotAllowed,
    PathUnknown,
    RequestError,
)
from loraplex.http.text import printable

INVALID_REQUEST = "invalid_request_error"

ANSWERS: dict[str, tuple[int, str]] = dict.fromkeys(get_args(RefusalCode), (400, INVALID_REQUEST)) | {
    "invalid_value": (400, INVALID_REQUEST),
    "invalid_cursor": (400, INVALID_REQUEST),
    "unsupported_field": (400, INVALID_REQUEST),
    "context_length_exceeded": (400, INVALID_REQUEST),
    "adapter_not_finite": (400, INVALID_REQUEST),
    "adapter_not_invoked": (400, INVALID_REQUEST),
    "grammar_failed": (400, INVALID_REQUEST),
    "invalid_api_key": (401, "authentication_error"),
    "model_not_allowed": (403, "permission_error"),
    "insufficient_scope": (403, "permission_error"),
    "tenant_suspended": (403, "permission_error"),
    "source_not_allowed": (403, "permission_error"),
    "model_not_found": (404, INVALID_REQUEST),
    "file_not_found": (404, INVALID_REQUEST),
    "batch_not_found": (404, INVALID_REQUEST),
    "source_not_found": (404, INVALID_REQUEST),
    "unknown_url": (404, INVALID_REQUEST),
    "method_not_supported": (405, INVALID_REQUEST),
    "request_timeout": (408, INVALID_REQUEST),
    "request_too_large": (413, INVALID_REQUEST),
    "unsupported_media_type": (415, INVALID_REQUEST),
    "rate_limit_exceeded": (429, "rate_limit_error"),
    "insufficient_quota": (429, "insufficient_quota"),
    "internal_error": (500, "server_error"),
    "server_overloaded": (503, "server_error"),
    "database_unavailable": (503, "server_error"),
    "limits_unavailable": (503, "server_error"),
    "adapter_unavailable": (503, "server_error"),
    "source_unavailable": (503, "server_error"),
    "storage_unavailable": (503, "server_error"),
    "storage_full": (503, "server_error"),
    "numbers_unchecked": (503, "server_error"),
    "engine_restarting": (503, "server_error"),
    "deadline_exceeded": (504, "server_error"),
    "draining": (503, "server_error"),
}
"""HTTP status and `error.type` of each code. There is no 409: OpenAI's clients would retry it."""

NEEDS_RETRY_AFTER = frozenset({429, 503})
POINTLESS_TO_RETRY = frozenset({"insufficient_quota", "deadline_exceeded"})
"""OpenAI's clients would retry these by their status; `x-should-retry: false` stops them."""
INTERNAL_MESSAGE = (
    "The server had an error while processing your request. Please give its x-request-id when you report it."
)


class ApiError(LoraplexError):
    """An error answer. `param` names the field at fault; `retry_after_s` becomes `Retry-After` (429 and 503
    always carry one, except `insufficient_quota`). `is_own`: whether the caller's
    own requests, limits or options led to it; None: yes for 4xx, no for others."""

    def __init__(
        self,
        code: str,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: float | None = None,
        headers: Iterable[tuple[str, str]] = (),
        is_own: bool | None = None,
    ) -> None:
        super().__init__(message)
        self.is_own = is_own
        self.code = code
        self.status, self.type = ANSWERS[code]
        self.param = param
        self.retry_after_s = retry_after_s
        self.extra_headers = tuple(headers)

    @property
    def asks_to_retry(self) -> bool:
        """Whether the answer has a Retry-After header."""
        return self.status in NEEDS_RETRY_AFTER and self.code not in POINTLESS_TO_RETRY

    @property
    def sentence(self) -> str:
        """The message; of a 429 that passes, with the time that Retry-After names, in OpenAI's words."""
        if self.status == 429 and self.asks_to_retry:
            return f"{self.message} Please try again in {duration(self._retry_after_s)}."
        return self.message

    @property
    def _retry_after_s(self) -> int:
        return max(1, whole_seconds(self.retry_after_s or 1))

    def body(self) -> dict[str, Any]:
        error = {"message": self.sentence, "type": self.type, "param": self.param, "code": self.code}
        return {"error": error}

    def headers(self) -> dict[str, str]:
        headers = dict(self.extra_headers)
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        if self.code in POINTLESS_TO_RETRY:
            headers["x-should-retry"] = "false"
        if self.asks_to_retry:
            headers["Retry-After"] = str(self._retry_after_s)
        return headers

    def response(self) -> Response:
        return Response(dumps(self.body()), self.status, self.headers(), "application/json")


@contextmanager
def in_client_terms(client_field: Callable[[str], str]) -> Iterator[None]:
    """Errors that come out of the block name fields as `client_field` does."""
    try:
        yield
    except ApiError as error:
        if error.param is not None and (name := client_field(error.param)) != error.param:
            error.message = error.message.replace(f"'{error.param}'", f"'{name}'")
            error.param = name
        raise


def invalid(param: str | None, message: str, code: str = "invalid_value") -> ApiError:
    """A 400 that names the field at fault."""
    return ApiError(code, message, param=param)


def from_exception(error: BaseException) -> ApiError:
    """The answer for anything that was raised below; an `internal_error` for what nobody foresaw."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError):
        return _from_request(error)
    code = getattr(error, "code", None)
    if not isinstance(error, LoraplexError) or code not in ANSWERS or code == "internal_error":
        return ApiError("internal_error", INTERNAL_MESSAGE)
    return ApiError(
        code,
        error.message,
        param=getattr(error, "param", None) or _default_param(code),
        retry_after_s=getattr(error, "retry_after_s", None),
        headers=limit_headers(error.windows) if isinstance(error, RateLimited) else (),
        is_own=getattr(error, "is_own", None),
    )


def _from_request(error: RequestError) -> ApiError:
    """The ApiError for a refusal of `loraplex.http`."""
    match error:
        case PathUnknown(method=method, path=path):
            where = f"{method} {printable(path, 200)}"
            return ApiError("unknown_url", f"Unknown request URL: {where}. Please check the URL for typos.")
        case MethodNotAllowed(method=method, path=path, allowed=allowed):
            message = f"Not allowed to {method} on {printable(path, 200)}. Allowed: {allowed}."
            return ApiError("method_not_supported", message, headers=(("Allow", allowed),))
        case BearerInvalid(given=given):
            missing = "You didn't provide an API key. Send it as 'Authorization: Bearer lpx_…'."
            wrong = "The Authorization header must be 'Bearer' and one API key."
            return ApiError("invalid_api_key", wrong if given else missing)
        case BodyEncoded():
            return invalid(None, "A compressed body is not supported; send it without Content-Encoding.")
        case BodyTooLarge(max_bytes=max_bytes):
            return ApiError("request_too_large", f"The request's body is larger than {max_bytes} bytes.")
        case BodyTooSlow(silence_s=silence_s, min_bytes_per_s=pace):
            text = (
                f"The request's body did not arrive in time: it may pause for {silence_s:g} seconds, and has to come "
                f"at {pace} bytes a second."
            )
            return ApiError("request_timeout", text, headers=(("Connection", "close"),))
        case _:
            return ApiError("internal_error", INTERNAL_MESSAGE)


def from_engine(error: EngineError | None) -> ApiError:
    """The answer for a terminal event that is an error."""
    if error is None or error.code == "internal_error":
        answer = ApiError("internal_error", INTERNAL_MESSAGE)
        answer.__cause__ = LoraplexError(
            error.message if error is not None else "no reason given"
        )  # for the log
        return answer
    return ApiError(
        error.code,
        error.message,
        param=_default_param(error.code),
        retry_after_s=error.retry_after_s,
        is_own=error.is_own or None,
    )


def _default_param(code: str) -> str | None:
    if code.startswith("source_"):
        return "lora_path"
    return "model" if code in {"model_not_found", "model_not_allowed", "adapter_not_finite"} else None
