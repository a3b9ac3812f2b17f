"""The state of one request to the data plane, for headers, the access log and metrics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from starlette.types import Scope

from loraplex.adapters.admission.chat_files import OwnChat
from loraplex.adapters.ref import AdapterRef
from loraplex.api.deadline import NO_DEADLINE, Deadline
from loraplex.api.errors import ANSWERS
from loraplex.api.outcome import RequestOutcome
from loraplex.control.history.history import History
from loraplex.control.usage.outcome import FAILURES
from loraplex.control.usage.records import BASE
from loraplex.http.context import RequestContext
from loraplex.http.context import context_of as any_context_of
from loraplex.serving.output.formats import NO_FORMATS, OutputFormats

if TYPE_CHECKING:  # it imports OpenTelemetry
    from loraplex.api.tracing.spans import RequestTrace


_ERRORS = FAILURES | {code for code, (status, _) in ANSWERS.items() if status >= 500}
"""Codes of what the server did; the other codes are refusals of a request."""


@dataclass
class DataContext(RequestContext):
    """Accounting and the engine use `internal_id`. `resolved`: `adapter` is known, None for the base model. `trace` is
    None of a request that is not recorded. `formats` are those of the version, once it is known; `own` is what it
    brings for its chats, where that is used; `appends`, what it puts at the end of a prompt that lacks it. Routes that
    count tokens have the three."""

    model: str | None = None
    adapter: AdapterRef | None = None
    resolved: bool = False
    prompt_tokens: int = 0
    completion_tokens: int = 0
    deadline: Deadline = NO_DEADLINE
    max_load_ms: int | None = None
    """How long the client waits for an adapter that is not on the device; None: as long as it takes."""
    trace: RequestTrace | None = None
    is_anthropic: bool = False
    """The answer, an error too, has Anthropic's shape."""
    client_field: Callable[[str], str] = str
    """The client's name for a field of the request that its own became."""
    formats: OutputFormats = NO_FORMATS
    own: OwnChat | None = None
    appends: tuple[int, ...] = ()
    generated: RequestOutcome | None = None
    """How it ended, where the engine was asked."""
    is_counted: bool = False
    """True where a request within it was refused: that one is in the history and in the list of requests."""

    @property
    def tenant_id(self) -> str:
        return (self.principal and self.principal.tenant_id) or ""

    def count_in(self, history: History, status: int | None, *, timed: bool = True) -> None:
        """Count the request, which has ended. `status` is None where its client went before the answer began. Of one
        whose adapter was never known, only a refusal by a limit and a failure count; of one whose caller was never
        known, a failure. Its times count where it is `timed`."""
        failed = (status or 0) >= 500 or self.outcome in _ERRORS
        limited = status == 429
        if not (failed or (self.tenant_id and (self.resolved or limited))):
            return
        adapter, outcome = self.adapter, self.generated
        named = (BASE, 0) if adapter is None else (adapter.name, adapter.version)
        known = named if self.resolved else None
        if outcome is None:
            history.count(self.tenant_id, known, failed=failed, limited=limited)
            return
        usage, first = outcome.usage, outcome.first_token_at
        history.count(
            self.tenant_id,
            known,
            failed=failed,
            limited=limited,
            computed=usage.prompt_tokens - usage.cached_tokens,
            cached=usage.cached_tokens,
            output=usage.completion_tokens,
            first_token_s=first - self.started if timed and first is not None else None,
            gap_s=outcome.gap_s if timed else None,
        )


def context_of(scope: Scope) -> DataContext:
    found = any_context_of(scope)
    assert isinstance(found, DataContext)
    return found
