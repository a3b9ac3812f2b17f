"""A server's part in running batches: it takes parts by lease, answers their lines, and writes the answers.

No line is in memory that does not belong to one of `MAX_PARTS` parts. One tenant has all but one of them at most, so
that another one's batch begins at once. What the server or a limit refuses for now stays without a result: its part is
given back, and taken again later.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import anyio
import structlog

from loraplex.adapters.errors import LoraplexError
from loraplex.control.batches.lines import PART_LINES
from loraplex.control.batches.work import BatchWork, Line, Result, Work

MAX_PARTS = 4
MAX_LINES = MAX_PARTS * PART_LINES
"""Lines that a server runs at a time: as many as an engine has background sequences."""
LOOK_S = 0.5
"""How often work is looked for while there is none."""
LONGEST_PAUSE_S = 60.0
log = structlog.get_logger("loraplex")
InThread = Callable[..., Awaitable[Any]]


class Later(Exception):
    """The line cannot be answered now, and may be in `again_s` seconds."""

    def __init__(self, again_s: float) -> None:
        super().__init__(f"again in {again_s} s")
        self.again_s = min(again_s, LONGEST_PAUSE_S)


class Answers(Protocol):
    async def answer(self, work: Work, line: Line) -> Result:
        """Raises Later."""
        ...


class BatchRunner:
    """The batches of one server, on one event loop. `in_thread` runs calls of the database."""

    def __init__(
        self,
        work: BatchWork,
        answers: Answers,
        in_thread: InThread,
        *,
        stopping: Callable[[], bool] = lambda: False,
        look_s: float = LOOK_S,
    ) -> None:
        self._work = work
        self._answers = answers
        self._in_thread = in_thread
        self._stopping = stopping
        self._look_s = look_s
        self._tasks: dict[asyncio.Task[None], Work] = {}

    async def run(self) -> None:
        """Until cancelled; then what runs is given back."""
        renewing = asyncio.create_task(self._renew())
        try:
            while not renewing.done():
                await self._in_thread(self._work.settle)
                if self._stopping() or not await self._begin():
                    await self._pause()
            renewing.result()
        finally:
            renewing.cancel()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(renewing, *self._tasks, return_exceptions=True)

    async def _pause(self) -> None:
        """Until a part has ended, or work is to be looked for."""
        pause = asyncio.create_task(asyncio.sleep(self._look_s))
        await asyncio.wait({pause, *self._tasks}, return_when=asyncio.FIRST_COMPLETED)
        pause.cancel()

    async def _begin(self) -> bool:
        """Whether another part was begun."""
        if len(self._tasks) >= MAX_PARTS:
            return False
        held = Counter(work.tenant_id for work in self._tasks.values())
        work = await self._in_thread(self._work.take, held, MAX_PARTS - 1)
        if work is None:
            return False
        task = asyncio.create_task(self._run_part(work))
        self._tasks[task] = work
        task.add_done_callback(self._ended)
        return True

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:  # its lease ends, and it is taken again
            known = isinstance(error, LoraplexError)
            log.error("batch_part_failed", reason=str(error), exc_info=None if known else error)

    async def _renew(self) -> None:
        """Hold what runs, and cancel what is not to be run any more."""
        while True:
            await asyncio.sleep(min(self._work.ttl_s / 4, 5.0))
            running = dict(self._tasks)
            if not running:
                continue
            try:
                kept = await self._in_thread(self._work.renew, list(running.values()))
            except LoraplexError:
                continue  # the database is away: the leases may end, and then what is written twice counts once
            for task, work in running.items():
                if work.key not in kept:
                    task.cancel()

    async def _run_part(self, work: Work) -> None:
        lines = [asyncio.create_task(self._answers.answer(work, line)) for line in work.lines]
        again_s, left = 0.0, False
        try:
            waiting = set(lines)
            while waiting:
                ended, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                results = []
                for task in ended:
                    try:
                        results.append(task.result())
                    except Later as later:
                        again_s, left = max(again_s, later.again_s), True
                if results:
                    await self._in_thread(self._work.write, work, results)
        except BaseException:
            left = True
            raise
        finally:
            for task in lines:
                task.cancel()
            await asyncio.gather(*lines, return_exceptions=True)
            with anyio.CancelScope(shield=True), contextlib.suppress(LoraplexError):
                await self._in_thread(self._release, work, left, again_s)

    def _release(self, work: Work, left: bool, again_s: float) -> None:
        self._work.release(work, done=not left, again_s=again_s)
