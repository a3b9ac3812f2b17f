"""The secret that a request carries."""

from __future__ import annotations

import base64
import binascii

from starlette.types import Scope

from loraplex.http.errors import BearerInvalid

MAX_SECRET_CHARS = 512


def bearer_secret(scope: Scope, key_header: str | None = None, *, or_basic: bool = False) -> str:
    """The secret in `Authorization: Bearer …`, or as it is in the header `key_header`. Both may be there with the same
    secret. `or_basic`: it may be the password of `Authorization: Basic …`, for clients that can only be given a URL.
    Raises BearerInvalid."""
    named = None if key_header is None else key_header.encode()
    given = [(name, value) for name, value in scope["headers"] if name in (b"authorization", named)]
    if not given:
        raise BearerInvalid(given=False)
    secrets = {
        _checked(
            _authorization(value, or_basic=or_basic) if name == b"authorization" else value.decode("latin-1")
        )
        for name, value in given
    }
    if len({name for name, _ in given}) < len(given) or len(secrets) > 1:
        raise BearerInvalid(given=True)
    return secrets.pop()


def _authorization(value: bytes, *, or_basic: bool) -> str:
    scheme, _, text = value.decode("latin-1").partition(" ")
    if scheme.lower() == "bearer":
        return text
    if not or_basic or scheme.lower() != "basic" or len(text) > 2 * MAX_SECRET_CHARS:
        raise BearerInvalid(given=True)
    try:
        _, _, password = base64.b64decode(text.strip(), validate=True).decode("latin-1").partition(":")
    except (binascii.Error, ValueError):
        raise BearerInvalid(given=True) from None
    return password


def _checked(text: str) -> str:
    secret = text.strip()
    if not secret.isascii() or not 0 < len(secret) <= MAX_SECRET_CHARS:
        raise BearerInvalid(given=True)
    return secret
