"""Bodies and answers of the admin plane. Unknown fields are refused; times are RFC 3339 in UTC."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PlainSerializer, WithJsonSchema

from loraplex.admin import described
from loraplex.control.keys import MAX_GRACE_S, MAX_MODELS
from loraplex.control.releases import MAX_TARGETS
from loraplex.control.releases import MAX_WEIGHT as MAX_PART
from loraplex.control.rules import DEFAULT_PAGE, MAX_PAGE, MAX_WEIGHT, MIN_WEIGHT, is_plain_text
from loraplex.control.types import BudgetPeriod, Scope
from loraplex.control.usage.columns import GROUPS, Bucket, Group

_BIGGEST = 2**53 - 1  # what every JSON reader holds exactly


def _rfc3339(value: datetime) -> str:
    aware = value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)
    return aware.isoformat(timespec="milliseconds" if aware.microsecond else "seconds").replace("+00:00", "Z")


def _with_zone(value: datetime) -> datetime:
    if value.tzinfo is None:
        raise ValueError("a time needs its zone, such as 2030-01-31T00:00:00Z")
    try:
        return value.astimezone(UTC)
    except OverflowError:
        raise ValueError("a time must lie in the years 1 to 9999 in UTC too") from None


def _plain_text(value: str) -> str:
    if not is_plain_text(value):
        raise ValueError("control characters are not allowed")
    return value


Timestamp = Annotated[datetime, PlainSerializer(_rfc3339, return_type=str)]
GivenTime = Annotated[datetime, AfterValidator(_with_zone)]
PlainText = Annotated[
    str, AfterValidator(_plain_text), Field(json_schema_extra={"pattern": described.PLAIN_TEXT})
]
Label = Annotated[PlainText, Field(max_length=200)]
ModelName = Annotated[PlainText, Field(min_length=1, max_length=200)]
PositiveCount = Annotated[int, Field(ge=1, le=_BIGGEST)]
Weight = Annotated[float, Field(ge=MIN_WEIGHT, le=MAX_WEIGHT)]
VersionName = Annotated[str, Field(pattern=described.VERSION)]


class Given(BaseModel):
    """What a client sends."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Shown(BaseModel):
    """What we answer."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class PageQuery(Given):
    limit: Annotated[int, Field(ge=1, le=MAX_PAGE)] = DEFAULT_PAGE
    cursor: Annotated[str, Field(max_length=512, json_schema_extra=described.CURSOR)] | None = None


def _groups(value: str | None) -> str | None:
    names = [] if value is None else value.split(",")
    if len(set(names)) < len(names) or not set(names) <= set(GROUPS):
        raise ValueError(f"some of {', '.join(GROUPS)}, each once, separated by commas")
    return value


class OwnUsageQuery(PageQuery):
    """The period is start ≤ time < end; without `start` the 30 days before `end`, without `end` until now."""

    start: GivenTime | None = None
    end: GivenTime | None = None
    bucket: Bucket = "day"
    group_by: Annotated[str | None, AfterValidator(_groups), WithJsonSchema(described.GROUP_BY)] = None

    @property
    def groups(self) -> list[Group]:
        given = set((self.group_by or "").split(","))
        return [name for name in GROUPS if name in given]


class UsageQuery(OwnUsageQuery):
    tenant: Annotated[PlainText, Field(max_length=63)] | None = None


class Limits(Given):
    """null is no limit. `token_budget` is for each `budget_period` of the calendar in UTC: both or neither."""

    requests_per_minute: PositiveCount | None = None
    tokens_per_minute: PositiveCount | None = None
    max_concurrency: PositiveCount | None = None
    max_sequences: PositiveCount | None = None
    token_budget: PositiveCount | None = None
    budget_period: BudgetPeriod | None = None
    max_adapters: PositiveCount | None = None
    max_adapter_bytes: PositiveCount | None = None
    max_output_tokens: PositiveCount | None = None


class NewLimits(Limits):
    """null is no limit. `token_budget` is for each `budget_period` of the calendar in UTC: both or neither."""

    model_config = ConfigDict(json_schema_extra=described.budget_with_period)


class KeyLimits(Limits):
    """A key's. null is no limit."""

    model_config = ConfigDict(json_schema_extra=described.no_adapters)


