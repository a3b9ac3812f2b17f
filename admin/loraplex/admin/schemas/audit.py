"""The audit log."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from loraplex.admin.schemas import described
from loraplex.admin.schemas.fields import (
    GivenTime,
    OmittedNull,
    PageQuery,
    PlainText,
    QueryParameters,
    ResponseBody,
    Timestamp,
)

Word = Annotated[PlainText, Field(min_length=1, max_length=64)]


class AuditQuery(PageQuery):
    """`tenant`: rows about it, or by its keys. `actor`: admin, local, or a key's id. From `start` on, before `end`."""

    tenant: Annotated[Word | None, OmittedNull()] = None
    actor: Annotated[Word | None, OmittedNull()] = None
    action: Annotated[Word | None, OmittedNull()] = None
    outcome: Annotated[Literal["done", "refused", "failed"] | None, OmittedNull()] = None
    start: Annotated[GivenTime | None, OmittedNull()] = None
    end: Annotated[GivenTime | None, OmittedNull()] = None


class AuditVerifyQuery(QueryParameters):
    """`anchor`: how the log ended at an earlier time, as this route or `loraplex audit verify` answered then."""

    anchor: Annotated[Annotated[str, Field(pattern=described.AUDIT_ANCHOR)] | None, OmittedNull()] = None


class AuditVerdict(ResponseBody):
    """`rows` were found whole before the first that is not, whose number is `broken_at`, for this `reason`; both are
    null where the log is whole. `anchor` is where the log ends: SEQ:HASH."""

    whole: bool
    rows: int
    anchor: str | None
    broken_at: int | None
    reason: str | None


class AuditEntry(ResponseBody):
    """One act. `before` and `after` hold no secrets; a text of a deleted tenant is `{"erased": true}`. `code` is
    the answer's, of what was refused or failed. `hash` covers this row and all before it."""

    seq: int
    time: Timestamp
    actor: Literal["admin", "key", "local", "guard"]
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


class AuditPage(ResponseBody):
    data: list[AuditEntry]
    next_cursor: str | None
