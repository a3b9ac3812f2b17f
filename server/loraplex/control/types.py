"""Types that the control plane returns to the HTTP layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from loraplex.adapters.cache.tenant_memory import MemoryLimits
from loraplex.adapters.pooled import EmbeddingSpec, Head
from loraplex.adapters.ref import AdapterRef
from loraplex.engine.tenant_terms import TenantTerms

Scope = Literal["inference", "adapters:read", "adapters:write", "usage:read"]
Sticky = Literal["user", "key", "none"]
BudgetPeriod = Literal["hour", "day", "month", "forever"]
T = TypeVar("T")
BUDGET_PERIODS: tuple[BudgetPeriod, ...] = ("hour", "day", "month", "forever")
SCOPES: tuple[Scope, ...] = ("inference", "adapters:read", "adapters:write", "usage:read")
MAX_RELEASE_WEIGHT = 1_000_000
"""Largest weight of one target of a release."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Caps on a tenant, a key or the server; None is no cap. Bytes, tokens or counts as named. `token_budget` is for
    each `budget_period` of the calendar in UTC; they are set both or neither. `max_sequences`: running and waiting
    ones of all requests together. `device_bytes_reserved`: memory of a tenant's adapters that other tenants' leave
    alone. `batch_tokens`: queued by batches. `batch_percent`: of a batch's tokens, as budgets count them.
    `file_days`: for which files, and batches that have ended, are kept."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrency: int | None = None
    max_sequences: int | None = None
    max_output_tokens: int | None = None
    token_budget: int | None = None
    budget_period: BudgetPeriod | None = None
    max_adapters: int | None = None
    max_adapter_bytes: int | None = None
    device_bytes_reserved: int | None = None
    device_bytes_max: int | None = None
    host_bytes_max: int | None = None
    batch_tokens: int | None = None
    batch_percent: int | None = None
    file_days: int | None = None

    @property
    def memory(self) -> MemoryLimits:
        """The limits on adapter memory, as the engine takes them."""
        return MemoryLimits(self.device_bytes_reserved, self.device_bytes_max, self.host_bytes_max)


ADAPTER_LIMITS = (
    "max_adapters", "max_adapter_bytes", "device_bytes_reserved", "device_bytes_max", "host_bytes_max", "batch_tokens",
    "batch_percent", "file_days",
)  # fmt: skip
"""Limits on adapters, which only a tenant has."""
RATES = {"requests": "requests_per_minute", "tokens": "tokens_per_minute"}
"""Limits a minute: their names in headers, metrics and refusals, and their fields in Limits."""
PLACES = {"concurrency": "max_concurrency", "sequences": "max_sequences"}
"""Limits on what runs and waits at a time: their names and fields too."""
LIMIT_KINDS = (*RATES, *PLACES, "budget")
NO_LIMITS = Limits()


@dataclass(frozen=True, slots=True)
class Principal:
    """The caller. `tenant_id` and `key_id` are None for the admin token alone, which may do everything
    on the admin plane and nothing on the data plane. `models` None: all of the tenant's."""

    tenant_id: str | None
    key_id: str | None
    scopes: frozenset[str]
    models: frozenset[str] | None = None
    weight: float = 1.0
    is_admin: bool = False
    key_limits: Limits = NO_LIMITS
    tenant_limits: Limits = NO_LIMITS

    @property
    def terms(self) -> TenantTerms:
        """The tenant's weight and limits of memory, as the engine takes them."""
        return TenantTerms(self.weight, self.tenant_limits.memory)


WithoutInvocation = Literal["append", "base"]
"""Put the invocation at the prompt's end, or answer as the base model does."""


@dataclass(frozen=True, slots=True)
class Serving:
    """How a version writes calls of tools and reasoning, by the names of formats. None: as the base model does.
    `chat_digest`: of the chat template and the ends of answers that it brings, None where they are the base's.
    `alora`: what an activated LoRA does with a prompt that lacks its invocation. None: refuse it."""

    tool_format: str | None = None
    reasoning_format: str | None = None
    chat_digest: str | None = None
    alora: WithoutInvocation | None = None


AS_THE_BASE = Serving()


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """The model behind a `model` field. `adapter` None is the base model. `release` chose the version; None where the
    request names it, or asks for the base. `caller` is what the release is sticky by, None if by nothing. `shadow` is
    the release's shadow version, if it has one that is ready. `head` and `embedding` are the version's."""

    adapter: AdapterRef | None
    serving: Serving = AS_THE_BASE
    release: ReleaseInfo | None = None
    caller: str | None = None
    shadow: AdapterRef | None = None
    head: Head | None = None
    embedding: EmbeddingSpec | None = None

    @property
    def is_arm(self) -> bool:
        """Whether a guard or a schedule moves the release that chose the version, and the version is an arm of it."""
        run = None if self.release is None else self.release.run
        if run is None or run.status != "running" or self.adapter is None:
            return False
        return self.adapter.version in (run.control, run.candidate)


