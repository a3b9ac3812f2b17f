"""Rows of requests that are long past become sums of days, a bounded number of rows at a time."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from datetime import datetime, timedelta

import structlog
from sqlalchemy import delete, select

from loraplex.adapters.errors import LoraplexError
from loraplex.control.db.database import Database, utc_now
from loraplex.control.db.tables import Usage, UsageDay
from loraplex.control.usage.columns import COUNTS

CHUNK_ROWS = 2000
PAUSE_S = 0.1
INTERVAL_S = 3600.0
_KEY = ("at", "tenant_id", "key_id", "adapter", "version", "status")
log = structlog.get_logger("loraplex")


class UsageRollUp:
    """Keeps rows for `keep_days` whole days (UTC), 0: without limit. Several servers may do this on one database."""

    def __init__(
        self, database: Database, keep_days: int, *, clock: Callable[[], datetime] = utc_now
    ) -> None:
        self._database = database
        self._keep_days = keep_days
        self._clock = clock

    def roll_some(self) -> int:
        """The oldest rows, at most `CHUNK_ROWS`: added to their days and deleted in one transaction, in turn with other
        writers, so that no row is added twice, by any server. Returns their number. Raises DatabaseUnavailable,
        DatabaseBusy."""
        if not self._keep_days:
            return 0
        now = self._clock()
        horizon = _midnight(now) - timedelta(days=self._keep_days)
        with self._database.write(ages_caches=False) as session:
            rows = session.scalars(
                select(Usage).where(Usage.at < horizon).order_by(Usage.at).limit(CHUNK_ROWS)
            ).all()
            if not rows:
                return 0
            days: dict[tuple[object, ...], list[int]] = defaultdict(lambda: [0] * len(COUNTS))
            for row in rows:
                key = (_midnight(row.at), row.tenant_id, row.key_id, row.adapter, row.version, row.status)
                sums = days[key]
                counts = (1, row.prompt_tokens, row.cached_tokens, row.completion_tokens)
                sums[:] = [total + count for total, count in zip(sums, counts, strict=True)]
            values = [
                dict(zip((*_KEY, *COUNTS), (*key, *sums), strict=True)) for key, sums in sorted(days.items())
            ]
            insert = self._database.insert(UsageDay)
            added = {name: getattr(UsageDay, name) + insert.excluded[name] for name in COUNTS}
            session.execute(insert.on_conflict_do_update(index_elements=_KEY, set_=added), values)
            session.execute(
                delete(Usage).where(Usage.id.in_([row.id for row in rows])),
                execution_options={"synchronize_session": False},
            )
        return len(rows)

    async def run(self, *, interval_s: float = INTERVAL_S) -> None:
        """Look every so often until cancelled."""
        while True:
            total = 0
            try:
                while rolled := await self._database.run(self.roll_some):
                    total += rolled
                    await asyncio.sleep(PAUSE_S)
            except LoraplexError as error:
                log.warning("usage_not_rolled_up", reason=error.message)
            except Exception as error:
                # To be started again would be to try again within a minute, at the same rows.
                log.error("usage_not_rolled_up", exc_info=error)
            if total:
                log.info("usage_rolled_up", rows=total)
            await asyncio.sleep(interval_s)


def _midnight(at: datetime) -> datetime:
    return at.replace(hour=0, minute=0, second=0, microsecond=0)
