"""Every error of the admin plane, and the one place where lower layers' errors become HTTP answers.

The body is a problem document (RFC 9457): `type`, `title`, `status`, `detail`, and ours: `code`, `param` (the field
at fault), for a refused adapter `report` and `feature`, and `version` where a version was made. Lower layers raise
`LoraplexError`s with a `code`; the table here says which answer a code is. An error that is not in the table is our own
bug: a 500 that reveals no internals.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, get_args

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.responses import Response

from loraplex.adapters.errors import AdapterRefused, LoraplexError, RefusalCode
from loraplex.adapters.store.files import shown
from loraplex.control.errors import NumbersUnchecked, SameBytesRefused, VersionRejected
from loraplex.http.errors import (
    BearerInvalid,
    BodyEncoded,
    BodyTooLarge,
    BodyTooSlow,
    MethodNotAllowed,
    PathUnknown,
    RequestError,
)
from loraplex.http.text import did_you_mean

MAX_TOLD = 8
"""Findings that one answer tells."""
MEDIA_TYPE = "application/problem+json"

ANSWERS: dict[str, tuple[int, str]] = dict.fromkeys(
    get_args(RefusalCode), (422, "The adapter was refused")
) | {
    "too_large": (413, "The upload is too large"),
    "invalid_value": (400, "A value is not valid"),
    "invalid_json": (400, "The body is not valid JSON"),
    "invalid_multipart": (400, "The upload is not well formed"),
    "unknown_field": (400, "The body has a field that is not known"),
    "unsupported_field": (400, "The version does not do this"),
    "unknown_parameter": (400, "The query has a parameter that is not known"),
    "adapter_not_finite": (400, "The adapter's outputs are no numbers"),
    "adapter_not_invoked": (400, "The adapter's invocation is not there"),
    "invalid_cursor": (400, "The cursor is not valid"),
    "invalid_api_key": (401, "The token or key is not valid"),
    "insufficient_scope": (403, "The key may not do this"),
    "tenant_suspended": (403, "The key's tenant is suspended"),
    "source_not_allowed": (403, "The source may not be read"),
    "not_found": (404, "There is nothing here"),
    "tenant_not_found": (404, "There is no such tenant"),
    "key_not_found": (404, "There is no such key"),
    "adapter_not_found": (404, "There is no such adapter"),
    "version_not_found": (404, "There is no such version"),
    "batch_not_found": (404, "There is no such batch"),
    "release_not_found": (404, "There is no such release"),
    "series_not_found": (404, "There is no such series"),
    "replica_not_found": (404, "There is no such engine"),
    "source_not_found": (404, "The source has no adapter"),
    "method_not_allowed": (405, "The method is not allowed here"),
    "request_timeout": (408, "The body did not arrive in time"),
    "conflict": (409, "This conflicts with what is there"),
    "tenant_id_retired": (409, "The id belonged to a tenant that was deleted"),
    "precondition_failed": (412, "The state is another than the one that If-Match names"),
    "request_too_large": (413, "The body is too large"),
    "unsupported_media_type": (415, "The body is of a type that is not read here"),
    "rate_limit_exceeded": (429, "Too much in a short time"),
    "insufficient_quota": (429, "A budget of tokens is spent"),
    "internal_error": (500, "The server failed"),
    "server_overloaded": (503, "The server has too much to do"),
    "database_unavailable": (503, "The database cannot be reached now"),
    "limits_unavailable": (503, "The limits cannot be read now"),
    "adapter_unavailable": (503, "The adapter cannot be used now"),
    "numbers_unchecked": (503, "The adapter's numbers are not checked yet"),
    "engine_restarting": (503, "The engine is not there now"),
    "draining": (503, "The server is shutting down"),
    "source_unavailable": (503, "The source cannot be read now"),
    "storage_unavailable": (503, "The artifact store's disk fails"),
    "deadline_exceeded": (504, "It was not computed in time"),
    "storage_full": (507, "A disk of the server is full"),
}
"""HTTP status and title of each code."""

INTERNAL_DETAIL = "The server had an error. Please give the answer's x-request-id when you report it."


class Problem(LoraplexError):
    """An error answer. `param` names the field or part at fault; `extra` are further members of the document."""

    def __init__(
        self,
        code: str,
        detail: str,
        *,
        param: str | None = None,
        retry_after_s: float | None = None,
        extra: dict[str, Any] | None = None,
        headers: Iterable[tuple[str, str]] = (),
    ) -> None:
        super().__init__(detail)
        self.code = code
        self.status, self.title = ANSWERS[code]
        self.param = param
        self.retry_after_s = retry_after_s
        self.extra = extra or {}
        self.extra_headers = tuple(headers)

    def body(self) -> dict[str, Any]:
        return {
            "type": f"urn:loraplex:problem:{self.code}",
            "title": self.title,
            "status": self.status,
            "detail": self._detail(),
            "code": self.code,
            **({} if self.param is None else {"param": self.param}),
            **self.extra,
        }

    def _detail(self) -> str:
        if self.status == 429:
            return f"{self.message} Please try again in {self._retry_after}s."
        return self.message

    @property
    def _retry_after(self) -> int:
        return max(1, math.ceil(self.retry_after_s or 1))

    def response(self, *, close: bool = False) -> Response:
        """`close` ends the connection: the rest of the request was not read."""
        headers = dict(self.extra_headers) | ({"Connection": "close"} if close else {})
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        if self.status in (429, 503):
            headers["Retry-After"] = str(self._retry_after)
        content = json.dumps(self.body(), ensure_ascii=False, allow_nan=False, default=str).encode()
        return Response(content, self.status, headers, MEDIA_TYPE)


def from_exception(error: BaseException) -> Problem:
    """The answer for an error of a lower layer; `internal_error` for one that has no entry in ANSWERS."""
    if isinstance(error, Problem):
        return error
    if isinstance(error, RequestError):
        return _from_request(error)
    if isinstance(error, RequestValidationError):
        return from_validation([found | {"loc": found["loc"][1:]} for found in error.errors()])
    code = getattr(error, "code", None)
    if not isinstance(error, LoraplexError) or code not in ANSWERS or code == "internal_error":
        return Problem("internal_error", INTERNAL_DETAIL)
    extra: dict[str, Any] = {}
    if isinstance(error, AdapterRefused):
        extra["report"] = error.report
        if error.feature is not None:
            extra["feature"] = error.feature
    if isinstance(error, VersionRejected | SameBytesRefused | NumbersUnchecked):
        extra["version"] = error.version
    return Problem(
        str(code),
        error.message,
        param=getattr(error, "param", None),
        retry_after_s=getattr(error, "retry_after_s", None),
        extra=extra,
    )


def from_validation(errors: Sequence[Mapping[str, Any]], model: type[BaseModel] | None = None) -> Problem:
    """The answer for the errors that pydantic found in an object of `model`. It does not repeat the input."""
    problems = [_say(found, model) for found in errors[:MAX_TOLD]]
    code, param, _ = problems[0]
    return Problem(code, " ".join(text for _, _, text in problems), param=param)


def _fields_at(model: type[BaseModel], place: Sequence[int | str]) -> Collection[str]:
    """The fields of the object at this place in an object of `model`; none where several kinds may stand there."""
    for name in place:
        if isinstance(name, int):
            continue
        field = model.model_fields.get(name)
        kinds = (
            []
            if field is None
            else [kind for kind in _parts(field.annotation) if hasattr(kind, "model_fields")]
        )
        if len(kinds) != 1:
            return ()
        [model] = kinds
    return model.model_fields


def _parts(annotation: Any) -> Iterator[Any]:
    """An annotation, and all that it is made of."""
    yield annotation
    for part in get_args(annotation):
        yield from _parts(part)


def _say(found: Mapping[str, Any], model: type[BaseModel] | None) -> tuple[str, str, str]:
    """Code, field and sentence of one of pydantic's findings."""
    param = ".".join(str(part) for part in found["loc"])[:120]
    if found["type"] == "json_invalid":  # half of a surrogate pair, which JSON of text cannot hold
        return "invalid_json", param, "The body is not JSON of valid text."
    if found["type"] == "extra_forbidden":
        *place, name = found["loc"]
        meant = "" if model is None else did_you_mean(str(name), _fields_at(model, place))
        return "unknown_field", param, f"There is no field {shown(param)}{meant or '.'}"
    if found["type"] == "missing":
        return "invalid_value", param, f"The field {shown(param)} is missing."
    message = str(found["msg"]).removeprefix("Value error, ")
    return "invalid_value", param, f"{shown(param)}: {message[:200]}."


