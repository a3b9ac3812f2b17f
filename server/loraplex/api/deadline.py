"""When the whole of a request has to be over, because its client says so."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import anyio
from starlette.types import Scope

from loraplex.api.errors import ApiError
from loraplex.api.millisecond_headers import read_milliseconds

HEADER = "x-loraplex-timeout-ms"


class Deadline:
    """`timeout_ms` after `started`, by this process' monotonic clock; None: never. What is left of it goes to the
    engine with each sequence, and counts there from its arrival, so no clock has to be shared."""

    def __init__(self, started: float, timeout_ms: int | None) -> None:
        self._timeout_ms = timeout_ms
        self._at = None if timeout_ms is None else started + timeout_ms / 1000

    @classmethod
    def of(cls, scope: Scope, started: float) -> Deadline:
        """As the request's headers ask. Raises ApiError (400)."""
        return cls(started, read_milliseconds(scope, HEADER, 1))

    @property
    def left_s(self) -> float | None:
        """Seconds, 0 or less when it has passed; None where there is none."""
        return None if self._at is None else self._at - time.monotonic()

    def check(self) -> None:
        """Raises ApiError (504) where it has passed."""
        if self._at is not None and self._at <= time.monotonic():
            raise self._exceeded()

    @contextmanager
    def enforced(self) -> Iterator[None]:
        """Cancels the block when the deadline passes, and raises ApiError (504) then; the engine's own word that it has
        passed is told the same way."""
        left_s = self.left_s
        try:
            if left_s is None:
                yield
                return
            with anyio.move_on_after(left_s) as scope:
                yield
        except ApiError as error:
            if error.code == "deadline_exceeded":
                raise self._exceeded() from error
            raise
        if scope.cancelled_caught:
            raise self._exceeded()

    def _exceeded(self) -> ApiError:
        message = f"The request was not answered within the {self._timeout_ms} ms that its {HEADER} allows."
        return ApiError("deadline_exceeded", message, is_own=True)


NO_DEADLINE = Deadline(0.0, None)
