"""Watched releases over a real database, with a time that tests move by hand."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from loraplex.control.db.database import Database
from loraplex.control.db.release_tables import (
    Lease,
    ReleaseOutcome,
    ReleaseRun,
    RunningArmRow,
    WebhookDelivery,
)
from loraplex.control.db.tables import AuditRow, Release
from loraplex.control.leases import NEVER
from loraplex.control.release_types import ReleaseInfo, ReleasePlan, ReleaseTarget, Sticky
from loraplex.control.usage.outcome import key_hash
from loraplex.lifecycle.release_guard.guard import Guard, Verdict
from loraplex.lifecycle.releases.look import Change
from loraplex.lifecycle.releases.rounds import Rounds
from support.control.plane import ControlPlane

GUARD: dict[str, Any] = {"min_requests": 5}
STEPS = [{"weight": 50, "for_seconds": 60}, {"weight": 75, "for_seconds": 60}]


@dataclass
class Watched:
    """The release of `acme`'s `pirate`. Seconds count from when it was put."""

    plane: ControlPlane
    seconds: float = 0.0
    changes: list[Change] = field(default_factory=list)
    began: float = 0.0
    _numbers: Any = field(default_factory=itertools.count)

    def put(self, plan: ReleasePlan, *, sticky: Sticky = "none", **weights: int) -> ReleaseInfo:
        targets = [ReleaseTarget(version, weight) for version, weight in weights.items()]
        info = self.plane.releases.put("acme", "pirate", targets, sticky=sticky, plan=plan)
        assert info.run is not None
        self.began, self.seconds = info.run.since, 0.0
        return info

    def now(self, _: Session | None = None) -> float:
        return self.began + self.seconds

    def server(self, name: str = "a", database: Database | None = None, **options: Any) -> Rounds:
        return Rounds(database or self.plane.database, name, now=self.now, **options)

    def round(self, server: Rounds, *, after: float = 1.0) -> list[Change]:
        """The changes of one round, after this many seconds."""
        self.seconds += after
        found: list[Change] = []
        server.round(found.append)
        self.changes += found
        return found

    def ended(
        self,
        version: int,
        count: int,
        *,
        status: str = "stop",
        total_s: float = 0.5,
        users: int | None = None,
    ) -> None:
        """Requests that have just ended, of as many users; or of the same `users` each time."""
        with self.plane.database.write() as session:
            for index in range(count):
                number = next(self._numbers)
                user = number if users is None else version * users + index % users
                session.add(
                    ReleaseOutcome(
                        id=f"r{number}",
                        tenant_id="acme",
                        name="pirate",
                        version=version,
                        key_hash=key_hash(f"user-{user}") % 2**63,
                        started_at=self.now() - min(total_s, self.seconds),
                        ended_at=self.now(),
                        status=status,
                        first_token_s=0.1,
                        inter_token_s=0.01,
                        output_tokens=20.0,
                    )
                )

    def running(self, version: int, began: Iterable[float], *, age_s: float = 0.0) -> None:
        """A server's row of running requests of other users, of seconds in which they began, as old as `age_s`."""
        oldest = [[key_hash(f"user-{next(self._numbers)}") % 2**63, self.began + at] for at in began]
        at = datetime.fromtimestamp(self.now() - age_s, UTC)
        with self.plane.database.write() as session:
            session.merge(
                RunningArmRow(
                    server_id="s",
                    tenant_id="acme",
                    name="pirate",
                    version=version,
                    count=len(oldest),
                    oldest=oldest,
                    at=at,
                )
            )

    def verdict(self) -> Verdict:
        """Of the guard as it was kept."""
        with self.plane.database.read() as session:
            return Guard.from_json(session.scalars(select(ReleaseRun.guard_state)).one()).verdict()

    def release(self) -> ReleaseInfo:
        return self.plane.releases.get("acme", "pirate")

    def weights(self) -> dict[str, int]:
        return {target.version: target.weight for target in self.release().targets}

    def end_lease(self) -> None:
        with self.plane.database.write() as session:
            session.execute(update(Lease).values(until=NEVER + timedelta(seconds=1)))

    def stored(self) -> dict[str, list[Any]]:
        """All that a change of a release writes, and `counted`: the candidate's requests that its guard has seen."""
        of = ReleaseRun
        queries = {
            "revisions": select(Release.revision, Release.origin).order_by(Release.revision),
            "audit": select(AuditRow.actor, AuditRow.action)
            .where(AuditRow.action.like("release.%"))
            .order_by(AuditRow.seq),
            "run": select(of.revision, of.status, of.step, of.since, of.reason),
            "outcomes": select(ReleaseOutcome.id).order_by(ReleaseOutcome.id),
            "deliveries": select(WebhookDelivery.event, WebhookDelivery.attempts),
        }
        with self.plane.database.read() as session:
            found = {name: [tuple(row) for row in session.execute(query)] for name, query in queries.items()}
            states = session.scalars(select(of.guard_state)).all()
        return found | {"counted": [0 if it is None else Guard.from_json(it).num_requests for it in states]}