class NewKeyLimits(Limits):
    """A key's. null is no limit. `token_budget` is for each `budget_period`: both or neither."""

    model_config = ConfigDict(json_schema_extra=described.new_key_limits)


class TenantCreate(Given):
    id: Annotated[str, Field(json_schema_extra={"pattern": described.TENANT_ID})]
    display_name: Label | None = None
    weight: Weight = 1.0
    limits: NewLimits = NewLimits()


class TenantChange(Given):
    """Only the fields that are there are changed; of `limits` likewise, and null takes a limit away."""

    display_name: Label | None = None
    weight: Weight | None = None
    limits: Limits | None = None


class BudgetState(Shown):
    """A token budget in its current period; `ends_at` is null where there is no end. `spent` by requests that ended,
    up to some seconds late; `held` by servers for requests that run and come."""

    limit: int
    period: BudgetPeriod
    starts_at: Timestamp
    ends_at: Timestamp | None
    spent: int
    held: int
    left: int


class Tenant(Shown):
    """`budget` is null where `limits` has none."""

    id: str
    display_name: str | None
    weight: float
    limits: Limits
    budget: BudgetState | None
    created_at: Timestamp


class TenantPage(Shown):
    data: list[Tenant]
    next_cursor: str | None


class Erased(Shown):
    """What went with a tenant. `artifact_bytes` were freed; `audit_texts` are names that people had given."""

    keys: int
    adapters: int
    versions: int
    artifacts: int
    artifact_bytes: int
    audit_texts: int


class Kept(Shown):
    """What stays of a tenant: the usage that it is billed for, from `usage_since` on (null: there was none), audit
    rows, without texts, and artifacts that other tenants have too."""

    usage_since: Timestamp | None
    audit_rows: int
    shared_artifacts: int


class TenantDeleted(Shown):
    """The id is not given again."""

    id: str
    deleted: Literal[True]
    erased: Erased
    kept: Kept


class KeyCreate(Given):
    name: Label | None = None
    scopes: Annotated[list[Scope], Field(min_length=1, max_length=8)] = ["inference"]
    models: Annotated[list[ModelName], Field(min_length=1, max_length=MAX_MODELS)] | None = None
    limits: NewKeyLimits = NewKeyLimits()
    expires_at: GivenTime | None = None


class KeyChange(Given):
    """Only the fields that are there are changed; of `limits` likewise, and null takes a limit away. `models` of null:
    all of the tenant's; `expires_at` of null: never."""

    name: Label | None = None
    scopes: Annotated[list[Scope], Field(min_length=1, max_length=8)] | None = None
    models: Annotated[list[ModelName], Field(min_length=1, max_length=MAX_MODELS)] | None = None
    limits: KeyLimits | None = None
    expires_at: GivenTime | None = None


class KeyRotate(Given):
    grace_seconds: Annotated[int, Field(ge=0, le=MAX_GRACE_S)] = 0


class Key(Shown):
    """Never holds the secret, which begins with `lpx_<id>_`. After a rotation the old one works until
    `previous_valid_until`. `last_used_at` is up to a minute old; null if the key was never used."""

    id: str
    tenant_id: str
    name: str | None
    scopes: list[Scope]
    models: list[str] | None
    limits: Limits
    expires_at: Timestamp | None
    created_at: Timestamp
    revoked_at: Timestamp | None
    previous_valid_until: Timestamp | None
    last_used_at: Timestamp | None
    budget: BudgetState | None


class KeyWithSecret(Key):
    secret: str


class KeyPage(Shown):
    data: list[Key]
    next_cursor: str | None


class Target(Given):
    """`weight` is its part of the weights' sum."""

    version: VersionName
    weight: Annotated[int, Field(ge=0, le=MAX_PART)]


class ReleaseChange(Given):
    """`targets` name each version once."""

    targets: Annotated[
        list[Target],
        Field(min_length=1, max_length=MAX_TARGETS, json_schema_extra=described.SOME_WEIGHT),
    ]
    sticky: Literal["user", "key", "none"] = "none"
    shadow: None = None
    guard: None = None
    schedule: None = None


