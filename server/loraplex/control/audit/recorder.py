"""The audit log: who changed what, from where, and how it was before. A row is written by the transaction that makes
the change, so that there is neither without the other; each holds the hash of the one before it."""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from sqlalchemy import insert, select, update
from sqlalchemy.orm import Session

from loraplex.adapters.errors import LoraplexError
from loraplex.control.db.clock import database_now
from loraplex.control.db.tables import AuditHead, AuditRow, AuditText
from loraplex.control.release_types import ActorKind

GENESIS = "0" * 64
"""The previous hash of the first row."""
HEAD = 1
COMMITMENT = "text_sha256"
MAX_TARGET = 400
_SECRET = re.compile(r"(lpx-admin-|lpx_[a-z0-9]{1,32}_)[A-Za-z0-9_-]+")

Outcome = Literal["done", "refused", "failed"]


class AuditBroken(LoraplexError):
    """The log has no head to go on from. Nothing can be changed that could not be recorded."""

    code = "audit_broken"


@dataclass(frozen=True, slots=True)
class Actor:
    """The actor: `admin` (the admin token), `key` (a tenant's key), `local` (a command on a server's own machine), or
    `guard` (a server by itself, for a release that it watches). `source` is the address that the call came from;
    `request_id` what its answer's x-request-id says."""

    kind: ActorKind
    tenant_id: str | None = None
    key_id: str | None = None
    source: str | None = None
    request_id: str | None = None
    scopes: frozenset[str] = frozenset()
    """The scopes of a key."""

    @property
    def may_train(self) -> bool:
        """Whether the caller may push to a series."""
        return self.kind != "key" or "adapters:train" in self.scopes

    @property
    def only_trains(self) -> bool:
        """Whether the caller may push to a series, and make no other version."""
        return self.kind == "key" and "adapters:train" in self.scopes and "adapters:write" not in self.scopes


LOCAL = Actor("local")
GUARD = Actor("guard")


@dataclass(frozen=True, slots=True)
class FreeText:
    """Words of people, as a value at the top of `before` or `after`. The hashed row holds a salted commitment to
    them; they themselves are erased with their tenant."""

    text: str | None


def record(
    session: Session,
    by: Actor,
    action: str,
    target: str,
    *,
    tenant_id: str | None,
    before: Mapping[str, Any] | None = None,
    after: Mapping[str, Any] | None = None,
    outcome: Outcome = "done",
    code: str | None = None,
) -> None:
    """The next row, within a `Database.write()`, which lets no other transaction write until it ends. Values are what
    JSON has, and `FreeText`. What looks like one of our secrets is cut. Raises AuditBroken."""
    head = read_head(session)
    if head is None:
        raise AuditBroken("The audit log has lost its head; see 'loraplex audit verify'.")
    seq = head[0] + 1
    shown_before, texts = _side("before", before)
    shown_after, more = _side("after", after)
    row: dict[str, Any] = {
        "seq": seq,
        "time": database_now(session),
        "actor": by.kind,
        "actor_tenant_id": by.tenant_id,
        "actor_key_id": by.key_id,
        "source": by.source and by.source[:64],
        "request_id": by.request_id and without_secrets(by.request_id)[:128],
        "action": action,
        "tenant_id": tenant_id,
        "target": without_secrets(target)[:MAX_TARGET],
        "outcome": outcome,
        "code": code,
        "before": shown_before,
        "after": shown_after,
        "previous_hash": head[1],
    }
    row["hash"] = row_hash(row)
    session.execute(insert(AuditRow), row)
    if texts or more:
        common: dict[str, Any] = {"seq": seq, "tenant_id": tenant_id}
        session.execute(insert(AuditText), [common | text for text in [*texts, *more]])
    session.execute(update(AuditHead).where(AuditHead.id == HEAD).values(seq=seq, hash=row["hash"]))


def _side(side: str, values: Mapping[str, Any] | None) -> tuple[str | None, list[dict[str, str]]]:
    """`before` or `after` as it is hashed, and its texts with their places and salts."""
    if values is None:
        return None, []
    kept: dict[str, Any] = {}
    texts = []
    for name, value in values.items():
        kept[name] = value
        if isinstance(value, FreeText):
            kept[name] = None
            if value.text is not None:
                text, salt = without_secrets(value.text), secrets.token_hex(16)
                kept[name] = {COMMITMENT: commitment(salt, text)}
                texts.append({"place": f"{side}.{name}", "salt": salt, "text": text})
    return without_secrets(canonical(kept)), texts


def row_hash(row: Mapping[str, Any]) -> str:
    """SHA-256 in hex over the canonical JSON of all columns but `hash`, that of the row before being one of them.
    Raises TypeError and ValueError for values that no row has."""
    fields = {name: row[name] for name in _HASHED}
    moment: datetime = fields["time"]
    fields["time"] = moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    return hashlib.sha256(canonical(fields).encode()).hexdigest()


_HASHED = tuple(column.name for column in AuditRow.__table__.columns if column.name != "hash")


def canonical(value: Any) -> str:
    """JSON in one spelling: keys in order, no blanks, ASCII."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def commitment(salt: str, text: str) -> str:
    """SHA-256 in hex of the salt and the text, which cannot be guessed without the salt."""
    return hashlib.sha256(f"{salt}:{text}".encode()).hexdigest()


def without_secrets(text: str) -> str:
    """An admin token or a key in a wrong place, for example a path, is cut to the part that names it."""
    return _SECRET.sub(r"\1***", text)


def read_head(session: Session) -> tuple[int, str] | None:
    """Number of rows and hash of the last one; None where the head is lost."""
    found = session.execute(select(AuditHead.seq, AuditHead.hash).where(AuditHead.id == HEAD)).one_or_none()
    return None if found is None else (found.seq, found.hash)
