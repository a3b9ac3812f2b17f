"""The parts of the data plane. The factory fills one `ApiServices`; nothing else is global."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from loraplex.adapters.admission.chat_files import OwnChat
from loraplex.api.drain import Drain
from loraplex.api.metrics import Metrics
from loraplex.control.audit.recorder import Actor
from loraplex.control.db.outage import DatabaseHealth
from loraplex.control.types import (
    Admission,
    ModelCard,
    Principal,
    Reservation,
    ResolvedModel,
    VersionInfo,
)
from loraplex.control.usage.records import Accepted, Ended
from loraplex.control.usage.running_arms import RunningArms
from loraplex.engine.types import EngineRequest
from loraplex.http.edge import AccessLog, access_log
from loraplex.serving.client.cluster_view import ClusterClient
from loraplex.serving.output.formats import NO_FORMATS, Notation, OutputFormats, ReasoningFormat, ToolFormat
from loraplex.serving.templates.messages import Conversation, Encoded
from loraplex.serving.text.detokenize import TextStream
from loraplex.serving.text.processor import Spelling, TokenText

if TYPE_CHECKING:  # it imports OpenTelemetry
    from loraplex.api.tracing.spans import RequestTracing


class Text(Protocol):
    """The part of `TextProcessor` that the data plane uses. `encode`, `encode_chat`, `spell` and `names` run in worker
    threads."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...
    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        tool_format: ToolFormat | None = None,
        effort: str | None = None,
    ) -> list[int]: ...
    def knows_effort(self, *, with_tools: bool) -> bool: ...
    def notation(self, tool_format: ToolFormat) -> Notation: ...
    def control_id(self, text: str) -> int | None: ...
    def opens_reasoning(self, prompt_ids: Sequence[int], reasoning: ReasoningFormat) -> bool: ...
    def spell(self, token_ids: Sequence[int], written: str | None = None) -> Spelling: ...
    def token(self, token_id: int) -> TokenText: ...
    def names(self, token_ids: Sequence[int]) -> list[str]: ...
    def stream(
        self,
        stops: Sequence[str] = (),
        *,
        min_tokens: int = 0,
        continues: bool = False,
        by_token: bool = False,
        shown: Collection[str] = (),
    ) -> TextStream: ...


class Grammars(Protocol):
    """The part of `GrammarChecker` that the data plane uses. Both raise GrammarRefused, GrammarTimeSpent and
    GrammarsUnavailable."""

    async def check(self, tenant: str, text: str) -> None: ...
    async def lark_of_gbnf(self, tenant: str, text: str) -> str: ...


class OwnChats(Protocol):
    """Chat templates that versions bring, and their use."""

    async def of(self, model: ResolvedModel) -> OwnChat | None:
        """None of the base model, and of a version that brings nothing. Raises what reading the database does."""
        ...

    async def encode(self, tenant: str, conversation: Conversation) -> Encoded:
        """Raises TemplateError, TextTooLong, TemplateTimeSpent, TemplatesUnavailable."""
        ...


class Authenticator(Protocol):
    async def authenticate(self, secret: str) -> Principal:
        """Raises an error with the code `invalid_api_key`."""
        ...


class Resolver(Protocol):
    async def resolve(self, principal: Principal, model: str, *, user: str | None = None) -> ResolvedModel:
        """`user` is the request's own label of its end user. Raises errors with the codes `model_not_found`,
        `model_not_allowed` and `adapter_unavailable`."""
        ...

    async def list_models(self, principal: Principal) -> Sequence[ModelCard]: ...


class RuntimeAdapters(Protocol):
    """Loading of adapters through the data plane. `by` is a tenant's key."""

    async def load(self, by: Actor, name: str, path: str) -> VersionInfo:
        """Raises AdapterRefused, InvalidValue, errors with the codes `source_not_allowed`, `source_not_found`,
        `source_unavailable`; TenantNotFound, AdapterNotFound and VersionNotFound where it is deleted meanwhile."""
        ...

    async def unload(self, by: Actor, name: str) -> None:
        """Raises AdapterNotFound."""
        ...


class Limiter(Protocol):
    async def admit(self, request_id: str, principal: Principal) -> Admission:
        """Takes one request from all request rates, or nothing, before anything is done for it. `request_id` is our
        own, never a client's. Raises RateLimited."""
        ...

    async def reserve(
        self,
        admission: Admission,
        principal: Principal,
        *,
        prompt_tokens: int,
        asked_tokens: int | None,
        default_tokens: int,
        n: int,
    ) -> Reservation:
        """Takes the prompts, n outputs and n sequences from all limits, or nothing. Raises NeverFits and RateLimited,
        or another error with the code `insufficient_quota`."""
        ...

    def again_s(self, admission: Admission) -> float:
        """Seconds until the request rates would let another request in."""
        ...

    async def settle(self, admission: Admission, *, used_tokens: int | None) -> None:
        """Gives back what was reserved and not used; None: all of it, and the request itself."""
        ...


class Ledger(Protocol):
    def accept(self, record: Accepted) -> None:
        """Raises an error with the code `server_overloaded` where no more usage can be recorded."""
        ...

    async def end(self, record: Ended) -> None:
        """Returns when the record can't be lost any more."""
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

    engine: ClusterClient
    text: Text
    grammars: Grammars
    authenticator: Authenticator
    resolver: Resolver
    limiter: Limiter
    ledger: Ledger
    adapters: RuntimeAdapters
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
    database: DatabaseHealth | None = None
    usage_failure: Callable[[], str | None] = lambda: None
    limits_warning: Callable[[], str | None] = lambda: None
    access_log: AccessLog = field(default_factory=access_log)
    tracing: RequestTracing | None = None
    formats: OutputFormats = NO_FORMATS
    text_build: str = ""
    own_chats: OwnChats | None = None
    running_arms: RunningArms = field(default_factory=RunningArms)
    shadows: ShadowSamples | None = None
