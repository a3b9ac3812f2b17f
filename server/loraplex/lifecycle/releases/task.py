"""A server's part in watched releases: it tries to lead, and keeps their versions loaded."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Protocol

import structlog

from loraplex.adapters.errors import LoraplexError
from loraplex.adapters.ref import AdapterRef
from loraplex.control.catalog.releases import Releases
from loraplex.control.db.database import Database
from loraplex.lifecycle.releases.deliveries import Delivery, due_deliveries, record_try
from loraplex.lifecycle.releases.look import Change, RollbackCause
from loraplex.lifecycle.releases.rounds import Rounds, Watched
from loraplex.lifecycle.releases.webhook import Webhook
from loraplex.serving.engines.engines import Engines

INTERVAL_S = 1.0
LOAD_AGAIN_S = 60.0
"""Time after which the arms of a watched release are loaded again, if they were evicted."""
MAX_LOADED = 64
"""Watched releases whose arms are kept loaded."""
log = structlog.get_logger("loraplex")


class ReleaseWatch(Protocol):
    """Counts the changes of releases that this server makes."""

    def rolled_back(self, cause: RollbackCause) -> None: ...
    def round_ended(self, *, num_running: int, leads: bool) -> None: ...


class ReleaseTask:
    """Runs until it is cancelled. While the database does not answer, releases stay as they are."""

    def __init__(
        self,
        rounds: Rounds,
        database: Database,
        releases: Releases,
        watch: ReleaseWatch,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rounds = rounds
        self._database = database
        self._releases = releases
        self._watch = watch
        self._clock = clock
        self._loaded: dict[Watched, float] = {}  # when the engine was last asked for its arms

    async def run(self, engine: Engines, *, interval_s: float = INTERVAL_S) -> None:
        try:
            while True:
                await asyncio.sleep(interval_s)
                await self.round(engine)
        finally:
            with contextlib.suppress(LoraplexError):
                await asyncio.shield(self._database.run(self._rounds.give_up))

    async def round(self, engine: Engines) -> None:
        """One round of looks, and loads of versions that it shows to be needed."""
        try:
            await self._database.run(self._rounds.round, self._on_change)
            await self._load(engine)
        except LoraplexError as error:
            log.debug("releases_not_followed", reason=error.message)
        running = sum(watched.status == "running" for watched in self._rounds.watched)
        self._watch.round_ended(num_running=running, leads=self._rounds.term is not None)

    def _on_change(self, change: Change) -> None:
        release = change.release
        tenant, adapter, revision = release.tenant_id, release.name, release.revision
        if change.event == "release_rolled_back":
            reason = release.reason
            log.warning(
                "release_rolled_back", tenant=tenant, adapter=adapter, revision=revision, reason=reason
            )
        elif change.event == "release_promoted":
            log.info("release_promoted", tenant=tenant, adapter=adapter, revision=revision)
        else:
            log.info("release_step", tenant=tenant, adapter=adapter, revision=revision)
        if change.cause is not None:
            self._watch.rolled_back(change.cause)

    async def _load(self, engine: Engines) -> None:
        now, watched = self._clock(), self._rounds.watched[:MAX_LOADED]
        due = [each for each in watched if now - self._loaded.get(each, -LOAD_AGAIN_S) >= LOAD_AGAIN_S]
        if due:
            engine.prefetch(await self._database.run(self._arms, due))
        self._loaded = {each: now if each in due else self._loaded[each] for each in watched}

    def _arms(self, watched: list[Watched]) -> list[AdapterRef]:
        found = []
        for each in watched:
            with contextlib.suppress(LoraplexError):  # deleted since then
                found.append(self._releases.get(each.tenant_id, each.name))
        return self._releases.serving(found)


class WebhookTask:
    """Delivers what waits for the webhook, while this server leads. Runs until it is cancelled. A delivery may come
    twice, where its answer was lost: receivers know it by its id."""

    def __init__(self, rounds: Rounds, database: Database, webhook: Webhook) -> None:
        self._rounds = rounds
        self._database = database
        self._webhook = webhook

    async def run(self, *, interval_s: float = INTERVAL_S) -> None:
        while True:
            await asyncio.sleep(interval_s)
            try:
                await self.round()
            except LoraplexError as error:
                log.debug("webhook_not_told", reason=error.message)

    async def round(self) -> None:
        """Try all deliveries that are due. Raises DatabaseUnavailable, DatabaseBusy, LeaseLost."""
        if self._rounds.term is None:
            return
        due = await self._database.run(due_deliveries, self._database)
        tries = [self._deliver(delivery) for delivery in due]
        for failure in await asyncio.gather(*tries, return_exceptions=True):
            if isinstance(failure, BaseException):
                raise failure

    async def _deliver(self, delivery: Delivery) -> None:
        problem = await self._webhook.send(delivery.id, delivery.event, delivery.body)
        term = self._rounds.term
        if term is None:
            return

        def recorded() -> bool:
            return record_try(self._database, term, delivery, delivered=problem is None)

        given_up = await self._database.run(recorded)
        if problem is not None:
            tries = delivery.tries + 1
            log.warning("webhook_failed", delivery=delivery.id, reason=problem, tries=tries, gave_up=given_up)
