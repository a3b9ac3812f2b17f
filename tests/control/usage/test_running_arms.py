"""Running requests of watched releases, as the guard is told of them."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import select

from loraplex.control.db.clock import database_now
from loraplex.control.db.database import Database
from loraplex.control.db.release_tables import RunningArmRow
from loraplex.control.usage.running_arms import MAX_OLDEST, RunningArms, RunningArmsWriter
from support.control.plane import ControlPlane
from support.control.runs import begin_run, end_run
from support.control.usage import AT, accepted
from support.control.usage_lives import Flaky

ARM: dict[str, Any] = {"adapter": "support", "version": 2, "key_hash": 2**64 - 5}


def rows(database: Database) -> list[RunningArmRow]:
    with database.read() as session:
        return list(session.scalars(select(RunningArmRow).order_by(RunningArmRow.version)))


@pytest.fixture
def arms() -> RunningArms:
    return RunningArms()


@pytest.fixture
def writer(plane: ControlPlane, arms: RunningArms) -> RunningArmsWriter:
    begin_run(plane.database, "acme", "support", control=1, candidate=2)
    return RunningArmsWriter(plane.database, arms, "server-1")


async def test_rows_name_the_arms_that_run_and_their_oldest_requests(
    plane: ControlPlane, arms: RunningArms, writer: RunningArmsWriter
) -> None:
    requests = [accepted(**ARM, at=AT + timedelta(seconds=second)) for second in range(MAX_OLDEST + 3)]
    for request in [*requests, accepted(**ARM | {"version": 1})]:
        arms.begin(request)
    arms.end(requests.pop(0))
    await writer.write_once()
    control, candidate = rows(plane.database)
    assert (control.server_id, control.tenant_id, control.name, control.version) == (
        "server-1",
        "acme",
        "support",
        1,
    )
    assert (control.count, candidate.count) == (1, MAX_OLDEST + 2)
    oldest = [[ARM["key_hash"], request.at.timestamp()] for request in requests]
    assert candidate.oldest == oldest[:MAX_OLDEST]
    with plane.database.read() as session:
        assert timedelta(0) <= database_now(session) - candidate.at < timedelta(minutes=1)


async def test_rows_follow_and_go_with_the_last_request(
    plane: ControlPlane, arms: RunningArms, writer: RunningArmsWriter
) -> None:
    first, second = accepted(**ARM), accepted(**ARM)
    arms.begin(first)
    arms.begin(second)
    await writer.write_once()
    arms.end(first)
    await writer.write_once()
    assert [row.count for row in rows(plane.database)] == [1]
    arms.end(second)
    arms.end(second)
    await writer.write_once()
    assert rows(plane.database) == []


async def test_other_servers_rows_stay(
    plane: ControlPlane, arms: RunningArms, writer: RunningArmsWriter
) -> None:
    request = accepted(**ARM)
    other = RunningArms()
    other.begin(request)
    arms.begin(request)
    await RunningArmsWriter(plane.database, other, "server-2").write_once()
    await writer.write_once()
    arms.end(request)
    await writer.write_once()
    assert [row.server_id for row in rows(plane.database)] == ["server-2"]


async def test_a_release_that_has_ended_has_no_rows(
    plane: ControlPlane, arms: RunningArms, writer: RunningArmsWriter
) -> None:
    arms.begin(accepted(**ARM))
    await writer.write_once()
    end_run(plane.database, "acme", "support", status="rolled_back")
    await writer.write_once()
    assert rows(plane.database) == []


async def test_without_such_requests_the_database_is_not_asked(
    arms: RunningArms, writer: RunningArmsWriter, statements: list[str]
) -> None:
    await writer.write_once()
    request = accepted(**ARM)
    arms.begin(request)
    arms.end(request)
    await writer.write_once()
    assert statements == []


@pytest.mark.parametrize("failure", ["away", "broken", "unheard"])
async def test_a_database_that_is_away_ends_nothing_and_no_row_is_left(
    plane: ControlPlane, arms: RunningArms, failure: str
) -> None:
    begin_run(plane.database, "acme", "support", control=1, candidate=2)
    flaky = Flaky(plane.database)
    writer = RunningArmsWriter(flaky, arms, "server-1")  # type: ignore[arg-type]
    arms.begin(accepted(**ARM))
    flaky.failures = [failure]
    await writer.write_once()
    await writer.write_once()
    assert [row.count for row in rows(plane.database)] == [1]


async def test_the_rows_go_when_the_task_ends(
    plane: ControlPlane, arms: RunningArms, writer: RunningArmsWriter
) -> None:
    arms.begin(accepted(**ARM))
    task = asyncio.create_task(writer.run())
    while not rows(plane.database):
        await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert rows(plane.database) == []
