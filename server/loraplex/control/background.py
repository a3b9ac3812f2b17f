"""Background tasks of a server: one supervised group, so that none ends silently.

A task that fails, or that returns though it has no end, is logged by its name and started again after a pause. The
pause doubles with each failure up to a minute, is different for every server, and begins small again once the task has
run well. `states` is what the metrics show.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import structlog

from loraplex.adapters.errors import LoraplexError

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 60.0
WELL_S = 60.0
"""A task that ran for so long begins with the first pause again when it fails."""
_MOST_DOUBLINGS = 16
log = structlog.get_logger("loraplex")


@dataclass(slots=True)
class TaskState:
    """The state of a task, or of a thread that looks after itself. `up`: it runs, and does not wait to be started
    again."""

    name: str
    up: bool = False
    restarts: int = 0


class BackgroundTasks:
    """Background tasks of one event loop. `clock` is monotonic seconds, `sleep` takes seconds, `chance` gives numbers
    in [0, 1)."""

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._clock = clock
        self._sleep = sleep
        self._chance = chance
        self._states: dict[str, TaskState] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    @property
    def states(self) -> tuple[TaskState, ...]:
        return tuple(self._states.values())

    def watch(self, state: TaskState) -> None:
        """Show this one too; its owner keeps it up."""
        self._states[state.name] = state

    def start(self, name: str, run: Callable[[], Awaitable[None]]) -> asyncio.Task[None]:
        """Run it until `close`, or until the task that is returned is cancelled. Raises ValueError where one of that
        name runs."""
        running = self._tasks.get(name)
        if running is not None and not running.done():
            raise ValueError(f"a background task {name} runs already")
        state = self._states.setdefault(name, TaskState(name))
        task = self._tasks[name] = asyncio.create_task(self._supervise(state, run), name=name)
        return task

    async def close(self) -> None:
        """Cancel what runs, and wait until all of it has ended."""
        running = [task for task in self._tasks.values() if not task.done()]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    async def _supervise(self, state: TaskState, run: Callable[[], Awaitable[None]]) -> None:
        failures = 0
        while True:
            state.up = True
            began = self._clock()
            failure: BaseException | None = None
            try:
                await run()
            except asyncio.CancelledError as error:
                if _is_cancelled():
                    raise
                failure = error  # something that it waited for was cancelled, and not the task
            except Exception as error:
                failure = error
            finally:
                state.up = False
            if _is_cancelled():  # it failed on its way out
                _tell(state.name, failure, None)
                raise asyncio.CancelledError
            if self._clock() - began >= WELL_S:
                failures = 0
            pause = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** min(failures, _MOST_DOUBLINGS))
            pause *= 0.5 + self._chance() / 2
            failures += 1
            _tell(state.name, failure, pause)
            await self._sleep(pause)
            state.restarts += 1


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _tell(name: str, failure: BaseException | None, pause_s: float | None) -> None:
    """Logs our own errors without, and all others with a traceback."""
    reason = "it ended by itself" if failure is None else str(failure) or type(failure).__name__
    log.error(
        "background_task_failed",
        task=name,
        reason=reason,
        restart_s=None if pause_s is None else round(pause_s, 1),
        exc_info=None if failure is None or isinstance(failure, LoraplexError) else failure,
    )