def _from_request(error: RequestError) -> Problem:
    """The answer for an error of `loraplex.http`."""
    match error:
        case PathUnknown(path=path):
            return Problem("not_found", f"There is nothing at {shown(path, 200)}.")
        case MethodNotAllowed(method=method, path=path, allowed=allowed):
            detail = f"{method} is not allowed on {shown(path, 200)}. Allowed: {allowed}."
            return Problem("method_not_allowed", detail, headers=(("Allow", allowed),))
        case BearerInvalid():
            detail = "Send 'Authorization: Bearer' with the admin token, or with a key that has the scope."
            return Problem("invalid_api_key", detail, param="Authorization")
        case BodyEncoded():
            detail = "Send the body without Content-Encoding."
            return Problem("unsupported_media_type", detail, param="Content-Encoding")
        case BodyTooLarge(max_bytes=max_bytes):
            return Problem("request_too_large", f"The body is larger than {max_bytes} bytes.")
        case BodyTooSlow(silence_s=silence_s, min_bytes_per_s=min_rate):
            detail = (
                f"The body did not arrive in time: it may pause for {silence_s:g} seconds, and must arrive at "
                f"{min_rate} bytes a second or faster."
            )
            return Problem("request_timeout", detail)
        case _:
            return Problem("internal_error", INTERNAL_DETAIL)
