"""Types that the control plane returns to the HTTP layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from loraplex.adapters.cache.tenant_memory import MemoryLimits
from loraplex.adapters.pooled import EmbeddingSpec, Head
from loraplex.adapters.ref import AdapterRef
from loraplex.control.release_types import ReleaseInfo
from loraplex.engine.tenant_terms import TenantTerms

Scope = Literal["inference", "adapters:read", "adapters:write", "adapters:train", "usage:read"]
BudgetPeriod = Literal["hour", "day", "month", "forever"]
T = TypeVar("T")
BUDGET_PERIODS: tuple[BudgetPeriod, ...] = ("hour", "day", "month", "forever")
SCOPES: tuple[Scope, ...] = ("inference", "adapters:read", "adapters:write", "adapters:train", "usage:read")


@dataclass(frozen=True, slots=True)
class Limits:
    """Caps on a tenant, a key or the server. None is no cap."""

    requests_per_minute: int | None = None
    """Requests that begin in a minute."""
    tokens_per_minute: int | None = None
    """Tokens of prompts and answers in a minute."""
    max_concurrency: int | None = None
    """Requests that run or wait at a time."""
    max_sequences: int | None = None
    """Running and waiting sequences of all requests together."""
    max_output_tokens: int | None = None
    """The largest `max_tokens` of a request."""
    token_budget: int | None = None
    """Tokens for each `budget_period`. Both are set, or neither."""
    budget_period: BudgetPeriod | None = None
    """A period of the calendar in UTC."""
    max_adapters: int | None = None
    """Names of adapters."""
    max_adapter_bytes: int | None = None
    """Bytes of all living versions, of files and of uploads under way."""
    device_bytes_reserved: int | None = None
    """Device memory of the tenant's adapters that other tenants' adapters leave alone."""
    device_bytes_max: int | None = None
    """Device memory of the tenant's adapters."""
    host_bytes_max: int | None = None
    """Host memory of the tenant's adapters."""
    batch_tokens: int | None = None
    """Tokens that batches have queued."""
    batch_percent: int | None = None
    """The price of a batch's tokens, in percent, as budgets count them."""
    file_days: int | None = None
    """Days for which files, and batches that have ended, are kept."""

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
    """The caller of a request."""

    tenant_id: str | None
    """None for the admin token alone, which may do everything on the admin plane and nothing on the data plane."""
    key_id: str | None
    """None for the admin token alone."""
    scopes: frozenset[str]
    """The routes that the key opens."""
    models: frozenset[str] | None = None
    """The models that the key may use. None: all of the tenant's."""
    weight: float = 1.0
    """The tenant's share in the fair queue, relative to others."""
    is_admin: bool = False
    """Whether the caller has the admin token."""
    key_limits: Limits = NO_LIMITS
    """Limits of the key."""
    tenant_limits: Limits = NO_LIMITS
    """Limits of the key's tenant."""

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
    """The model behind a `model` field."""

    adapter: AdapterRef | None
    """The version. None: the base model."""
    serving: Serving = AS_THE_BASE
    """The notation of tools and reasoning in answers."""
    release: ReleaseInfo | None = None
    """The release that chose the version. None where the request names it, or asks for the base."""
    caller: str | None = None
    """The caller to whom the release sticks. None: to nobody."""
    shadow: AdapterRef | None = None
    """The release's shadow version, if it has one that is ready."""
    head: Head | None = None
    """The version's classifier."""
    embedding: EmbeddingSpec | None = None
    """The vectors that the version was trained for."""

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
    """A token budget in its current period. Amounts are in tokens."""

    limit: int
    """The budget of a period."""
    period: BudgetPeriod
    """The period of the calendar."""
    starts_at: datetime
    """When the current period began."""
    ends_at: datetime | None
    """When the current period ends. None: never."""
    spent: int
    """Tokens of requests that ended, as far as servers have reported."""
    held: int
    """Tokens that servers keep for running and coming requests."""
    left: int
    """Tokens that are neither spent nor held."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A tenant's adapters, and the bytes of its versions and files, as its quotas count them; None where it has no such
    quota."""

    adapters: int | None
    bytes: int | None


