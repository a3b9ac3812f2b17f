"""The parts of the data plane. The factory fills one `ApiServices`; nothing else is global."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from loraplex.adapters.admission.chat_files import OwnChat
from loraplex.api.drain import Drain
from loraplex.api.metrics import Metrics
from loraplex.control.audit.recorder import Actor
from loraplex.control.batches.batches import Batches
from loraplex.control.batches.files import Files
from loraplex.control.catalog.resolver import Resolver
from loraplex.control.db.database import Database
from loraplex.control.db.outage import DatabaseHealth
from loraplex.control.history.history import History
from loraplex.control.limits.service import RequestLimits
from loraplex.control.recent_requests import RecentRequests
from loraplex.control.types import (
    Principal,
    ResolvedModel,
    VersionInfo,
)
from loraplex.control.usage.journal import UsageJournal
from loraplex.control.usage.running_arms import RunningArms
from loraplex.engine.types import EngineRequest
from loraplex.http.edge import AccessLog, access_log
from loraplex.serving.engines.engines import Engines
from loraplex.serving.grammar.checker import GrammarChecker
from loraplex.serving.output.formats import NO_FORMATS, OutputFormats
from loraplex.serving.templates.messages import Encoded, RenderJob
from loraplex.serving.text.processor import TextProcessor

if TYPE_CHECKING:  # it imports OpenTelemetry
    from loraplex.api.tracing.spans import RequestTracing


class Authenticator(Protocol):
    """Callers by their keys."""

    async def authenticate(self, secret: str) -> Principal:
        """Raises InvalidKey, TenantSuspended, DatabaseUnavailable, DatabaseBusy."""
        ...


class OwnChats(Protocol):
    """Chat templates that versions bring, and their use."""

    async def of(self, model: ResolvedModel) -> OwnChat | None:
        """None of the base model, and of a version that brings nothing. Raises what reading the database does."""
        ...

    async def encode(self, tenant: str, conversation: RenderJob) -> Encoded:
        """Raises TemplateError, TextTooLong, TemplateTimeSpent, TemplatesUnavailable."""
        ...


class RuntimeAdapters(Protocol):
    """Loading of adapters through the data plane. `by` is a tenant's key."""

    async def load(self, by: Actor, name: str, path: str) -> VersionInfo:
        """Raises AdapterRefused, InvalidValue, errors with the codes `source_not_allowed`, `source_not_found`,
        `source_unavailable`; TenantNotFound, AdapterNotFound and VersionNotFound where it is deleted meanwhile."""
        ...

    async def unload(self, by: Actor, name: str) -> None:
        """Raises AdapterNotFound."""
        ...


class ShadowSamples(Protocol):
    """Takes requests that a release's shadow version may answer too."""

    def offer(
        self,
        request_id: str,
        model: ResolvedModel,
        answer: tuple[EngineRequest, tuple[int, ...]] | None,
        stops: Sequence[str],
    ) -> None:
        """The request came to its proper end. `answer` is `Generation.only_answer`, `stops` its stop strings."""
        ...


@dataclass(frozen=True)
class ApiServices:
    """`max_model_len` in tokens, `max_body` in bytes, times in seconds. `stall_timeout`: a client that reads
    nothing for so long is cut, and one that sends nothing of its body for so long is answered 408.
    `max_kept_logprobs`: in all answers together that are sent when they are whole; some 80 bytes of JSON each.
    `formats` are the base model's. `text_build` is of `loraplex.serving.text.text_build`. `own_chats` None: every chat
    is rendered by the base's template, and ends as the base's do. `shadows` None: no shadow version runs."""

    engine: Engines
    text: TextProcessor
    grammars: GrammarChecker
    authenticator: Authenticator
    resolver: Resolver
    limiter: RequestLimits
    ledger: UsageJournal
    adapters: RuntimeAdapters
    database: Database
    files: Files
    batches: Batches
    metrics: Metrics
    drain: Drain
    served_model_name: str
    max_model_len: int
    default_max_tokens: int = 256
    max_kept_logprobs: int = 1 << 22
    max_body: int = 4 << 20
    stall_timeout: float = 30.0
    tokenizer_threads: int = 4
    cors_origins: tuple[str, ...] = ()
    metrics_on_data_port: bool = False
    database_health: DatabaseHealth | None = None
    usage_failure: Callable[[], str | None] = lambda: None
    limits_warning: Callable[[], str | None] = lambda: None
    access_log: AccessLog = field(default_factory=access_log)
    tracing: RequestTracing | None = None
    formats: OutputFormats = NO_FORMATS
    text_build: str = ""
    own_chats: OwnChats | None = None
    running_arms: RunningArms = field(default_factory=RunningArms)
    shadows: ShadowSamples | None = None
    history: History = field(default_factory=History)
    recent: RecentRequests = field(default_factory=RecentRequests)
