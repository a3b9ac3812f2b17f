"""API keys."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from loraplex.admin.schemas.fields import (
    GivenTime,
    Label,
    PageQuery,
    PlainText,
    RequestBody,
    ResponseBody,
    Timestamp,
)
from loraplex.admin.schemas.limits import BudgetState, KeyLimits, Limits, NewKeyLimits
from loraplex.control.tenancy.keys import MAX_GRACE_S, MAX_MODELS
from loraplex.control.types import KeyState, Scope

ModelName = Annotated[PlainText, Field(min_length=1, max_length=200)]
Scopes = Annotated[list[Scope], Field(min_length=1, max_length=8)]
Models = Annotated[list[ModelName], Field(min_length=1, max_length=MAX_MODELS)]


class KeyCreate(RequestBody):
    name: Label | None = None
    scopes: Scopes = Field(default=["inference"])
    models: Models | None = None
    limits: NewKeyLimits = NewKeyLimits()
    expires_at: GivenTime | None = None


class KeyChange(RequestBody):
    """Only the given fields change. In `limits` too only the given ones do, and null removes a limit. `models` of null:
    all of the tenant's; `expires_at` of null: never."""

    name: Label | None = None
    scopes: Scopes | None = None
    models: Models | None = None
    limits: KeyLimits | None = None
    expires_at: GivenTime | None = None


class KeyRotate(RequestBody):
    grace_seconds: Annotated[int, Field(ge=0, le=MAX_GRACE_S)] = 0


class Key(ResponseBody):
    """Never holds the secret, which begins with `lpx_<id>_`. `state` is by the database's clock. After a rotation the
    old one works until `previous_valid_until`. `last_used_at` is up to a minute old; null if the key was never used."""

    id: str
    tenant_id: str
    state: KeyState
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


class KeyQuery(PageQuery):
    """The query of a list of keys. `order`: by id, or those that were made last first. A cursor goes on in the order
    that gave it."""

    order: Literal["id", "newest"] = "id"


class KeyPage(ResponseBody):
    data: list[Key]
    next_cursor: str | None
