"""Stands in for the process that measures what another form of the base does to a version."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from loraplex.engine.base_error.messages import BaseErrorFigures, BaseErrorTask

MeasureBase = Callable[[BaseErrorTask], Awaitable[BaseErrorFigures]]


class FakeBaseMeasure:
    """Answers `figures`, or raises `error`. While it is held a measurement waits. `tasks` are those that it got."""

    def __init__(self) -> None:
        self.figures = BaseErrorFigures(0.25, 0.75, 256)
        self.error: Exception | None = None
        self.tasks: list[BaseErrorTask] = []
        self.num_running = self.most_running = 0
        self._free = asyncio.Event()
        self._free.set()

    def hold(self) -> None:
        self._free.clear()

    def release(self) -> None:
        self._free.set()

    async def __call__(self, task: BaseErrorTask) -> BaseErrorFigures:
        self.tasks.append(task)
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        try:
            await self._free.wait()
        finally:
            self.num_running -= 1
        if self.error is not None:
            raise self.error
        return self.figures
