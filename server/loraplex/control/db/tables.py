"""The tables. Times are UTC; secrets are kept only as keyed hashes."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    DateTime,
    Dialect,
    Double,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    String,
    Text,
    literal_column,
    text,
    true,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.types import TypeDecorator


class UtcDateTime(TypeDecorator[datetime]):
    """Aware datetimes in UTC on every database; SQLite drops the zone, so it is put back."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        return None if value is None else value.astimezone(UTC)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


class Base(DeclarativeBase):
    """The metadata that Alembic compares with."""

    @property
    def subjects(self) -> tuple[str, ...]:
        """The subjects that a change of this row changes, as `Database.changed_since` names them."""
        return ()


def adapter_subject(tenant_id: str, name: str) -> str:
    """The versions and the release of one name."""
    return f"adapter:{tenant_id}/{name}"


def catalog_subject(tenant_id: str) -> str:
    """All versions and releases of a tenant."""
    return f"catalog:{tenant_id}"


class Tenant(Base):
    __tablename__ = "tenants"

    id: Mapped[str] = mapped_column(String(63), primary_key=True)
    display_name: Mapped[str | None] = mapped_column(String(200))
    weight: Mapped[float] = mapped_column(Double)
    limits: Mapped[dict[str, Any]] = mapped_column(JSON)
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)
    suspended_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    """Since then its keys are refused; null: they are not."""


class ApiKey(Base):
    """`secret_hash` and `previous_hash` are HMAC-SHA256 under the pepper, in hex."""

    __tablename__ = "api_keys"

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id", ondelete="CASCADE"), index=True)
    name: Mapped[str | None] = mapped_column(String(200))
    secret_hash: Mapped[str] = mapped_column(String(64))
    previous_hash: Mapped[str | None] = mapped_column(String(64))
    previous_valid_until: Mapped[datetime | None] = mapped_column(UtcDateTime)
    scopes: Mapped[list[str]] = mapped_column(JSON)
    models: Mapped[list[str] | None] = mapped_column(JSON(none_as_null=True))
    limits: Mapped[dict[str, Any]] = mapped_column(JSON)
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)
    expires_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    revoked_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    last_used_at: Mapped[datetime | None] = mapped_column(UtcDateTime)


class Budget(Base):
    """A token budget in one period. `spent` is of slices that were given back. `owner_id` is a key's or a tenant's, and
    empty for the server's; it ends with its tenant."""

    __tablename__ = "budgets"

    owner_kind: Mapped[str] = mapped_column(String(8), primary_key=True)
    owner_id: Mapped[str] = mapped_column(String(63), primary_key=True)
    period: Mapped[str] = mapped_column(String(8), primary_key=True)
    starts_at: Mapped[datetime] = mapped_column(UtcDateTime, primary_key=True)
    tenant_id: Mapped[str | None] = mapped_column(ForeignKey("tenants.id", ondelete="CASCADE"), index=True)
    spent: Mapped[int] = mapped_column(BigInteger)


class BudgetSlice(Base):
    """The slice of a budget that one server holds, in tokens since the slice was made: spent ≤ drawn ≤ granted."""

    __tablename__ = "budget_slices"
    __table_args__ = (
        ForeignKeyConstraint(
            ["owner_kind", "owner_id", "period", "starts_at"],
            ["budgets.owner_kind", "budgets.owner_id", "budgets.period", "budgets.starts_at"],
            ondelete="CASCADE",
        ),
        Index("ix_budget_slices_owner", "owner_kind", "owner_id"),
    )

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    owner_kind: Mapped[str] = mapped_column(String(8))
    owner_id: Mapped[str] = mapped_column(String(63))
    period: Mapped[str] = mapped_column(String(8))
    starts_at: Mapped[datetime] = mapped_column(UtcDateTime)
    granted: Mapped[int] = mapped_column(BigInteger)
    drawn: Mapped[int] = mapped_column(BigInteger)
    spent: Mapped[int] = mapped_column(BigInteger)
    expires_at: Mapped[datetime] = mapped_column(UtcDateTime)


