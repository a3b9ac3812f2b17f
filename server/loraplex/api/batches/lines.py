"""One line of a batch, answered as its route answers: the same checks, limits and errors, without a socket."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from starlette.types import ASGIApp, Scope

from loraplex.api.codec import dumps, loads
from loraplex.api.context import DataContext
from loraplex.api.deps import ApiServices
from loraplex.api.errors import from_exception
from loraplex.api.generation.endpoints import GenerationEndpoint
from loraplex.api.generation.kinds import CHAT, COMPLETION, EMBEDDINGS, RESPONSES
from loraplex.api.generation.pooled_kinds import CLASSIFY, RERANK, SCORE
from loraplex.api.generation.tenant_capacity import TenantCapacity
from loraplex.api.in_process import Exchange
from loraplex.control.batches.lines import RequestLine, is_stream, read_line, value_of
from loraplex.control.batches.work import Line, Result, Work
from loraplex.control.errors import TenantSuspended
from loraplex.control.tenancy.key_cache import KeysById
from loraplex.http.text import printable
from loraplex.lifecycle.batches.runner import MAX_LINES, Later

KINDS = (CHAT, COMPLETION, RESPONSES, EMBEDDINGS, *CLASSIFY, *SCORE, *RERANK)
MAX_ID = 512
MOST_TAKES = 20
"""A part that was taken so often without an answer to any line may hold what ends the engine: what ends so then has
failed."""
_LINE_ENDS = [(c.encode(), f"\\u{ord(c):04x}".encode()) for c in "\x85\u2028\u2029"]
"""Characters that JSON may hold as they are, and at which Python's `splitlines` and httpx's `iter_lines` cut lines."""
_RETRIED = frozenset({408, 429, 503})


class _Bad(Exception):
    """The line is no request of its batch."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Lines:
    """Answers lines of all batches of a server."""

    def __init__(self, services: ApiServices) -> None:
        capacity = TenantCapacity(
            max_in_flight=4 * MAX_LINES,
            max_body_bytes=64 * services.max_body,
            max_kept_logprobs=services.max_kept_logprobs,
            threads=1,
        )
        own = replace(
            services,
            authenticator=KeysById(services.database),
            limiter=services.limiter.of_batches(),
            shadows=None,
        )
        self._metrics, self._history = services.metrics, services.history
        self._routes: Mapping[str, ASGIApp] = {
            kind.path: GenerationEndpoint(own, kind, capacity, background=True) for kind in KINDS
        }

    async def answer(self, work: Work, line: Line) -> Result:
        """The line of an output or error file. Raises Later for what is to be tried again."""
        custom_id: str | None = None
        try:
            request = _parsed(line)
            custom_id = _custom_id(request, line)
            if work.expired:
                raise _Bad("batch_expired", "The batch expired before this request was run.")
            body = _body(request, work.endpoint)
        except _Bad as error:
            self._metrics.batches.ended("invalid" if error.code != "batch_expired" else "expired")
            about = {"code": error.code, "message": f"Line {line.number}: {error}", "line": line.number}
            return _result(work, line, custom_id, None, about)
        status, label, answer = await self._ask(work, body)
        failed = status != 200
        self._metrics.batches.ended("failed" if failed else "completed")
        response = {"status_code": status, "request_id": label, "body": answer}
        return _result(work, line, custom_id, response, None)

    async def _ask(self, work: Work, body: bytes) -> tuple[int, str, Any]:
        headers = [
            (b"content-type", b"application/json"),
            (b"authorization", f"Bearer {work.key_id}".encode()),
        ]
        scope: Scope = {"type": "http", "method": "POST", "path": work.endpoint, "headers": headers}
        context = DataContext.of(headers)
        context.attach(scope)
        exchange = Exchange(body)
        try:
            await self._routes[work.endpoint](scope, exchange.receive, exchange.send)
        except Exception as error:
            failure = from_exception(error)
            is_for_now = failure.status in _RETRIED and work.takes < MOST_TAKES
            if is_for_now or isinstance(error, TenantSuspended):
                raise Later(failure.retry_after_s or 1.0) from error
            context.outcome = failure.code
            context.count_in(self._history, failure.status, timed=False)
            return failure.status, context.label, failure.body()
        context.count_in(self._history, exchange.status, timed=False)
        return exchange.status, context.label, loads(bytes(exchange.body))


def _parsed(line: Line) -> RequestLine:
    try:
        return read_line(line.data)
    except ValueError as error:
        raise _Bad("invalid_json_line", f"it is not valid JSON: {error}.") from None
    except TypeError as error:
        raise _Bad("invalid_json_line", f"{error}.") from None


def _custom_id(request: RequestLine, line: Line) -> str:
    found = value_of(request.custom_id)
    if not isinstance(found, str) or not 1 <= len(found) <= MAX_ID:
        raise _Bad("invalid_custom_id", f"'custom_id' has to be a text of 1 to {MAX_ID} characters.")
    if line.repeated:
        raise _Bad("duplicate_custom_id", f"an earlier line has the custom_id '{printable(found, 80)}'.")
    return found


def _body(request: RequestLine, endpoint: str) -> bytes:
    if value_of(request.method) != "POST":
        raise _Bad("invalid_method", "'method' has to be 'POST'.")
    if value_of(request.url) != endpoint:
        raise _Bad("invalid_url", f"'url' has to be '{endpoint}', the endpoint of the batch.")
    body = bytes(request.body)
    try:
        if is_stream(body):
            raise _Bad("invalid_body", "'stream' is not for batches.")
    except (ValueError, TypeError):
        raise _Bad("invalid_body", "'body' has to be an object.") from None
    return body


def _result(work: Work, line: Line, custom_id: str | None, response: Any, error: Any) -> Result:
    name = hashlib.blake2b(f"{work.batch_id}/{line.number}".encode(), digest_size=12).hexdigest()
    written = {"id": f"batch_req_{name}", "custom_id": custom_id, "response": response, "error": error}
    failed = error is not None or response["status_code"] != 200
    data = dumps(written)
    for character, escaped in _LINE_ENDS:
        data = data.replace(character, escaped)
    return Result(line.number, failed, data + b"\n")
