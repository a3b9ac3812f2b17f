"""API keys: made, changed, rotated, revoked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from loraplex.control import rules
from loraplex.control.audit.recorder import LOCAL, Actor, FreeText, record
from loraplex.control.db.clock import database_now
from loraplex.control.db.database import Database, note_change
from loraplex.control.db.tables import ApiKey
from loraplex.control.errors import InvalidValue, KeyNotFound
from loraplex.control.limits.budget_store import budget_states
from loraplex.control.tenancy.secrets import hash_secret, new_key_secret
from loraplex.control.tenancy.tenants import require_tenant, tenant_target
from loraplex.control.types import ADAPTER_LIMITS, SCOPES, BudgetState, KeyInfo, KeyState, Limits, Page

MAX_GRACE_S = 30 * 86400
MAX_MODELS = 1000
_RIGHTS = frozenset({"scopes", "models", "expires_at"})
"""Changes of these may take a right away, which must not be served from memory while the database is gone."""


class Keys:
    """All calls are synchronous and atomic. A secret is returned once, by the call that makes it. What changes
    something is recorded with the actor, `by`."""

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
        by: Actor = LOCAL,
    ) -> tuple[KeyInfo, str]:
        """The key and its secret. Raises InvalidValue, TenantNotFound."""
        secret = new_key_secret()
        row = ApiKey(
            id=secret.key_id,
            tenant_id=tenant_id,
            name=rules.check_text(name, "name"),
            secret_hash=hash_secret(self._pepper, secret.text),
            scopes=_check_scopes(scopes),
            models=_check_models(models),
            limits=rules.limits_as_dict(_of_a_key(rules.read_limits(limits))),
        )
        with self._database.write() as session:
            require_tenant(session, tenant_id)
            row.created_at = database_now(session)
            row.expires_at = _check_expiry(expires_at, row.created_at)
            session.add(row)
            record(session, by, "key.create", _target(row), tenant_id=tenant_id, after=_shown(row))
            session.flush()
            return key_infos(session, [row])[0], secret.text

    def list(
        self,
        tenant_id: str,
        *,
        limit: int = rules.DEFAULT_PAGE,
        cursor: str | None = None,
        newest_first: bool = False,
    ) -> Page[KeyInfo]:
        """List keys by id, or those that were made last first; revoked ones too."""
        after = rules.read_cursor(cursor)
        order = (ApiKey.created_at.desc(), ApiKey.id.desc()) if newest_first else (ApiKey.id,)
        query = select(ApiKey).where(ApiKey.tenant_id == tenant_id).order_by(*order)
        query = query.limit(rules.check_page_limit(limit) + 1)
        with self._database.read() as session:
            require_tenant(session, tenant_id)
            if after is not None and newest_first:
                last = session.get(ApiKey, after)
                if last is None or last.tenant_id != tenant_id:
                    raise rules.InvalidCursor("The cursor is not one that this list gave.", param="cursor")
                made, same = last.created_at, ApiKey.created_at == last.created_at
                query = query.where((ApiKey.created_at < made) | (same & (ApiKey.id < after)))
            elif after is not None:
                query = query.where(ApiKey.id > after)
            infos = key_infos(session, session.scalars(query).all())
            return rules.make_page(infos, limit, lambda info: info.id, lambda info: info)

    def get(self, tenant_id: str, key_id: str) -> KeyInfo:
        with self._database.read() as session:
            return key_infos(session, [_require_key(session, tenant_id, key_id)])[0]

    def update(
        self, tenant_id: str, key_id: str, changes: Mapping[str, Any], *, by: Actor = LOCAL
    ) -> KeyInfo:
        """Set `name`, `scopes`, `models`, `limits` or `expires_at`, as `create` takes them; a given `limits` replaces
        only the limits that it names, and `scopes` of None stay. Raises InvalidValue, TenantNotFound, KeyNotFound."""
        with self._database.write() as session:
            row = _require_living_key(session, tenant_id, key_id)
            before = _shown(row)
            if "name" in changes:
                row.name = rules.check_text(changes["name"], "name")
            if changes.get("scopes") is not None:
                row.scopes = _check_scopes(changes["scopes"])
            if "models" in changes:
                row.models = _check_models(changes["models"])
            if "limits" in changes:
                row.limits = rules.limits_as_dict(
                    _of_a_key(rules.change_limits(row.limits, changes["limits"]))
                )
            if "expires_at" in changes:
                row.expires_at = _check_expiry(changes["expires_at"], database_now(session))
            session.flush()
            after = _shown(row)
            record(session, by, "key.update", _target(row), tenant_id=tenant_id, before=before, after=after)
            if not _RIGHTS.isdisjoint(changes):
                note_change(session, key_subject(key_id))
            return key_infos(session, [row])[0]

    def rotate(
        self, tenant_id: str, key_id: str, *, grace_seconds: int = 0, by: Actor = LOCAL
    ) -> tuple[KeyInfo, str]:
        """A new secret for the same key; the old one works for `grace_seconds` more by the database's clock. The one
        before that ends now, if it had a grace time left: there are two secrets at most."""
        if not 0 <= grace_seconds <= MAX_GRACE_S:
            raise InvalidValue(f"'grace_seconds' is from 0 to {MAX_GRACE_S}.", param="grace_seconds")
        secret = new_key_secret(key_id)
        with self._database.write() as session:
            row = _require_living_key(session, tenant_id, key_id)
            end = database_now(session) + timedelta(seconds=grace_seconds) if grace_seconds else None
            before = {"previous_valid_until": _time(row.previous_valid_until)}
            row.previous_hash = row.secret_hash if grace_seconds else None
            row.previous_valid_until = end
            row.secret_hash = hash_secret(self._pepper, secret.text)
            after = {"previous_valid_until": _time(end)}
            record(session, by, "key.rotate", _target(row), tenant_id=tenant_id, before=before, after=after)
            note_change(session, key_subject(key_id))
            return key_infos(session, [row])[0], secret.text

    def revoke(self, tenant_id: str, key_id: str, *, by: Actor = LOCAL) -> KeyInfo:
        """Revoke for good. Revoking again changes nothing."""
        with self._database.write() as session:
            row = _require_key(session, tenant_id, key_id)
            before = {"revoked_at": _time(row.revoked_at)}
            row.revoked_at = row.revoked_at or database_now(session)
            after = {"revoked_at": _time(row.revoked_at)}
            record(session, by, "key.revoke", _target(row), tenant_id=tenant_id, before=before, after=after)
            note_change(session, key_subject(key_id))
            return key_infos(session, [row])[0]


def key_subject(key_id: str) -> str:
    """The name that `note_change` has for a change of a key's rights."""
    return f"key:{key_id}"


