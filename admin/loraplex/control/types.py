"""What the control plane hands to the HTTP layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from loraplex.adapters.ref import AdapterRef

Scope = Literal["inference", "adapters:read", "adapters:write", "usage:read"]
SCOPES: tuple[Scope, ...] = ("inference", "adapters:read", "adapters:write", "usage:read")


@dataclass(frozen=True, slots=True)
class Principal:
    """Who is calling. `tenant_id` and `key_id` are None for the admin token alone, which may do everything
    on the admin plane and nothing on the data plane. `models` None: all of the tenant's."""

    tenant_id: str | None
    key_id: str | None
    scopes: frozenset[str]
    models: frozenset[str] | None = None
    weight: float = 1.0
    is_admin: bool = False


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """What a `model` field stands for. `adapter` None is the base model."""

    requested: str
    adapter: AdapterRef | None


@dataclass(frozen=True, slots=True)
class ModelCard:
    """A row of /v1/models. `root` is the digest of the released version (the base's own name for base)."""

    id: str
    created: int
    root: str
    parent: str | None


@dataclass(frozen=True, slots=True)
class LimitWindow:
    """One window as it stands after a decision, for x-ratelimit-* headers. `reset_s`: seconds until full."""

    limit: int
    remaining: int
    reset_s: float


@dataclass(frozen=True, slots=True)
class Reservation:
    """A reserved share of the limits; settled exactly once by `reservation_id`."""

    reservation_id: str
    requests: LimitWindow | None = None
    tokens: LimitWindow | None = None
    max_output_tokens: int | None = None
