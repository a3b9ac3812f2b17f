"""The class of the data plane's routes: who calls and what the caller may do are asked first."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Annotated, Any

from fastapi import Depends, Request, Security

from loraplex.api.auth import authenticate
from loraplex.api.deps import ApiServices
from loraplex.api.documents import refused
from loraplex.control.types import Principal
from loraplex.http.routing import NO_BODY, OrderedRoute, caller


async def _services(request: Request) -> ApiServices:
    services: ApiServices = request.app.state.services
    return services


Services = Annotated[ApiServices, Depends(_services)]
Caller = Annotated[Principal, Security(caller, scopes=["inference"])]
"""The parameter of a function whose route needs a key that may infer. A route without it is open to all callers."""


class DataRoute(OrderedRoute):
    """A typed function. The first line of its docstring is the summary, `refusals` are the statuses of its errors."""

    def __init__(
        self,
        path: str,
        endpoint: Callable[..., Any],
        *,
        refusals: tuple[int, ...] = (500, 503),
        **options: Any,
    ) -> None:
        summary, _, more = inspect.cleandoc(endpoint.__doc__ or "").partition("\n")
        super().__init__(path, endpoint, **options | {"summary": summary})
        assert self.scopes is None or len(self.scopes) == 1, f"{path}: `asked` looks at one scope"
        self.description = more.strip()
        keyed = () if self.scopes is None else (401, 403)
        self.responses = refused(*sorted({*keyed, *refusals})) | self.responses

    @asynccontextmanager
    async def asked(self, request: Request) -> AsyncIterator[Any]:
        services: ApiServices = request.app.state.services
        assert self.scopes is not None
        await authenticate(request.scope, services.authenticator, scope_needed=self.scopes[0])
        yield NO_BODY