@dataclass(frozen=True, slots=True)
class TenantInfo:
    """`budget` None: the tenant has none. `suspended_at` None: its keys are valid."""

    id: str
    display_name: str | None
    weight: float
    limits: Limits
    created_at: datetime
    suspended_at: datetime | None
    budget: BudgetState | None
    stored: Stored


KeyState = Literal["valid", "expired", "revoked"]


@dataclass(frozen=True, slots=True)
class KeyInfo:
    """A key without its secret."""

    id: str
    """The key's public id."""
    tenant_id: str
    """The tenant whose key it is."""
    state: KeyState
    """Valid or not, by the database's clock."""
    name: str | None
    """The label that its maker gave it."""
    scopes: tuple[str, ...]
    """The routes that it opens."""
    models: tuple[str, ...] | None
    """The models that it may use. None: all of the tenant's."""
    limits: Limits
    """Limits of this key, beside the tenant's."""
    created_at: datetime
    """When the key was made."""
    expires_at: datetime | None
    """None: never."""
    revoked_at: datetime | None
    """None: it was not revoked."""
    previous_valid_until: datetime | None
    """The secret before the last rotation works until then."""
    last_used_at: datetime | None
    """Up to a minute old."""
    budget: BudgetState | None = None
    """None: the key has no budget."""


VersionState = Literal[
    "validating", "ready", "rejected", "incompatible", "corrupt", "deleted", "retired", "lost"
]
Checked = Literal["structure", "numbers"]
"""The check that a version of a series needs before it serves: its names, shapes and values, or its outputs too."""


CheckOutcome = Literal["ready", "rejected", "unchecked"]
"""The outcome of an attempt to check a version's numbers; `unchecked`: no verdict, and it is tried again."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a version was rejected, for programs and for people."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class VersionInfo:
    """One immutable version of an adapter."""

    tenant_id: str
    """The owner."""
    name: str
    """The adapter's name."""
    number: int
    """3 for v3."""
    digest: str
    """The SHA-256 of the uploaded files, which names them in the store."""
    state: VersionState
    """Only a `ready` version serves."""
    rank: int
    """The largest rank of a site."""
    targets: tuple[str, ...]
    """The names of the changed linears."""
    bytes: int
    """The size of the two uploaded files."""
    report: dict[str, Any]
    """The report of its admission, as JSON."""
    base_fingerprint: str
    """The base that it was admitted for."""
    pinned: bool
    """Whether it stays on the device."""
    created_at: datetime
    """When it was uploaded."""
    serving: Serving = AS_THE_BASE
    """The notation of tools and reasoning in its answers."""
    invocation: tuple[int, ...] = ()
    """See `AdapterSpec`."""
    head: Head | None = None
    """The head of a version that classifies."""
    embedding: EmbeddingSpec | None = None
    """The vectors that it was trained for, where its upload says so."""
    checked: Checked | None = None
    """The check that its series wanted of it. None: it was not pushed to a series."""
    durable: bool = True
    """Whether its bytes were flushed to the disk."""

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
    tags: tuple[str, ...] = ()


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
    """The data that is deleted with a tenant, and the data that is kept."""

    tenant_id: str
    """The tenant."""
    num_keys: int
    """Deleted keys."""
    num_series: int
    """Deleted rules of series."""
    num_adapters: int
    """Deleted names of adapters."""
    num_versions: int
    """Deleted versions."""
    num_bytes: int
    """The size of the artifacts of `digests`."""
    num_files: int
    """Deleted files: uploads, and what batches wrote."""
    num_file_bytes: int
    """The size of the deleted files."""
    num_batches: int
    """Deleted batches. Those that were not complete end without another file."""
    num_texts: int
    """Free texts that were erased from the audit log."""
    num_shared_artifacts: int
    """Artifacts that other tenants have too, which stay."""
    num_audit_rows: int
    """Rows of the audit log, which stay."""
    usage_since: datetime | None
    """The ledger's rows since then stay. None: there are none."""
