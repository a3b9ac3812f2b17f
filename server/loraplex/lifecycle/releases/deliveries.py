"""Events that the webhook is to be told: they wait in the database until it has answered, or they are given up."""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass
from datetime import timedelta

from sqlalchemy import delete, func, select
from sqlalchemy.orm import Session

from loraplex.control import leases
from loraplex.control.db.clock import database_now
from loraplex.control.db.database import Database
from loraplex.control.db.release_tables import WebhookDelivery
from loraplex.control.leases import Term
from loraplex.lifecycle.releases.look import Change

EVENTS = {"release_promoted": "release.promoted", "release_rolled_back": "release.rolled_back"}
"""Events of the webhook by those of the log; a step is told to nobody."""
MAX_TRIES = 12
FIRST_PAUSE_S = 5.0
LONGEST_PAUSE_S = 3600.0
BATCH = 8
MAX_WAITING = 1000
"""Events of a tenant that wait: of more, the oldest are given up."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """One event. `tries` counts those that failed."""

    id: str
    event: str
    body: bytes
    tries: int


def put_delivery(session: Session, change: Change) -> None:
    """In the transaction that makes the change, so that neither is without the other. Those of the same tenant that are
    more than may wait are removed."""
    event = EVENTS.get(change.event)
    if event is None:
        return
    now, release = database_now(session), change.release
    run = release.run
    row = WebhookDelivery(
        id=uuid.uuid4().hex,
        tenant_id=release.tenant_id,
        event=event,
        body="",
        created_at=now,
        attempts=0,
        next_at=now,
    )
    document = {
        "id": row.id,
        "event": event,
        "created_at": now.isoformat(timespec="seconds").replace("+00:00", "Z"),
        "tenant": release.tenant_id,
        "adapter": release.name,
        "revision": release.revision,
        "targets": [{"version": target.version, "weight": target.weight} for target in release.targets],
        "control": None if run is None else f"v{run.control}",
        "candidate": None if run is None else f"v{run.candidate}",
        "reason": release.reason,
    }
    row.body = json.dumps(document, separators=(",", ":"))
    session.add(row)
    session.flush()
    of = WebhookDelivery
    own = select(of.id).where(of.tenant_id == row.tenant_id).order_by(of.created_at.desc(), of.id)
    surplus = session.scalars(own.offset(MAX_WAITING)).all()
    session.execute(delete(of).where(of.id.in_(surplus)))


def due_deliveries(database: Database) -> list[Delivery]:
    """The deliveries whose time has come, at most `BATCH`: the oldest of each tenant, then the next of each, so that
    none waits for all those of another tenant."""
    of = WebhookDelivery
    turn = func.row_number().over(partition_by=of.tenant_id, order_by=(of.next_at, of.id))
    with database.read() as session:
        due = select(of.id, turn.label("turn")).where(of.next_at <= database_now(session)).subquery()
        query = select(of).join(due, of.id == due.c.id).order_by(due.c.turn, of.next_at, of.id).limit(BATCH)
        return [
            Delivery(row.id, row.event, row.body.encode(), row.attempts) for row in session.scalars(query)
        ]


def record_try(database: Database, term: Term, delivery: Delivery, *, delivered: bool) -> bool:
    """Remove what was delivered, or was tried `MAX_TRIES` times; else it is due again after a pause that doubles.
    Returns whether it was given up. Raises LeaseLost: then another server tries it again."""
    with database.write(ages_caches=False) as session:
        leases.check(session, term)
        row = session.get(WebhookDelivery, delivery.id)
        if row is None:
            return False
        row.attempts += 1
        if delivered or row.attempts >= MAX_TRIES:
            session.delete(row)
            return not delivered
        pause = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (row.attempts - 1))
        row.next_at = database_now(session) + timedelta(seconds=pause)
        return False
