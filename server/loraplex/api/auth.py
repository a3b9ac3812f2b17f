"""Who is calling: the bearer key of a request."""

from __future__ import annotations

from starlette.types import Scope

from loraplex.api.context import context_of
from loraplex.api.deps import Authenticator
from loraplex.api.errors import ApiError
from loraplex.control.types import Principal

MAX_KEY_LENGTH = 512


def bearer_secret(scope: Scope) -> str:
    """The key in `Authorization: Bearer …`. Raises ApiError (401)."""
    given: list[bytes] = [value for name, value in scope["headers"] if name == b"authorization"]
    if not given:
        raise ApiError(
            "invalid_api_key", "You didn't provide an API key. Send it as 'Authorization: Bearer lpx_…'."
        )
    scheme, _, secret = given[0].decode("latin-1").partition(" ")
    secret = secret.strip()
    if (
        len(given) > 1
        or scheme.lower() != "bearer"
        or not secret.isascii()
        or not 0 < len(secret) <= MAX_KEY_LENGTH
    ):
        raise ApiError("invalid_api_key", "The Authorization header must be 'Bearer' and one API key.")
    return secret


async def authenticate(scope: Scope, authenticator: Authenticator) -> Principal:
    """The caller, who may infer. Raises ApiError (401, 403) and what the authenticator raises."""
    principal = await authenticator.authenticate(bearer_secret(scope))
    context_of(scope).principal = principal
    if principal.is_admin or principal.tenant_id is None:
        raise ApiError("insufficient_scope", "The admin token cannot be used here; use a key of a tenant.")
    if "inference" not in principal.scopes:
        raise ApiError("insufficient_scope", "This API key lacks the scope 'inference'.")
    return principal
