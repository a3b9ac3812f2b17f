"""The secret that a request carries."""

from __future__ import annotations

from starlette.types import Scope

from loraplex.http.errors import BearerInvalid

MAX_SECRET_CHARS = 512


def bearer_secret(scope: Scope, key_header: str | None = None) -> str:
    """The secret in `Authorization: Bearer …`, or as it is in the header `key_header`. Both may be there with the same
    secret. Raises BearerInvalid."""
    named = None if key_header is None else key_header.encode()
    given = [(name, value) for name, value in scope["headers"] if name in (b"authorization", named)]
    if not given:
        raise BearerInvalid(given=False)
    secrets = {_secret(value, bearer=name == b"authorization") for name, value in given}
    if len({name for name, _ in given}) < len(given) or len(secrets) > 1:
        raise BearerInvalid(given=True)
    return secrets.pop()


def _secret(value: bytes, *, bearer: bool) -> str:
    text = value.decode("latin-1")
    if bearer:
        scheme, _, text = text.partition(" ")
        if scheme.lower() != "bearer":
            raise BearerInvalid(given=True)
    secret = text.strip()
    if not secret.isascii() or not 0 < len(secret) <= MAX_SECRET_CHARS:
        raise BearerInvalid(given=True)
    return secret
