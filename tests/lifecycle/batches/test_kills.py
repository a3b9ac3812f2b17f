"""Servers die at random moments, before or after what they write: no line is lost, and none is in the output twice."""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from loraplex.control.batches.batches import Batches
from loraplex.control.batches.work import BatchWork
from loraplex.control.db.database import Database
from loraplex.lifecycle.batches.runner import BatchRunner
from support.control.batches import EchoAnswers, make_batch, request_line, written
from support.http.data_plane import file_database


class Killed(BaseException):
    """The process has died: nothing of it does anything any more."""


class DyingDatabase:
    """Calls of a database, up to the death that comes with one of them: before it, or after it was committed."""

    def __init__(self, database: Database, chance: random.Random, mean: float) -> None:
        self._database = database
        self._chance = chance
        self._left = chance.expovariate(1 / mean)
        self.dead = asyncio.Event()

    async def run(self, function: Callable[..., Any], *args: Any) -> Any:
        if self.dead.is_set():
            raise Killed
        self._left -= 1
        after = self._chance.random() < 0.5
        if self._left > 0 or after:
            result = await self._database.run(function, *args)
            if self._left > 0:
                return result
        self.dead.set()
        raise Killed


async def one_life(database: Database, answers: EchoAnswers, chance: random.Random) -> bool:
    """A server, until it is killed, or the batch has ended; whether it was killed."""
    dying = DyingDatabase(database, chance, mean=6.0)
    work = BatchWork(database, uuid.uuid4().hex, ttl_s=0.04)
    running = asyncio.create_task(BatchRunner(work, answers, dying.run, look_s=0.002).run())
    dead = asyncio.create_task(dying.dead.wait())
    ended = asyncio.create_task(until_ended(database))
    await asyncio.wait({running, dead, ended}, return_when=asyncio.FIRST_COMPLETED)
    was_killed = dying.dead.is_set()
    dying.dead.set()  # what it does on its way out reaches nothing
    for task in (running, dead, ended):
        task.cancel()
    await asyncio.gather(running, dead, ended, return_exceptions=True)
    return was_killed


async def until_ended(database: Database) -> None:
    while (await database.run(newest, database)).ended_at is None:
        await asyncio.sleep(0.01)


def newest(database: Database) -> Any:
    return Batches(database).list(None, limit=1, after=None).items[0]


@pytest.mark.parametrize("kills", [25, pytest.param(200, marks=pytest.mark.soak)])
def test_no_line_is_lost_and_none_doubled(tmp_path: Path, kills: int) -> None:
    database, chance = file_database(tmp_path), random.Random(54)
    answers, count, deaths = EchoAnswers(), 300, 0

    async def all_lives() -> None:
        nonlocal deaths
        while deaths < kills:
            made = make_batch(database, (request_line(number) for number in range(1, count + 1)))
            while newest(database).ended_at is None:
                # Two servers at a time; each one dies by itself.
                deaths += sum(await asyncio.gather(*(one_life(database, answers, chance) for _ in range(2))))
            check(made.id)

    def check(batch_id: str) -> None:
        done = Batches(database).get("acme", batch_id)
        assert done.status == "completed"
        good = written(database, "acme", done.output_file_id)
        bad = written(database, "acme", done.error_file_id)
        assert (done.completed, done.failed) == (len(good), len(bad))
        found = [line["body"]["number"] for line in (*good, *bad)]
        assert sorted(found) == list(range(1, count + 1))
        assert [line["body"]["number"] for line in bad] == list(range(10, count + 1, 10))

    asyncio.run(all_lives())
    database.close()
    assert max(answers.runs.values()) > 1, "some were answered by a server that died before it could write"
