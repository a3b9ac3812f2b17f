"""Errors before a route has run. Each plane gives these a status, a code and a sentence of its own."""

from __future__ import annotations

from collections.abc import Sequence

from loraplex.adapters.errors import LoraplexError


class ClientGone(Exception):
    """The client closed its connection: no answer can be sent."""


class RequestError(LoraplexError):
    """The root of the errors below."""


class PathUnknown(RequestError):
    """No route has this path."""

    def __init__(self, method: str, path: str) -> None:
        super().__init__(f"no route for {method} {path}")
        self.method, self.path = method, path


class MethodNotAllowed(RequestError):
    """The path has routes, but none for this method. `allowed` are the methods that it has, sorted."""

    def __init__(self, method: str, path: str, allowed: Sequence[str]) -> None:
        super().__init__(f"{method} is not allowed on {path}")
        self.method, self.path, self.allowed = method, path, ", ".join(allowed)


class BearerInvalid(RequestError):
    """There is no Authorization header, or (`given`) it is not `Bearer` and one secret."""

    def __init__(self, *, given: bool) -> None:
        super().__init__("the Authorization header is missing or not valid")
        self.given = given


class BodyEncoded(RequestError):
    """The body is compressed: it would have to be unpacked before it can be counted."""

    def __init__(self) -> None:
        super().__init__("the body has a Content-Encoding")


class BodyTooLarge(RequestError):
    """The body has more than `max_bytes` bytes."""

    def __init__(self, max_bytes: int) -> None:
        super().__init__(f"the body is larger than {max_bytes} bytes")
        self.max_bytes = max_bytes


class BodyTooSlow(RequestError):
    """Nothing of the body came for `silence_s` seconds, or it is that late at `min_bytes_per_s`."""

    def __init__(self, silence_s: float, min_bytes_per_s: int) -> None:
        super().__init__(f"the body paused for {silence_s:g} seconds or came too slowly")
        self.silence_s, self.min_bytes_per_s = silence_s, min_bytes_per_s
