"""The ASGI application around the operations: routing, authorisation, strict queries and bodies, problem documents."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

import structlog
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from loraplex.adapters.errors import LoraplexError
from loraplex.adapters.files import shown
from loraplex.adapters.strict_json import parse_object
from loraplex.admin.body import WatchedReceive, read_body
from loraplex.admin.operation import Answer, Call, Operation, actor_of
from loraplex.admin.pace import Pace
from loraplex.admin.problem import ClientGone, Problem, from_exception
from loraplex.control.audit import Actor
from loraplex.control.errors import DatabaseBusy, DatabaseUnavailable, TenantNotFound
from loraplex.control.types import Principal

PRINCIPAL = "loraplex.principal"
"""Where a request's scope says who called, for the access log."""
REFUSAL = "loraplex.refusal"
"""Where it says the code and the field (or None) of a problem, for the access log."""
MAX_JSON_BYTES = 256 << 10
MAX_BEARER_CHARS = 512
MAX_NAME_CHARS = 256
Authenticate = Callable[[str], Awaitable[Principal]]
NoteRefusal = Callable[[Actor, Operation, Mapping[str, str], Problem], Awaitable[None]]
"""Told of each call that somebody with a valid secret made in vain of what changes something: who, what, the path's
parameters, the answer. Raises LoraplexError where it cannot be kept."""

log = structlog.get_logger("loraplex.admin")


