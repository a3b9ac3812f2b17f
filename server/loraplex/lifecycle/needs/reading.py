"""All that the database says of what an operator has to look at, in one reading."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

from loraplex.control.audit.newest import Notice, newest_notices
from loraplex.control.db.clock import database_now
from loraplex.control.db.database import Database
from loraplex.control.tenancy.ending_keys import EndingKeys, ending_keys
from loraplex.control.turns import Turns
from loraplex.lifecycle.needs.releases import ReleasesUnderWay, releases_under_way
from loraplex.lifecycle.needs.thrashing import Thrashing, thrashing_adapters

NOTICES = timedelta(days=1)
"""Age up to which rollbacks and refusals are told."""


@dataclass(frozen=True, slots=True)
class Needs:
    """The rows of each kind."""

    releases: ReleasesUnderWay
    thrashing: Turns[Thrashing]
    ending_keys: Sequence[EndingKeys]
    """Tenants with keys that end."""
    num_ending: int
    """Tenants with such keys, those that are left out too."""
    rolled_back: Turns[Notice]
    """Rollbacks by a guard."""
    failed_checks: Turns[Notice]
    """Versions that failed their check."""
    refused_uploads: Turns[Notice]


def read_needs(database: Database, reloads: Mapping[str, Mapping[str, int]], limit: int) -> Needs:
    """Read at most `limit` rows of each kind, by ten statements, whatever is there. `reloads` as
    `thrashing_adapters` takes them. Raises DatabaseUnavailable, DatabaseBusy."""
    with database.read(report=True) as session:
        now = database_now(session)
        since = now - NOTICES
        keys, num_ending = ending_keys(session, now, limit)
        return Needs(
            releases=releases_under_way(session, now, limit),
            thrashing=thrashing_adapters(session, reloads, limit),
            ending_keys=keys,
            num_ending=num_ending,
            rolled_back=newest_notices(session, "release.rolled_back", "done", since, limit),
            failed_checks=newest_notices(session, "version.check", "refused", since, limit),
            refused_uploads=newest_notices(session, "version.upload", "refused", since, limit),
        )
