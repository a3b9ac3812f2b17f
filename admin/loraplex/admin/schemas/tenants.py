"""Tenants."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from loraplex.admin.schemas import described
from loraplex.admin.schemas.fields import Label, RequestBody, ResponseBody, Timestamp
from loraplex.admin.schemas.limits import BudgetState, Limits, NewLimits
from loraplex.control.rules import MAX_WEIGHT, MIN_WEIGHT

Weight = Annotated[float, Field(ge=MIN_WEIGHT, le=MAX_WEIGHT)]


class TenantCreate(RequestBody):
    id: Annotated[str, Field(json_schema_extra={"pattern": described.TENANT_ID})]
    display_name: Label | None = None
    weight: Weight = 1.0
    limits: NewLimits = NewLimits()


class TenantChange(RequestBody):
    """Only the given fields change. In `limits` too only the given ones do, and null removes a limit. While a tenant is
    `suspended`, its keys are refused; requests that run go on to their end."""

    display_name: Label | None = None
    weight: Weight | None = None
    limits: Limits | None = None
    suspended: bool | None = None


class Stored(ResponseBody):
    """A tenant's `adapters`, and the `bytes` of its versions and files, as `max_adapters` and `max_adapter_bytes` count
    them; a null where it has no such limit."""

    adapters: int | None
    bytes: int | None


class Tenant(ResponseBody):
    """`budget` is null where `limits` has none, `suspended_at` where the tenant is not suspended."""

    id: str
    display_name: str | None
    weight: float
    limits: Limits
    budget: BudgetState | None
    stored: Stored
    created_at: Timestamp
    suspended_at: Timestamp | None


class TenantPage(ResponseBody):
    data: list[Tenant]
    next_cursor: str | None


class Erased(ResponseBody):
    """The data that is deleted with a tenant. `series` are names with rules for pushes; `artifact_bytes` are freed;
    `files` were uploaded or written by batches, and have `file_bytes`; `batches` that were not complete end with them.
    `audit_texts` are names that people had given."""

    keys: int
    adapters: int
    versions: int
    series: int
    artifacts: int
    artifact_bytes: int
    files: int
    file_bytes: int
    batches: int
    audit_texts: int


class Kept(ResponseBody):
    """The data that is kept of a tenant: the usage that it is billed for, from `usage_since` on (null: there was none),
    audit rows without texts, and artifacts that other tenants have too."""

    usage_since: Timestamp | None
    audit_rows: int
    shared_artifacts: int


class Erasure(ResponseBody):
    """The data that the deletion of a tenant would erase and keep."""

    erased: Erased
    kept: Kept


class TenantDeleted(Erasure):
    """The id is not given again."""

    id: str
    deleted: Literal[True]