@dataclass(frozen=True, slots=True)
class ModelCard:
    """A row of /v1/models. `root` is the digest of the released version (the base's own name for base)."""

    id: str
    created: int
    root: str
    parent: str | None
    serving: Serving = AS_THE_BASE


@dataclass(frozen=True, slots=True)
class LimitWindow:
    """One window as it stands after a decision, for x-ratelimit-* headers. `reset_s`: seconds until full."""

    limit: int
    remaining: int
    reset_s: float


LimitOwner = Literal["key", "tenant", "server"]
Windows = Mapping[str, LimitWindow]
"""The windows after a decision by RATES; of several limits on one of them that with the least left."""


class ReachedLimit(NamedTuple):
    """The limit that an answer with 429 names."""

    owner: LimitOwner
    kind: str
    """One of LIMIT_KINDS."""


@dataclass(frozen=True, slots=True)
class Decision:
    """A limiter's answer for a plan that it admitted. After `again_s` its rates would let the same plan pass again."""

    windows: Windows
    again_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Admission:
    """A request that its rates let in and that was charged to them; settled once by `request_id`, which is its internal
    id. `again_at`: when they would admit another one, on the clock of the limiter that admitted it."""

    request_id: str
    windows: Windows = field(default_factory=dict)
    again_at: float = 0.0


@dataclass(frozen=True, slots=True)
class Reservation:
    """A share of the other limits that an admitted request reserved; it is settled with its admission."""

    windows: Windows = field(default_factory=dict)
    max_output_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class BudgetState:
    """A token budget in its current period, whose end is None where there is none. `spent`: by requests that ended, as
    far as servers have reported; `held`: kept by servers for running and coming requests. Tokens."""

    limit: int
    period: BudgetPeriod
    starts_at: datetime
    ends_at: datetime | None
    spent: int
    held: int
    left: int


@dataclass(frozen=True, slots=True)
class TenantInfo:
    """`budget` None: the tenant has none."""

    id: str
    display_name: str | None
    weight: float
    limits: Limits
    created_at: datetime
    budget: BudgetState | None = None


KeyState = Literal["valid", "expired", "revoked"]


@dataclass(frozen=True, slots=True)
class KeyInfo:
    """A key without its secret. `state` is by the database's clock. `previous_valid_until`: the rotated secret works
    until then. `last_used_at` is up to a minute old."""

    id: str
    tenant_id: str
    state: KeyState
    name: str | None
    scopes: tuple[str, ...]
    models: tuple[str, ...] | None
    limits: Limits
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None
    previous_valid_until: datetime | None
    last_used_at: datetime | None
    budget: BudgetState | None = None


VersionState = Literal["validating", "ready", "rejected", "incompatible", "corrupt", "deleted"]


CheckOutcome = Literal["ready", "rejected", "unchecked"]
"""The outcome of an attempt to check a version's numbers; `unchecked`: no verdict, and it is tried again."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a version was rejected, for programs and for people."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class VersionInfo:
    """One immutable version. `bytes` is the size of the two uploaded files. `invocation`: see `AdapterSpec`. `head`: of
    one that classifies. `embedding`: the vectors that it was trained for, where its upload says so."""

    tenant_id: str
    name: str
    number: int
    digest: str
    state: VersionState
    rank: int
    targets: tuple[str, ...]
    bytes: int
    report: dict[str, Any]
    base_fingerprint: str
    pinned: bool
    created_at: datetime
    serving: Serving = AS_THE_BASE
    invocation: tuple[int, ...] = ()
    head: Head | None = None
    embedding: EmbeddingSpec | None = None

    @property
    def version(self) -> str:
        return f"v{self.number}"

    def ref(self) -> AdapterRef:
        return AdapterRef(self.tenant_id, self.name, self.number, self.digest, self.rank, self.invocation)


@dataclass(frozen=True, slots=True)
class AdapterInfo:
    """`latest` is the newest version's number, deleted ones counted; `num_versions` counts the living."""

    tenant_id: str
    name: str
    latest: int
    num_versions: int
    created_at: datetime


@dataclass(frozen=True, slots=True)
class ReleaseTarget:
    version: str
    weight: int