class Installation(Base):
    """Values of the installation as a whole, by name."""

    __tablename__ = "installation"

    name: Mapped[str] = mapped_column(String(63), primary_key=True)
    value: Mapped[str] = mapped_column(String(200))


class Adapter(Base):
    """A name. It stays when its versions are deleted, so that a version's number never comes twice."""

    __tablename__ = "adapters"

    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id", ondelete="CASCADE"), primary_key=True)
    name: Mapped[str] = mapped_column(String(63), primary_key=True)
    last_number: Mapped[int]
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)


class AdapterTag(Base):
    """A tag of a name, which has some while it has a living version."""

    __tablename__ = "adapter_tags"
    __table_args__ = (
        ForeignKeyConstraint(
            ["tenant_id", "name"], ["adapters.tenant_id", "adapters.name"], ondelete="CASCADE"
        ),
        Index("ix_adapter_tags_tag", "tag"),
    )

    tenant_id: Mapped[str] = mapped_column(String(63), primary_key=True)
    name: Mapped[str] = mapped_column(String(63), primary_key=True)
    tag: Mapped[str] = mapped_column(String(32), primary_key=True)


GONE = ("deleted", "rejected", "retired", "lost")
"""States of versions whose bytes are not kept."""
_LIVING = text("state NOT IN ({})".format(", ".join(f"'{state}'" for state in GONE)))
_CHECKED = text("checked = 'numbers'")


class AdapterVersion(Base):
    __tablename__ = "adapter_versions"
    __table_args__ = (
        ForeignKeyConstraint(
            ["tenant_id", "name"], ["adapters.tenant_id", "adapters.name"], ondelete="CASCADE"
        ),
        Index("ix_adapter_versions_digest", "digest"),
        Index(
            "ix_adapter_versions_validating",
            "created_at",
            sqlite_where=text("state = 'validating'"),
            postgresql_where=text("state = 'validating'"),
        ),
        Index(
            "ix_adapter_versions_living",
            "tenant_id",
            "name",
            "number",
            sqlite_where=_LIVING,
            postgresql_where=_LIVING,
        ),
        Index(
            "ix_adapter_versions_checked",
            "tenant_id",
            "name",
            "number",
            sqlite_where=_CHECKED,
            postgresql_where=_CHECKED,
        ),
    )

    tenant_id: Mapped[str] = mapped_column(String(63), primary_key=True)
    name: Mapped[str] = mapped_column(String(63), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True)
    digest: Mapped[str] = mapped_column(String(64))
    state: Mapped[str] = mapped_column(String(16))
    rank: Mapped[int]
    targets: Mapped[list[str]] = mapped_column(JSON)
    bytes: Mapped[int] = mapped_column(BigInteger)
    report: Mapped[dict[str, Any]] = mapped_column(JSON)
    base_fingerprint: Mapped[str] = mapped_column(String(64))
    pinned: Mapped[bool]
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)
    tool_format: Mapped[str | None] = mapped_column(String(16))
    reasoning_format: Mapped[str | None] = mapped_column(String(16))
    chat_digest: Mapped[str | None] = mapped_column(String(64))
    chat: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True), deferred=True)
    """`OwnChat.as_json` of what it brings for its chats, while its bytes are kept; null: nothing."""
    alora: Mapped[str | None] = mapped_column(String(8))
    invocation: Mapped[list[int] | None] = mapped_column(JSON(none_as_null=True))
    """The token ids that activate it; null: it acts on every position."""
    head: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    embedding: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    """`Head` and `EmbeddingSpec` of `loraplex.adapters.pooled`, `as_json`."""
    pending_check: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    """While its numbers have not been checked: who uploaded it (`actor`); if it is then to be released, the revision
    that was in force when that was asked (`release_after`); the failures of its comparison with its trainer, if there
    were any (`failures`). Null: they need no check any more."""
    checked: Mapped[str | None] = mapped_column(String(16))
    """The check that its series wanted of it, `structure` or `numbers`. Null: it was pushed to no series."""
    pending_agreement: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True), deferred=True)
    """`DueAgreement.as_json` of what its trainer computed, until a verdict on it. Null: nothing is to be compared."""
    durable: Mapped[bool] = mapped_column(server_default=true())
    """Whether its bytes were flushed to the disk. While not, a crash of the machine may lose them."""

    @property
    def subjects(self) -> tuple[str, ...]:
        return adapter_subject(self.tenant_id, self.name), catalog_subject(self.tenant_id)


