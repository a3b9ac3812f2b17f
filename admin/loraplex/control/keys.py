"""API keys, and who is calling."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from loraplex.control import rules
from loraplex.control.cache import ReadThrough
from loraplex.control.database import Database, utc_now
from loraplex.control.errors import InvalidKey, InvalidValue, KeyNotFound, SecretUnusable
from loraplex.control.secrets import hash_secret, key_id_of, new_key_secret, same
from loraplex.control.tables import ApiKey, Tenant
from loraplex.control.tenants import require_tenant
from loraplex.control.types import SCOPES, KeyInfo, Limits, Page, Principal

MAX_GRACE_S = 30 * 86400
MAX_MODELS = 1000


class Keys:
    """All calls are synchronous and atomic. A secret is returned once, by the call that makes it."""

    def __init__(self, database: Database, pepper: bytes) -> None:
        self._database = database
        self._pepper = pepper

    def create(
        self,
        tenant_id: str,
        *,
        name: str | None = None,
        scopes: Sequence[str] | None = None,
        models: Sequence[str] | None = None,
        limits: Mapping[str, Any] | None = None,
        expires_at: datetime | None = None,
    ) -> tuple[KeyInfo, str]:
        """The key and its secret. Raises InvalidValue, TenantNotFound."""
        now = utc_now()
        secret = new_key_secret()
        row = ApiKey(
            id=secret.key_id,
            tenant_id=tenant_id,
            name=rules.check_text(name, "name"),
            secret_hash=hash_secret(self._pepper, secret.text),
            scopes=_check_scopes(scopes),
            models=_check_models(models),
            limits=rules.limits_as_dict(_key_limits(limits)),
            created_at=now,
            expires_at=_check_expiry(expires_at, now),
        )
        with self._database.write() as session:
            require_tenant(session, tenant_id)
            session.add(row)
        return key_info(row), secret.text

    def list(
        self, tenant_id: str, *, limit: int = rules.DEFAULT_PAGE, cursor: str | None = None
    ) -> Page[KeyInfo]:
        """By id, revoked ones too."""
        after = rules.read_cursor(cursor)
        query = select(ApiKey).where(ApiKey.tenant_id == tenant_id).order_by(ApiKey.id)
        query = query.limit(rules.check_page_limit(limit) + 1)
        if after is not None:
            query = query.where(ApiKey.id > after)
        with self._database.read() as session:
            require_tenant(session, tenant_id)
            return rules.make_page(session.scalars(query).all(), limit, lambda row: row.id, key_info)

    def get(self, tenant_id: str, key_id: str) -> KeyInfo:
        with self._database.read() as session:
            return key_info(_require_key(session, tenant_id, key_id))

    def rotate(self, tenant_id: str, key_id: str, *, grace_seconds: int = 0) -> tuple[KeyInfo, str]:
        """A new secret for the same key; the old one works for `grace_seconds` more."""
        if not 0 <= grace_seconds <= MAX_GRACE_S:
            raise InvalidValue(f"'grace_seconds' is from 0 to {MAX_GRACE_S}.", param="grace_seconds")
        now = utc_now()
        secret = new_key_secret(key_id)
        with self._database.write() as session:
            row = _require_key(session, tenant_id, key_id)
            if row.revoked_at is not None:
                raise InvalidValue("The key is revoked; create a new one.", param="key")
            row.previous_hash = row.secret_hash if grace_seconds else None
            row.previous_valid_until = now + timedelta(seconds=grace_seconds) if grace_seconds else None
            row.secret_hash = hash_secret(self._pepper, secret.text)
            return key_info(row), secret.text

    def revoke(self, tenant_id: str, key_id: str) -> KeyInfo:
        """For ever. Revoking again changes nothing."""
        with self._database.write() as session:
            row = _require_key(session, tenant_id, key_id)
            row.revoked_at = row.revoked_at or utc_now()
            return key_info(row)


@dataclass(frozen=True, slots=True)
class _Known:
    """Whom a secret stands for, and until when."""

    principal: Principal
    expires_at: datetime | None


class KeyCache:
    """`authenticate` from memory: at most `ttl_s` behind the database, not at all behind changes that this
    process makes. Expiry is looked at on every call. At most `capacity` keys are remembered, and as many strings
    that are none, all by their hash."""

    def __init__(
        self,
        database: Database,
        pepper: bytes,
        admin_token: str,
        *,
        ttl_s: float = 2.0,
        capacity: int = 10_000,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = utc_now,
    ) -> None:
        self._database = database
        self._pepper = pepper
        if not admin_token:
            raise SecretUnusable("The admin token is empty: then everybody would be the admin.")
        self._admin_hash = hash_secret(pepper, admin_token)
        self._now = now
        self._known: ReadThrough[str, _Known] = ReadThrough(
            database, ttl_s=ttl_s, capacity=capacity, clock=clock
        )

    async def authenticate(self, secret: str) -> Principal:
        """Raises InvalidKey, in the same words for every reason."""
        try:
            hashed = hash_secret(self._pepper, secret)
        except UnicodeEncodeError:
            raise _invalid_key() from None
        if same(hashed, self._admin_hash):
            return Principal(None, None, frozenset(), is_admin=True)
        key_id = key_id_of(secret)
        # What has not the form of a key costs no thread and no memory.
        known = None if key_id is None else await self._known.get(hashed, self._look_up, key_id, hashed)
        if known is None or (known.expires_at is not None and known.expires_at <= self._now()):
            raise _invalid_key()
        return known.principal

    @property
    def num_remembered(self) -> int:
        return len(self._known)

    def _look_up(self, key_id: str, hashed: str) -> _Known | None:
        with self._database.read() as session:
            row = session.get(ApiKey, key_id)
            tenant = None if row is None else session.get(Tenant, row.tenant_id)
            if row is None or tenant is None or row.revoked_at is not None:
                return None
            ends = [row.expires_at]
            if not same(hashed, row.secret_hash):
                if row.previous_hash is None or not same(hashed, row.previous_hash):
                    return None
                ends.append(row.previous_valid_until)
            principal = Principal(
                tenant_id=row.tenant_id,
                key_id=row.id,
                scopes=frozenset(row.scopes),
                models=None if row.models is None else frozenset(row.models),
                weight=tenant.weight,
                key_limits=rules.read_limits(row.limits),
                tenant_limits=rules.read_limits(tenant.limits),
            )
            return _Known(principal, min((end for end in ends if end is not None), default=None))


def _invalid_key() -> InvalidKey:
    return InvalidKey("Incorrect API key provided, or it has expired or was revoked.")


def _require_key(session: Session, tenant_id: str, key_id: str) -> ApiKey:
    require_tenant(session, tenant_id)
    row = session.get(ApiKey, key_id)
    if row is None or row.tenant_id != tenant_id:
        raise KeyNotFound(f"The tenant '{tenant_id}' has no key '{key_id[:80]}'.")
    return row


def _check_scopes(scopes: Sequence[str] | None) -> list[str]:
    if scopes is None:
        return ["inference"]
    if not scopes or not set(SCOPES).issuperset(scopes):
        raise InvalidValue(f"'scopes' is a list of one or more of {', '.join(SCOPES)}.", param="scopes")
    return sorted(set(scopes))


def _check_models(models: Sequence[str] | None) -> list[str] | None:
    if models is None:
        return None
    if not models or len(models) > MAX_MODELS or any(not 0 < len(name) <= 300 for name in models):
        raise InvalidValue(
            f"'models' is null (all) or a list of 1 to {MAX_MODELS} names of models.", param="models"
        )
    return sorted(set(models))


def _key_limits(limits: Mapping[str, Any] | None) -> Limits:
    read = rules.read_limits(limits)
    if read.max_adapters is not None or read.max_adapter_bytes is not None:
        raise InvalidValue(
            "max_adapters and max_adapter_bytes are limits of a tenant, not of a key.", param="limits"
        )
    return read


def _check_expiry(moment: datetime | None, now: datetime) -> datetime | None:
    if moment is None:
        return None
    if moment.tzinfo is None:
        raise InvalidValue(
            "'expires_at' needs a time zone, such as 2030-01-31T12:00:00Z.", param="expires_at"
        )
    if moment <= now:
        raise InvalidValue("'expires_at' lies in the past.", param="expires_at")
    return moment.astimezone(UTC)


def key_info(row: ApiKey) -> KeyInfo:
    return KeyInfo(
        id=row.id,
        tenant_id=row.tenant_id,
        name=row.name,
        scopes=tuple(row.scopes),
        models=None if row.models is None else tuple(row.models),
        limits=rules.read_limits(row.limits),
        created_at=row.created_at,
        expires_at=row.expires_at,
        revoked_at=row.revoked_at,
        previous_valid_until=row.previous_valid_until,
    )
