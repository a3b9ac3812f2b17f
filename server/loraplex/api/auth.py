"""The caller of a request, by its key."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.types import Scope

from loraplex.api.context import context_of
from loraplex.api.errors import ApiError
from loraplex.control.audit.recorder import Actor
from loraplex.control.types import Principal
from loraplex.http.bearer import bearer_secret

if TYPE_CHECKING:
    from loraplex.api.deps import Authenticator


async def authenticate(
    scope: Scope,
    authenticator: Authenticator,
    key_header: str | None = None,
    *,
    scope_needed: str = "inference",
) -> Principal:
    """The caller, who has the scope that is needed. `key_header` is a header that may hold the key instead of
    Authorization. Raises BearerInvalid, ApiError (403) and what the authenticator raises."""
    principal = await authenticator.authenticate(bearer_secret(scope, key_header, or_basic=True))
    context_of(scope).principal = principal
    if principal.is_admin or principal.tenant_id is None:
        raise ApiError("insufficient_scope", "The admin token cannot be used here; use a key of a tenant.")
    if scope_needed not in principal.scopes:
        raise ApiError("insufficient_scope", f"This API key lacks the scope '{scope_needed}'.")
    return principal


def actor_of(request: Request, principal: Principal) -> Actor:
    """The caller as the audit log names it."""
    source = None if request.client is None else request.client.host
    label = context_of(request.scope).label
    return Actor("key", principal.tenant_id, principal.key_id, source, label, principal.scopes)