class Series(Base):
    """A name whose versions a training pushes. It may be set before the name has a version."""

    __tablename__ = "adapter_series"

    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id", ondelete="CASCADE"), primary_key=True)
    name: Mapped[str] = mapped_column(String(63), primary_key=True)
    config: Mapped[str | None] = mapped_column(Text)
    """The adapter_config.json of pushes that are tensors alone, as JSON; null: such pushes are refused."""
    keep_last: Mapped[int]
    """Newest versions that are kept."""
    check_every: Mapped[int]
    """Versions from one whose numbers are checked to the next."""
    latest: Mapped[bool]
    """Whether each version takes all the traffic of the name once it is ready."""
    quota: Mapped[int | None]
    """Pushes in a minute; null: no limit of the series."""
    agree_within: Mapped[float | None] = mapped_column(Double)
    """Largest mean absolute difference of a trainer's log probabilities and the server's, in nats. Null: a push brings
    none."""
    since: Mapped[int]
    """The name's last number when this was set: the first version after it has its numbers checked."""
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)


LIVING = AdapterVersion.state.not_in([literal_column(f"'{state}'") for state in GONE])
"""Versions whose bytes are kept, as a condition. Its states are literals, not parameters: a partial index serves only
queries that state its condition word for word."""
NUMBERS_CHECKED = AdapterVersion.checked == literal_column("'numbers'")
"""Versions of a series whose numbers it wanted checked, as a condition with an index of its own."""


class Release(Base):
    """The latest releases of a name; the one with the highest revision is in force. Revisions of a name have no gaps.
    `guard`, `schedule` and `shadow` are what the release was set to, as JSON; `began` is the revision that began its
    schedule. `origin` and those after it are null where the revision is older than they are and the audit log does not
    have them; `reason` says why the guard went back."""

    __tablename__ = "releases"
    __table_args__ = (
        ForeignKeyConstraint(
            ["tenant_id", "name"], ["adapters.tenant_id", "adapters.name"], ondelete="CASCADE"
        ),
    )

    tenant_id: Mapped[str] = mapped_column(String(63), primary_key=True)
    name: Mapped[str] = mapped_column(String(63), primary_key=True)
    revision: Mapped[int] = mapped_column(primary_key=True)
    targets: Mapped[list[dict[str, Any]]] = mapped_column(JSON)
    sticky: Mapped[str] = mapped_column(String(8))
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)
    origin: Mapped[str | None] = mapped_column(String(8))
    restores: Mapped[int | None]
    actor: Mapped[str | None] = mapped_column(String(8))
    actor_key_id: Mapped[str | None] = mapped_column(String(32))
    guard: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    schedule: Mapped[list[dict[str, Any]] | None] = mapped_column(JSON(none_as_null=True))
    shadow: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    began: Mapped[int | None]
    reason: Mapped[str | None] = mapped_column(String(200))

    @property
    def subjects(self) -> tuple[str, ...]:
        return adapter_subject(self.tenant_id, self.name), catalog_subject(self.tenant_id)


class Usage(Base):
    """One row for each request that was accepted. It names tenants and keys that may be gone: what was used stays
    billable. `at` is when the request ended; the base model is `records.BASE`, version 0, without a digest."""

    __tablename__ = "usage"
    __table_args__ = (
        Index("ix_usage_at", "at"),
        Index("ix_usage_tenant_at", "tenant_id", "at"),
    )

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    at: Mapped[datetime] = mapped_column(UtcDateTime)
    tenant_id: Mapped[str] = mapped_column(String(63))
    key_id: Mapped[str] = mapped_column(String(32))
    adapter: Mapped[str] = mapped_column(String(63))
    version: Mapped[int]
    digest: Mapped[str] = mapped_column(String(64))
    endpoint: Mapped[str] = mapped_column(String(32))
    streamed: Mapped[bool]
    n: Mapped[int]
    status: Mapped[str] = mapped_column(String(32))
    prompt_tokens: Mapped[int] = mapped_column(BigInteger)
    cached_tokens: Mapped[int] = mapped_column(BigInteger)
    completion_tokens: Mapped[int] = mapped_column(BigInteger)
    queue_s: Mapped[float] = mapped_column(Double)
    first_token_s: Mapped[float | None] = mapped_column(Double)
    total_s: Mapped[float] = mapped_column(Double)


