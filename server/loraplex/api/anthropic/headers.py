"""Headers of Anthropic's clients. `anthropic-beta` may say anything: what a beta adds to a body shows in its fields."""

from __future__ import annotations

from typing import Literal, get_args

from starlette.datastructures import Headers
from starlette.types import Scope

from loraplex.api.errors import invalid
from loraplex.http.text import printable

KEY_HEADER = "x-api-key"
VERSION_HEADER = "anthropic-version"
ApiVersion = Literal["2023-01-01", "2023-06-01", "2026-10-21"]
VERSIONS: tuple[str, ...] = get_args(ApiVersion)
"""Versions of Anthropic's API; they differ only in features that this server does not have."""


def check_version(scope: Scope) -> None:
    """Raises ApiError (400) for a version that is not known."""
    for given in Headers(scope=scope).getlist(VERSION_HEADER):
        if given not in VERSIONS:
            message = f"'{VERSION_HEADER}' is '{printable(given)}'; known are {', '.join(VERSIONS)}."
            raise invalid(VERSION_HEADER, message)