class ReleasePromote(Given):
    version: VersionName | None = None


class Release(Shown):
    """Which versions take the traffic of a name, in which shares. `origin` is what made the revision; a rollback
    `restores` an earlier one. `actor` and `actor_key_id` are who did. Each is null where it is not known."""

    name: str
    targets: list[Target]
    sticky: Literal["user", "key", "none"]
    revision: int
    created_at: Timestamp
    origin: Literal["upload", "set", "promote", "rollback", "delete"] | None
    restores: int | None
    actor: Literal["admin", "key", "local"] | None
    actor_key_id: str | None


class Version(Shown):
    """`bytes` is the size of the upload's files; `base_fingerprint` names the base that it was checked against."""

    name: str
    version: str
    digest: str
    state: Literal["validating", "ready", "rejected", "incompatible", "corrupt", "deleted"]
    rank: int
    targets: list[str]
    bytes: int
    pinned: bool
    base_fingerprint: str
    created_at: Timestamp
    report: dict[str, Any] | None


class Pin(Shown):
    name: str
    version: str
    pinned: bool


class VersionPage(Shown):
    data: list[Version]
    next_cursor: str | None


class Adapter(Shown):
    """`latest_version` is the newest, even if it was deleted; `num_versions` counts those that were not. `release` is
    null where nothing is released."""

    name: str
    num_versions: int
    latest_version: str
    release: Release | None
    created_at: Timestamp


class AdapterPage(Shown):
    data: list[Adapter]
    next_cursor: str | None


class UsageSum(Shown):
    """Sums of a group in a bucket that begins at `start`; null where they are not parted by that. `adapter` is
    `(base)` for the base model, whose `version` is null."""

    start: Timestamp | None
    tenant: str | None
    key: str | None
    adapter: str | None
    version: str | None
    status: str | None
    requests: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


class UsagePage(Shown):
    data: list[UsageSum]
    next_cursor: str | None


class CacheRow(Shown):
    """Where one version is: `residency` names every tier that holds it, the fastest first. `load_seconds` is the
    last load by stage; `last_used_seconds_ago` is null if it was not used since the engine began."""

    tenant_id: str
    name: str
    version: str
    digest: str
    residency: list[Literal["device", "host", "disk"]]
    loading: bool
    pinned: bool
    leases: int
    device_bytes: int
    host_bytes: int
    disk_bytes: int
    last_used_seconds_ago: float | None
    load_seconds: dict[str, float]
    error: str | None


class CachePage(Shown):
    data: list[CacheRow]
    next_cursor: str | None


class Engine(Shown):
    """`info` is what the engine told of itself at its start; `stats` its gauges and counters now, null while no
    engine answers."""

    healthy: bool
    unhealthy_reason: str | None
    restarts: int
    live_requests: int
    info: dict[str, Any]
    stats: dict[str, Any] | None


Word = Annotated[PlainText, Field(min_length=1, max_length=64)]


class AuditQuery(PageQuery):
    """`tenant`: rows about it, or by its keys. `actor`: admin, local, or a key's id. From `start` on, before `end`."""

    tenant: Word | None = None
    actor: Word | None = None
    action: Word | None = None
    outcome: Literal["done", "refused", "failed"] | None = None
    start: GivenTime | None = None
    end: GivenTime | None = None


class AuditEntry(Shown):
    """One act. `before` and `after` hold no secrets; a text that went with its tenant is `{"erased": true}`. `code` is
    the answer's, of what was refused or failed. `hash` covers this row and all before it."""

    seq: int
    time: Timestamp
    actor: Literal["admin", "key", "local"]
    actor_tenant_id: str | None
    actor_key_id: str | None
    source: str | None
    request_id: str | None
    action: str
    tenant_id: str | None
    target: str
    outcome: Literal["done", "refused", "failed"]
    code: str | None
    before: dict[str, Any] | None
    after: dict[str, Any] | None
    hash: str


class AuditPage(Shown):
    data: list[AuditEntry]
    next_cursor: str | None