def _target(row: ApiKey) -> str:
    """Its name in the audit log."""
    return f"{tenant_target(row.tenant_id)}/keys/{row.id}"


def _shown(row: ApiKey) -> dict[str, Any]:
    """The key as the audit log shows it."""
    return {
        "name": FreeText(row.name),
        "scopes": row.scopes,
        "models": row.models,
        "limits": row.limits,
        "expires_at": _time(row.expires_at),
    }


def _time(moment: datetime | None) -> str | None:
    """The time as the audit log shows it."""
    return None if moment is None else moment.astimezone(UTC).isoformat()


def _require_key(session: Session, tenant_id: str, key_id: str) -> ApiKey:
    require_tenant(session, tenant_id)
    row = session.get(ApiKey, key_id)
    if row is None or row.tenant_id != tenant_id:
        raise KeyNotFound(f"The tenant '{tenant_id}' has no key '{key_id[:80]}'.")
    return row


def _require_living_key(session: Session, tenant_id: str, key_id: str) -> ApiKey:
    row = _require_key(session, tenant_id, key_id)
    if row.revoked_at is not None:
        raise InvalidValue("The key is revoked; create a new one.", param="key")
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


def _of_a_key(limits: Limits) -> Limits:
    if any(getattr(limits, name) is not None for name in ADAPTER_LIMITS):
        listed = f"{', '.join(ADAPTER_LIMITS[:-1])} and {ADAPTER_LIMITS[-1]}"
        raise InvalidValue(f"{listed} are limits of a tenant, not of a key.", param="limits")
    return limits


def _check_expiry(moment: datetime | None, now: datetime) -> datetime | None:
    if moment is None:
        return None
    if moment.tzinfo is None:
        raise InvalidValue(
            "'expires_at' needs a time zone, for example 2030-01-31T12:00:00Z.", param="expires_at"
        )
    if moment <= now:
        raise InvalidValue("'expires_at' lies in the past.", param="expires_at")
    return moment.astimezone(UTC)


def key_infos(session: Session, rows: Sequence[ApiKey]) -> list[KeyInfo]:
    budgets = budget_states(session, "key", {row.id: rules.read_limits(row.limits) for row in rows})
    now = database_now(session)
    return [_key_info(row, budgets.get(row.id), now) for row in rows]


def _state(row: ApiKey, now: datetime) -> KeyState:
    if row.revoked_at is not None:
        return "revoked"
    return "expired" if row.expires_at is not None and row.expires_at <= now else "valid"


def _key_info(row: ApiKey, budget: BudgetState | None, now: datetime) -> KeyInfo:
    return KeyInfo(
        id=row.id,
        tenant_id=row.tenant_id,
        state=_state(row, now),
        name=row.name,
        scopes=tuple(row.scopes),
        models=None if row.models is None else tuple(row.models),
        limits=rules.read_limits(row.limits),
        created_at=row.created_at,
        expires_at=row.expires_at,
        revoked_at=row.revoked_at,
        previous_valid_until=row.previous_valid_until,
        last_used_at=row.last_used_at,
        budget=budget,
    )
