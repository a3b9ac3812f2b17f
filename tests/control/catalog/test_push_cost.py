"""The work of a push in the database: it does not grow with the versions that a series left behind."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, event, text

from loraplex.control.audit.recorder import Actor
from loraplex.control.catalog.retention import Retention
from loraplex.control.catalog.series import AllSeries, SeriesRules
from support.adapters.drafts import make_adapter
from support.control.plane import ARCH, ControlPlane, caller

TRAINER = Actor("key", "acme", "0123456789abcdef", scopes=frozenset({"adapters:train", "adapters:write"}))
COPIED = "digest, rank, targets, bytes, report, base_fingerprint, pinned, created_at, checked, durable"


@contextmanager
def instructions() -> Iterator[list[int]]:
    """Count the instructions of SQLite's virtual machine."""
    count = [0]

    def tick() -> int:
        count[0] += 1
        return 0

    def begin(connection: Any, cursor: Any, *_: Any) -> None:
        cursor.connection.set_progress_handler(tick, 1)

    def end(connection: Any, cursor: Any, *_: Any) -> None:
        cursor.connection.set_progress_handler(None, 1)

    event.listen(Engine, "before_cursor_execute", begin)
    event.listen(Engine, "after_cursor_execute", end)
    try:
        yield count
    finally:
        event.remove(Engine, "before_cursor_execute", begin)
        event.remove(Engine, "after_cursor_execute", end)


def push(plane: ControlPlane, seed: int) -> int:
    """Count the instructions of a push, its check, the removal of older versions, and a request for the name."""
    retention = Retention(plane.database, plane.artifacts, 0)
    with plane.store.begin_staging() as staging, instructions() as count:
        make_adapter(staging.directory, ARCH, seed=seed)
        plane.catalog.admit("acme", "run", staging, check=True, by=TRAINER)
        for pending in plane.validation.pending():
            plane.validation.accept(pending, {"verdict": "ok"})
        retention.surplus("acme", "run")
        asyncio.run(plane.resolver.resolve(caller("acme"), "run"))
        retention.apply("acme", "run")
    return count[0]


def test_retired_versions_cost_a_push_nothing(tmp_path: Path) -> None:
    plane = ControlPlane(tmp_path)
    plane.tenants.create("acme")
    AllSeries(plane.database, plane.catalog.check_name).put("acme", "run", SeriesRules(2, 10_000))
    for seed in range(1, 5):
        push(plane, seed)
    few = push(plane, 5)
    with plane.database.write() as session:
        session.execute(
            text(
                "WITH RECURSIVE more(n) AS (SELECT 6 UNION ALL SELECT n + 1 FROM more WHERE n < 20005) "
                f"INSERT INTO adapter_versions (tenant_id, name, number, state, {COPIED}) "
                f"SELECT tenant_id, name, more.n, 'retired', {COPIED} FROM adapter_versions, more "
                "WHERE name = 'run' AND number = 2"
            )
        )
        session.execute(text("UPDATE adapters SET last_number = 20005 WHERE name = 'run'"))
    many = push(plane, 20_006)
    assert 0 < many < 2 * few, (few, many)
    plane.close()
