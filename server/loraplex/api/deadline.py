"""When the whole of a request has to be over, because its client says so."""

from __future__ import annotations

import time
from types import TracebackType

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
        """The deadline that the request's headers set. Raises ApiError (400)."""
        return cls(started, read_milliseconds(scope, HEADER, 1))

    @property
    def left_s(self) -> float | None:
        """Seconds, 0 or less when it has passed; None where there is none."""
        return None if self._at is None else self._at - time.monotonic()

    def check(self) -> None:
        """Raises ApiError (504) where it has passed."""
        if self._at is not None and self._at <= time.monotonic():
            raise self.exceeded()

    def enforced(self) -> EnforcedDeadline:
        """Cancels the block when the deadline passes, and raises ApiError (504) then; the engine's own word that it has
        passed is told the same way."""
        return EnforcedDeadline(self)

    def exceeded(self) -> ApiError:
        message = f"The request was not answered within the {self._timeout_ms} ms that its {HEADER} allows."
        return ApiError("deadline_exceeded", message, is_own=True)


class EnforcedDeadline:
    """The context of `Deadline.enforced`. A class: one is entered for each token of a stream, and a generator's context
    takes five times as long."""

    __slots__ = ("_deadline", "_scope")

    def __init__(self, deadline: Deadline) -> None:
        self._deadline = deadline
        left_s = deadline.left_s
        self._scope = None if left_s is None else anyio.move_on_after(left_s)

    def __enter__(self) -> None:
        if self._scope is not None:
            self._scope.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        cancelled = self._scope is not None and bool(self._scope.__exit__(kind, error, trace))
        if self._scope is not None and self._scope.cancelled_caught:
            raise self._deadline.exceeded() from None
        if isinstance(error, ApiError) and error.code == "deadline_exceeded":
            raise self._deadline.exceeded() from error
        return cancelled


NO_DEADLINE = Deadline(0.0, None)