class UsageDay(Base):
    """Sums of the rows of a day (its midnight in UTC) that are not kept one by one any more."""

    __tablename__ = "usage_days"
    __table_args__ = (Index("ix_usage_days_tenant_at", "tenant_id", "at"),)

    at: Mapped[datetime] = mapped_column(UtcDateTime, primary_key=True)
    tenant_id: Mapped[str] = mapped_column(String(63), primary_key=True)
    key_id: Mapped[str] = mapped_column(String(32), primary_key=True)
    adapter: Mapped[str] = mapped_column(String(63), primary_key=True)
    version: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    status: Mapped[str] = mapped_column(String(32), primary_key=True)
    requests: Mapped[int] = mapped_column(BigInteger)
    prompt_tokens: Mapped[int] = mapped_column(BigInteger)
    cached_tokens: Mapped[int] = mapped_column(BigInteger)
    completion_tokens: Mapped[int] = mapped_column(BigInteger)


class UsageSource(Base):
    """How much of a server's usage journal is in the table, written together with its rows. After a crash the
    journal is read from there."""

    __tablename__ = "usage_sources"

    life: Mapped[str] = mapped_column(String(32), primary_key=True)
    segment: Mapped[int]
    offset: Mapped[int]
    updated_at: Mapped[datetime] = mapped_column(UtcDateTime)


class DeletedTenant(Base):
    """An id that is not given again: bills and audit rows name it."""

    __tablename__ = "deleted_tenants"

    id: Mapped[str] = mapped_column(String(63), primary_key=True)
    deleted_at: Mapped[datetime] = mapped_column(UtcDateTime)


class AuditRow(Base):
    """One act. The database refuses to change or delete it, and any `seq` but the next. `before` and `after` are JSON
    as it went into `hash`; free texts stand there as commitments to rows of `audit_texts`."""

    __tablename__ = "audit_log"

    seq: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    time: Mapped[datetime] = mapped_column(UtcDateTime, index=True)
    actor: Mapped[str] = mapped_column(String(8))
    actor_tenant_id: Mapped[str | None] = mapped_column(String(63))
    actor_key_id: Mapped[str | None] = mapped_column(String(32))
    source: Mapped[str | None] = mapped_column(String(64))
    request_id: Mapped[str | None] = mapped_column(String(128))
    action: Mapped[str] = mapped_column(String(40))
    tenant_id: Mapped[str | None] = mapped_column(String(63), index=True)
    target: Mapped[str] = mapped_column(String(400))
    outcome: Mapped[str] = mapped_column(String(8))
    code: Mapped[str | None] = mapped_column(String(40))
    before: Mapped[str | None] = mapped_column(Text)
    after: Mapped[str | None] = mapped_column(Text)
    previous_hash: Mapped[str] = mapped_column(String(64))
    hash: Mapped[str] = mapped_column(String(64))


class AuditText(Base):
    """A free text of an audit row, at `place` in it, for example `after.name`. It goes with its tenant; the row
    stays."""

    __tablename__ = "audit_texts"

    seq: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    place: Mapped[str] = mapped_column(String(80), primary_key=True)
    tenant_id: Mapped[str | None] = mapped_column(String(63), index=True)
    salt: Mapped[str] = mapped_column(String(32))
    text: Mapped[str] = mapped_column(Text)


class AuditHead(Base):
    """The one row that says how long the audit log is, and the hash of its last row."""

    __tablename__ = "audit_head"

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    seq: Mapped[int] = mapped_column(BigInteger)
    hash: Mapped[str] = mapped_column(String(64))
