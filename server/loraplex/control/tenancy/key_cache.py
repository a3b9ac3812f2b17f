"""The caller of a request: secrets to principals, from memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from sqlalchemy import select

from loraplex.control import rules
from loraplex.control.db.clock import DatabaseNow
from loraplex.control.db.database import Database
from loraplex.control.db.read_through import DEFAULT_STALENESS_S, ReadThrough
from loraplex.control.db.tables import ApiKey, Tenant
from loraplex.control.errors import InvalidKey, SecretUnusable, TenantSuspended
from loraplex.control.tenancy.keys import key_subject
from loraplex.control.tenancy.secrets import hash_secret, key_id_of, same
from loraplex.control.tenancy.tenants import tenant_subject
from loraplex.control.types import Principal

_NO_HASH = "0" * 64
"""Compared with where there is no key, so that an id that does not exist takes the same work."""


@dataclass(frozen=True, slots=True)
class _Known:
    """The principal of a secret, until when by our monotonic clock, and whether its tenant is suspended."""

    key_id: str
    tenant_id: str
    principal: Principal
    ends_at: float | None
    is_suspended: bool


class KeyCache:
    """`authenticate` from memory: at most `ttl_s` behind the database, not at all behind changes that this process
    makes, and `staleness_s` more while the database cannot be reached. A key ends by the database's clock: the time
    that it had left when it was read runs down here, and is looked at on every call. At most `capacity` keys are
    remembered, and as many strings that are none, all by their hash."""

    def __init__(
        self,
        database: Database,
        pepper: bytes,
        admin_token: str,
        *,
        ttl_s: float = 2.0,
        staleness_s: float = DEFAULT_STALENESS_S,
        capacity: int = 10_000,
        clock: Callable[[], float] = time.monotonic,
        on_use: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`on_use` is called with the id of the key at each use; it must return at once."""
        self._database = database
        self._pepper = pepper
        if not admin_token:
            raise SecretUnusable("The admin token is empty: then every caller would be the admin.")
        self._admin_hash = hash_secret(pepper, admin_token)
        self._clock = clock
        self._on_use = on_use
        self._known: ReadThrough[str, _Known] = ReadThrough(
            database,
            ttl_s=ttl_s,
            staleness_s=staleness_s,
            capacity=capacity,
            subjects=lambda known: (key_subject(known.key_id), tenant_subject(known.tenant_id)),
            clock=clock,
        )

    async def authenticate(self, secret: str) -> Principal:
        """Raises InvalidKey, in the same words for every reason; TenantSuspended for a valid key; DatabaseUnavailable
        and DatabaseBusy for a key that is not remembered while the database does not answer."""
        try:
            hashed = hash_secret(self._pepper, secret)
        except UnicodeEncodeError:
            raise _invalid_key() from None
        if same(hashed, self._admin_hash):
            return Principal(None, None, frozenset(), is_admin=True)
        key_id = key_id_of(secret)
        # What has not the form of a key costs no thread and no memory.
        known = None if key_id is None else await self._known.get(hashed, self._look_up, key_id, hashed)
        if known is None or (known.ends_at is not None and known.ends_at <= self._clock()):
            raise _invalid_key()
        if known.is_suspended:
            raise TenantSuspended
        self._on_use(known.key_id)
        return known.principal

    def _look_up(self, key_id: str, hashed: str) -> _Known | None:
        asked_at = self._clock()
        query = select(ApiKey, Tenant, DatabaseNow()).join(Tenant, Tenant.id == ApiKey.tenant_id)
        with self._database.read() as session:
            found = session.execute(query.where(ApiKey.id == key_id)).one_or_none()
        key = None if found is None else found[0]
        is_current = same(hashed, _NO_HASH if key is None else key.secret_hash)
        is_previous = same(hashed, (None if key is None else key.previous_hash) or _NO_HASH)
        if found is None or not (is_current or is_previous):
            return None
        key, tenant, now = found
        ends = [key.expires_at] + ([] if is_current else [key.previous_valid_until])
        left_s = min(((end - now).total_seconds() for end in ends if end is not None), default=None)
        if key.revoked_at is not None or (left_s is not None and left_s <= 0):
            return None
        principal = principal_of(key, tenant)
        ends_at = None if left_s is None else asked_at + left_s
        return _Known(key.id, key.tenant_id, principal, ends_at, tenant.suspended_at is not None)


class KeysById:
    """Callers of requests that a key has left for later, by its id in place of a secret: what the key may do by
    then."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def authenticate(self, secret: str) -> Principal:
        """Raises InvalidKey where the key has ended; TenantSuspended, DatabaseUnavailable, DatabaseBusy."""
        return await self._database.look_up(self._look_up, secret)

    def _look_up(self, key_id: str) -> Principal:
        query = select(ApiKey, Tenant, DatabaseNow()).join(Tenant, Tenant.id == ApiKey.tenant_id)
        with self._database.read() as session:
            found = session.execute(query.where(ApiKey.id == key_id)).one_or_none()
        if found is None or found[0].revoked_at is not None:
            raise _invalid_key()
        key, tenant, now = found
        if key.expires_at is not None and key.expires_at <= now:
            raise _invalid_key()
        if tenant.suspended_at is not None:
            raise TenantSuspended
        return principal_of(key, tenant)


def principal_of(key: ApiKey, tenant: Tenant) -> Principal:
    """The caller who has this key of this tenant."""
    return Principal(
        tenant_id=key.tenant_id,
        key_id=key.id,
        scopes=frozenset(key.scopes),
        models=None if key.models is None else frozenset(key.models),
        weight=tenant.weight,
        key_limits=rules.read_limits(key.limits),
        tenant_limits=rules.read_limits(tenant.limits),
    )


def _invalid_key() -> InvalidKey:
    return InvalidKey("Incorrect API key provided, or it has expired or was revoked.")
