"""The tables of releases that are watched: what runs, its evidence, its shadow, and what is to be told of it."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    Double,
    ForeignKeyConstraint,
    Index,
    LargeBinary,
    String,
    Text,
)
from sqlalchemy.orm import Mapped, mapped_column

from loraplex.control.db.tables import Base, UtcDateTime, adapter_subject, catalog_subject


def _of_adapter() -> ForeignKeyConstraint:
    return ForeignKeyConstraint(
        ["tenant_id", "name"], ["adapters.tenant_id", "adapters.name"], ondelete="CASCADE"
    )


class ReleaseRun(Base):
    """The latest release of a name with a guard or a schedule, and where it stands. `began` is the revision that began
    it, `revision` the one that it has in force. `since`: when its step began, in seconds since the epoch. `guard_state`
    is a guard's JSON, and `course` that of its evidence over time. `control` and `candidate` are versions."""

    __tablename__ = "release_runs"
    __table_args__ = (_of_adapter(),)

    tenant_id: Mapped[str] = mapped_column(String(63), primary_key=True)
    name: Mapped[str] = mapped_column(String(63), primary_key=True)
    began: Mapped[int]
    revision: Mapped[int]
    status: Mapped[str] = mapped_column(String(12))
    step: Mapped[int]
    since: Mapped[float] = mapped_column(Double)
    reason: Mapped[str | None] = mapped_column(String(200))
    control: Mapped[int]
    candidate: Mapped[int]
    guard_state: Mapped[bytes | None] = mapped_column(LargeBinary)
    course: Mapped[bytes | None] = mapped_column(LargeBinary)

    @property
    def subjects(self) -> tuple[str, ...]:
        return adapter_subject(self.tenant_id, self.name), catalog_subject(self.tenant_id)


class ReleaseOutcome(Base):
    """A request of a release that is guarded, written together with its row of the ledger, and removed by the
    transaction that counts it: so each counts once. `key_hash` is signed; times are in seconds since the epoch."""

    __tablename__ = "release_outcomes"
    __table_args__ = (Index("ix_release_outcomes_name", "tenant_id", "name"),)

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(String(63))
    name: Mapped[str] = mapped_column(String(63))
    version: Mapped[int]
    key_hash: Mapped[int] = mapped_column(BigInteger)
    started_at: Mapped[float] = mapped_column(Double)
    ended_at: Mapped[float] = mapped_column(Double)
    status: Mapped[str] = mapped_column(String(32))
    first_token_s: Mapped[float | None] = mapped_column(Double)
    inter_token_s: Mapped[float | None] = mapped_column(Double)
    output_tokens: Mapped[float] = mapped_column(Double)


class RunningArmRow(Base):
    """An arm's running requests on one server, as of `at`. `oldest`: pairs of a key's hash and a start in seconds since
    the epoch, the longest running first."""

    __tablename__ = "running_arms"

    server_id: Mapped[str] = mapped_column(String(32), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(String(63), primary_key=True)
    name: Mapped[str] = mapped_column(String(63), primary_key=True)
    version: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    count: Mapped[int]
    oldest: Mapped[list[Any]] = mapped_column(JSON)
    at: Mapped[datetime] = mapped_column(UtcDateTime)


class Lease(Base):
    """Which server does what one server of all does. `term` counts the holders."""

    __tablename__ = "leases"

    name: Mapped[str] = mapped_column(String(32), primary_key=True)
    holder: Mapped[str] = mapped_column(String(32))
    term: Mapped[int] = mapped_column(BigInteger)
    until: Mapped[datetime] = mapped_column(UtcDateTime)


class WebhookDelivery(Base):
    """An event that a webhook is to be told, written by the transaction that made it, and removed when it was told or
    given up. `body` is what is sent."""

    __tablename__ = "webhook_deliveries"
    __table_args__ = (Index("ix_webhook_deliveries_next_at", "next_at"),)

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(String(63))
    event: Mapped[str] = mapped_column(String(40))
    body: Mapped[str] = mapped_column(Text)
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)
    attempts: Mapped[int]
    next_at: Mapped[datetime] = mapped_column(UtcDateTime)


class ShadowCount(Base):
    """Sums over the samples of a release's shadow version, from revision `began` on. `diverged_at` sums the places of
    the first different tokens; logarithms are sums of log probabilities of the answers' tokens, under the version that
    answered and under the shadow, over `scored` tokens."""

    __tablename__ = "shadow_counts"
    __table_args__ = (_of_adapter(),)

    tenant_id: Mapped[str] = mapped_column(String(63), primary_key=True)
    name: Mapped[str] = mapped_column(String(63), primary_key=True)
    began: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    version: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    samples: Mapped[int] = mapped_column(BigInteger)
    dropped: Mapped[int] = mapped_column(BigInteger)
    failed: Mapped[int] = mapped_column(BigInteger)
    exact: Mapped[int] = mapped_column(BigInteger)
    diverged_at: Mapped[int] = mapped_column(BigInteger)
    live_tokens: Mapped[int] = mapped_column(BigInteger)
    shadow_tokens: Mapped[int] = mapped_column(BigInteger)
    scored: Mapped[int] = mapped_column(BigInteger)
    live_logprob: Mapped[float] = mapped_column(Double)
    shadow_logprob: Mapped[float] = mapped_column(Double)


class ShadowText(Base):
    """A kept pair of texts of one sample, where the tenant turned that on."""

    __tablename__ = "shadow_texts"
    __table_args__ = (_of_adapter(), Index("ix_shadow_texts_at", "tenant_id", "name", "at"))

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(String(63))
    name: Mapped[str] = mapped_column(String(63))
    began: Mapped[int]
    version: Mapped[int]
    at: Mapped[datetime] = mapped_column(UtcDateTime)
    prompt: Mapped[str] = mapped_column(Text)
    answer: Mapped[str] = mapped_column(Text)
    shadow_answer: Mapped[str] = mapped_column(Text)
