"""Headers of a request that are a number of milliseconds."""

from __future__ import annotations

from starlette.types import Scope

from loraplex.api.errors import ApiError, invalid

MAX_MS = 24 * 3600 * 1000
MAX_LOAD_HEADER = "x-loraplex-max-load-ms"


def read_milliseconds(scope: Scope, header: str, least: int) -> int | None:
    """A whole number from `least` to MAX_MS; None where the header is not given. Raises ApiError (400)."""
    given = [value for name, value in scope["headers"] if name == header.encode()]
    if not given:
        return None
    digits = given[0].strip()
    # As many digits as the largest has, so that no number is too long to be read.
    if len(given) > 1 or not digits.isdigit() or len(digits) > len(str(MAX_MS)):
        raise _not_milliseconds(header, least)
    milliseconds = int(digits)
    if not least <= milliseconds <= MAX_MS:
        raise _not_milliseconds(header, least)
    return milliseconds


def _not_milliseconds(header: str, least: int) -> ApiError:
    return invalid(
        header, f"'{header}' is a whole number of milliseconds from {least} to {MAX_MS}, given once."
    )