class Plane:
    """Answers every HTTP request below it, whatever the operations do: what they raise becomes a problem document,
    what nobody foresaw a 500 that is logged and tells nothing of the inside."""

    def __init__(
        self,
        operations: Sequence[Operation],
        authenticate: Authenticate,
        prefix: str = "",
        extra: Iterable[BaseRoute] = (),
        *,
        note_refusal: NoteRefusal,
        pace: Pace,
    ) -> None:
        self._authenticate = authenticate
        self._pace = pace
        self._note_refusal = note_refusal
        by_path: dict[str, list[Operation]] = {}
        for operation in operations:
            by_path.setdefault(operation.path, []).append(operation)
        routes = [Route(prefix + path, _PathEndpoint(self, rows)) for path, rows in by_path.items()]
        self._router: ASGIApp = Router([*routes, *extra], redirect_slashes=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._router(scope, receive, send)
            return
        scope["app"] = self  # so that the router raises instead of answering in plain text
        started = False
        body = WatchedReceive(scope, receive)

        async def noting_send(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            if not scope["path"].isprintable():  # starlette's patterns pass over a line feed at the end
                raise HTTPException(404)
            await self._router(scope, body, noting_send)
        except ClientGone:
            return
        except HTTPException as error:
            problem = _from_framework(scope, error)
        except Exception as error:
            problem = from_exception(error)
            if problem.status == 500:
                log.error("request_failed", method=scope["method"], path=scope["path"][:256], exc_info=error)
            elif problem.code in ("storage_full", "storage_unavailable"):
                log.error(problem.code, path=scope["path"][:256], reason=problem.message)
        else:
            return
        scope[REFUSAL] = (problem.code, problem.param)
        if started:
            raise RuntimeError("an answer broke after it had begun")
        if problem.code != "request_timeout":
            await body.discard_rest()
        await problem.response(close=not body.complete)(scope, receive, noting_send)

    async def run(self, operation: Operation, request: Request) -> Response:
        """Everything in the order in which a stranger may learn of it: who, whether, then what is wrong."""
        principal = await self._authenticate(_bearer(request))
        request.scope[PRINCIPAL] = principal
        _check_path(request)
        if operation.action is not None and principal.tenant_id is not None:
            self._pace.take(principal.tenant_id)
        try:
            _authorise(principal, operation, request.path_params.get("tenant"))
            query = _read_query(operation, request)
            body = None if operation.upload else await _read_json(operation, request)
            answer = await operation.handler(Call(request, principal, request.path_params, query, body))
        except Exception as error:
            if operation.action is not None and not isinstance(error, _NOT_NOTED):
                await self._note(actor_of(request, principal), operation, request, from_exception(error))
            raise
        return _respond(answer)

    async def _note(self, by: Actor, operation: Operation, request: Request, problem: Problem) -> None:
        """A refusal that cannot be recorded is a refusal all the same."""
        try:
            await self._note_refusal(by, operation, request.path_params, problem)
        except LoraplexError as error:
            log.warning("refusal_not_audited", action=operation.action, reason=error.message)


_NOT_NOTED = (ClientGone, DatabaseUnavailable, DatabaseBusy)
"""Nobody is left to be refused; or a row would be one more thing that the database cannot take now."""


class _PathEndpoint:
    """The operations of one path, by method. An ASGI app rather than a function, so that the router passes every
    method on."""

    def __init__(self, plane: Plane, operations: list[Operation]) -> None:
        self._plane = plane
        self._by_method: dict[str, Operation] = {operation.method: operation for operation in operations}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        operation = self._by_method.get(method)
        if operation is None:
            raise HTTPException(405, headers={"Allow": ", ".join(sorted(self._by_method))})
        response = await self._plane.run(operation, request)
        await response(scope, receive, send)


def _bearer(request: Request) -> str:
    given = request.headers.getlist("authorization")
    scheme, _, secret = (given[0] if len(given) == 1 else "").partition(" ")
    secret = secret.strip()
    if scheme.lower() != "bearer" or not secret or len(secret) > MAX_BEARER_CHARS:
        raise Problem(
            "invalid_api_key",
            "Send 'Authorization: Bearer' with the admin token, or with a key that has the scope.",
            param="Authorization",
        )
    return secret


def _authorise(principal: Principal, operation: Operation, tenant: str | None) -> None:
    if principal.is_admin:
        return
    if tenant is not None and tenant != principal.tenant_id:
        # The same words as for a tenant that does not exist: ids of others are nobody's business.
        raise TenantNotFound(f"There is no tenant '{tenant[:80]}'.")
    if operation.access == "operator":
        raise Problem("insufficient_scope", "Only the admin token may do this.")
    if operation.access not in principal.scopes:
        raise Problem("insufficient_scope", f"This key lacks the scope {operation.access}.")


def _check_path(request: Request) -> None:
    """Names that nothing can have are answered here; databases differ in what text they take."""
    for value in request.path_params.values():
        if len(value) > MAX_NAME_CHARS or not value.isprintable():
            raise Problem("not_found", f"There is nothing at {shown(request.url.path, 200)}.")


def _read_query(operation: Operation, request: Request) -> BaseModel | None:
    given = request.query_params.multi_items()
    known = operation.query.model_fields if operation.query is not None else {}
    seen: set[str] = set()
    for name, _ in given:
        if name not in known:
            allowed = f"Known here: {', '.join(known)}." if known else "None is known here."
            raise Problem(
                "unknown_parameter", f"There is no query parameter {shown(name)}. {allowed}", param=name[:80]
            )
        if name in seen:
            raise Problem("invalid_value", f"The query parameter {name} comes twice.", param=name)
        seen.add(name)
    if operation.query is None:
        return None
    model = operation.query
    return _validated(lambda: model.model_validate(dict(given)))


async def _read_json(operation: Operation, request: Request) -> BaseModel | None:
    raw = await read_body(request, max_bytes=MAX_JSON_BYTES)
    model = operation.body
    if model is None:
        if raw.strip() not in (b"", b"{}"):
            raise Problem("invalid_value", "This request takes no body.")
        return None
    if not raw and operation.body_optional:
        return _validated(lambda: model.model_validate({}))
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise Problem("unsupported_media_type", "Send the body as application/json.", param="Content-Type")
    try:
        parse_object(raw)
    except ValueError as error:
        raise Problem("invalid_json", f"The body is not a JSON object that can be read: {error}.") from None
    # From the text: strict values, but times may be strings, as JSON has no other.
    return _validated(lambda: model.model_validate_json(raw, strict=True))


def _validated(read: Callable[[], BaseModel]) -> BaseModel:
    try:
        return read()
    except ValidationError as error:
        problems = [_say(problem) for problem in error.errors(include_url=False, include_context=False)]
        code, param, _ = problems[0]
        raise Problem(code, " ".join(text for _, _, text in problems[:8]), param=param) from None


def _say(problem: Any) -> tuple[str, str, str]:
    """Code, field and sentence of one of pydantic's findings. What was sent is not repeated."""
    param = ".".join(str(part) for part in problem["loc"])[:120]
    if problem["type"] == "extra_forbidden":
        return "unknown_field", param, f"There is no field {shown(param)}."
    if problem["type"] == "missing":
        return "invalid_value", param, f"The field {shown(param)} is missing."
    message = str(problem["msg"]).removeprefix("Value error, ")
    return "invalid_value", param, f"{shown(param)}: {message[:200]}."


def _respond(answer: Answer) -> Response:
    if answer.response is not None:
        return answer.response
    headers = dict(answer.headers or {}) | {"Cache-Control": "no-store"}
    if answer.text is not None:
        return Response(answer.text, answer.status, headers, answer.media_type)
    if answer.content is None:
        return Response(None, answer.status, headers)
    return Response(answer.content.model_dump_json().encode(), answer.status, headers, "application/json")


def _from_framework(scope: Scope, error: HTTPException) -> Problem:
    path = shown(scope["path"], 200)
    if error.status_code == 405:
        allow = (error.headers or {}).get("Allow", "")
        return Problem(
            "method_not_allowed",
            f"{scope['method']} is not allowed on {path}. Allowed: {allow}.",
            headers=(("Allow", allow),),
        )
    return Problem("not_found", f"There is nothing at {path}.")