ActorKind = Literal["admin", "key", "local", "guard"]
ReleaseOrigin = Literal["upload", "set", "promote", "rollback", "delete", "step"]
RunStatus = Literal["running", "paused", "promoted", "rolled_back"]


@dataclass(frozen=True, slots=True)
class ShadowPlan:
    """The version that answers a share of a release's requests too, unseen. `sample`: the share, above 0, up to 1.
    `keep_texts`: both answers are kept for a while."""

    version: str
    sample: float
    keep_texts: bool = False


@dataclass(frozen=True, slots=True)
class ShadowInfo:
    """Sums over the samples of a release's shadow version since revision `began`. `samples` were compared, `exact` of
    them have the same tokens; `diverged_at` sums the first different token's index (from 0) of the others. `dropped`
    were not run to their end, `failed` ended with an error. The log probabilities are sums over the `scored` tokens of
    the answers that callers got, under the version that answered and under the shadow."""

    version: str
    began: int
    samples: int = 0
    dropped: int = 0
    failed: int = 0
    exact: int = 0
    diverged_at: int = 0
    live_tokens: int = 0
    shadow_tokens: int = 0
    scored: int = 0
    live_logprob: float = 0.0
    shadow_logprob: float = 0.0


@dataclass(frozen=True, slots=True)
class ShadowTexts:
    """The texts of one sample: the prompt, the answer that the caller got, and the shadow's."""

    id: str
    version: str
    at: datetime
    prompt: str
    answer: str
    shadow_answer: str


@dataclass(frozen=True, slots=True)
class ReleasePlan:
    """The acts of a release by itself: `guard` and `schedule` are checked JSON, as `loraplex.lifecycle.release_guard`
    reads it."""

    guard: Mapping[str, Any] | None = None
    schedule: Sequence[Mapping[str, Any]] | None = None
    shadow: ShadowPlan | None = None


NO_PLAN = ReleasePlan()


@dataclass(frozen=True, slots=True)
class RunInfo:
    """Where a release with a guard or a schedule stands. `step` counts from 0; `since`, in seconds since the epoch, is
    when it began. `control` and `candidate` are versions. `reason` says why it was rolled back."""

    began: int
    revision: int
    status: RunStatus
    step: int
    since: float
    control: int
    candidate: int
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class ReleaseInfo:
    """Which versions a bare name means, in parts of the weights' sum. `sticky`: what keeps a caller on one.

    `origin` is the act that made the revision: `upload` is of a name's first version, `delete` of its last one. A
    rollback `restores` an earlier revision, which is itself no rollback; a `step` is one of the schedule that revision
    `began` began. `actor` and `actor_key_id` name the caller, as in the audit log. All of these are None where they
    were not recorded. `run` is None where nothing watches the release; `reason` says why the guard went back."""

    tenant_id: str
    name: str
    revision: int
    targets: tuple[ReleaseTarget, ...]
    sticky: Sticky
    created_at: datetime
    origin: ReleaseOrigin | None = None
    restores: int | None = None
    actor: ActorKind | None = None
    actor_key_id: str | None = None
    plan: ReleasePlan = NO_PLAN
    began: int | None = None
    reason: str | None = None
    run: RunInfo | None = None


@dataclass(frozen=True, slots=True)
class SkippedRevision:
    """An earlier release that a rollback passed over; `reason` completes a sentence, for example "v2 is deleted"."""

    revision: int
    reason: str


@dataclass(frozen=True, slots=True)
class RollbackInfo:
    """The release that is in force after a rollback."""

    release: ReleaseInfo
    skipped: tuple[SkippedRevision, ...]


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    """A page of a list; `next_cursor` None means that it was the last."""

    items: tuple[T, ...]
    next_cursor: str | None


@dataclass(frozen=True, slots=True)
class Removal:
    """The work that a deletion leaves: `digests` that no version has any more, to be evicted from the engine, and of
    those that others have too the ones that were `unpinned`: no version that is left is pinned with them."""

    digests: tuple[str, ...]
    unpinned: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TenantRemoval(Removal):
    """The data that was deleted with a tenant, and the data that is kept. `num_bytes` is of `digests`;
    `num_shared_artifacts` are those that other tenants have too; `num_texts` counts the free texts that were erased
    from the audit log. The ledger's rows since `usage_since` stay (None: there are none)."""

    tenant_id: str
    num_keys: int
    num_adapters: int
    num_versions: int
    num_bytes: int
    num_texts: int
    num_shared_artifacts: int
    num_audit_rows: int
    usage_since: datetime | None
