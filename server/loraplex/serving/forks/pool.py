"""Jobs of tenants in a process that can be killed: in turns, within the CPU time that each may use."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from weakref import WeakValueDictionary

from loraplex.engine.ipc.loop import Log
from loraplex.serving.errors import ServingError, WorkTimeSpent, WorkUnavailable
from loraplex.serving.fair_share import FairShare
from loraplex.serving.forks.messages import JobDone, Start
from loraplex.serving.forks.process import ForkProcess, ProcessFailed

WALL_FACTOR, MIN_WALL_S = 60.0, 30.0
"""A job has its CPU time multiplied by this to end, and no less than that, where the machine is busy."""
RESTART_PAUSE_S = 1.0
LIGHT_SHARE = 1 / 20
"""Part of `burst_s`: CPU time that a tenant may recently have used if its jobs are to count as short."""


def wall_s(cpu_s: float) -> float:
    """Seconds that a job with so much CPU time has."""
    return max(MIN_WALL_S, WALL_FACTOR * cpu_s)


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """`cpu_s` and `wall_s`: CPU time and time of a job. `memory`: bytes for it. `at_once`: jobs that run at a time. A
    tenant has half of them at most, and so have all tenants together that have recently used much CPU time.
    `max_waiting`: jobs of all tenants that wait or run. `burst_s`: CPU time that a tenant may use before it waits;
    `cpu_share`: the part of one core that it may use over time beside that."""

    cpu_s: float
    wall_s: float
    memory: int
    at_once: int
    max_waiting: int
    burst_s: float
    cpu_share: float


@dataclass(frozen=True, slots=True)
class PoolWords:
    """How messages name the work: `many` "Too many … are being …", `process` "The process that …", `spent` what a
    tenant whose CPU time is spent may do. `failed` is the event of the log. The errors are raised with these words;
    `unsupported` where the process can do no job."""

    many: str
    process: str
    spent: str
    failed: str
    unavailable: type[WorkUnavailable]
    time_spent: type[WorkTimeSpent]
    unsupported: Callable[[], ServingError]


@dataclass(slots=True)
class _Spent:
    """CPU time of an account, of a tenant as a rule, that has not been paid back yet."""

    cpu_s: float
    at: float


class ForkPool:
    """A pool of one event loop. `setup` is what the process of `command` loads."""

    def __init__(
        self,
        setup: bytes,
        command: Sequence[str],
        limits: PoolLimits,
        words: PoolWords,
        *,
        log: Log = lambda event, **fields: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._start = Start(setup, limits.cpu_s, limits.wall_s, limits.memory)
        self._command = command
        self._limits = limits
        self._words = words
        self._log = log
        self._clock = clock
        self._waiting = FairShare()
        self._turns = asyncio.Semaphore(limits.at_once)
        self._turns_of_heavy = asyncio.Semaphore(max(1, limits.at_once // 2))
        self._turns_of: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        self._single_of: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._spent: dict[str, _Spent] = {}
        self._starting: asyncio.Task[ForkProcess] | None = None
        self._failed_at: float | None = None
        self.process: ForkProcess | None = None
        """The latest life."""

    def start(self) -> None:
        """Begin to start the process; the first job waits for it."""
        self._begin_start()

    async def close(self) -> None:
        if self._starting is not None:
            await asyncio.wait({self._starting})
        if self.process is not None:
            await self.process.close()

    async def run(
        self, tenant: str, body: bytes, *, owner: str = "", weight: int = 1, account: str = ""
    ) -> JobDone:
        """The job's outcome. A fork never does jobs of two owners; those of one have one weight. `account` has its CPU
        time, the tenant's own without it. Raises the errors of `PoolWords`."""
        words, account = self._words, account or tenant
        self._check_spent(account)
        if not self._waiting.acquire(tenant, self._limits.max_waiting):
            held = self._waiting.held(tenant)
            raise words.unavailable(
                f"{words.many}, {held} of them yours. Please try again.",
                is_own=self._waiting.is_beyond_share(tenant, self._limits.max_waiting),
                is_full=True,
            )
        try:
            async with self._turn_of(tenant):
                return await self._in_turn(tenant, account, body, owner, weight)
        except ProcessFailed as error:
            raise words.unavailable(f"{words.process} {error}. Please try again.") from error
        finally:
            self._waiting.release(tenant)

    async def _in_turn(self, tenant: str, account: str, body: bytes, owner: str, weight: int) -> JobDone:
        """Tenants that have used much CPU time share half of the turns. Of any other one job runs at a time: it may
        show to be long. So a tenant with short jobs finds a turn, however many others have long ones."""
        async with self._single_of.setdefault(tenant, asyncio.Lock()):
            if self._left(account) <= LIGHT_SHARE * self._limits.burst_s:
                async with self._turns:
                    return await self._done(account, body, owner, weight)
        async with self._turns_of_heavy, self._turns:
            return await self._done(account, body, owner, weight)

    async def _done(self, account: str, body: bytes, owner: str, weight: int) -> JobDone:
        self._check_spent(account)
        done = await (await self._running()).run(body, owner=owner, weight=weight)
        self._spent[account] = _Spent(self._left(account) + done.cpu_s, self._clock())
        return done

    def _turn_of(self, tenant: str) -> asyncio.Semaphore:
        turns = self._turns_of.get(tenant)
        if turns is None:
            turns = self._turns_of[tenant] = asyncio.Semaphore(max(1, self._limits.at_once // 2))
        return turns

    # What a tenant has spent.

    def _left(self, account: str) -> float:
        """Seconds that are not paid back yet."""
        spent = self._spent.get(account)
        if spent is None:
            return 0.0
        left = spent.cpu_s - (self._clock() - spent.at) * self._limits.cpu_share
        if left <= 0:
            del self._spent[account]
            return 0.0
        return left

    def _check_spent(self, account: str) -> None:
        if (beyond := self._left(account) - self._limits.burst_s) > 0:
            raise self._words.time_spent(self._words.spent, beyond / self._limits.cpu_share)

    # The process.

    async def _running(self) -> ForkProcess:
        process = self.process
        if process is None or not process.alive:
            process = await asyncio.shield(self._begin_start())
        if process.error is not None:
            raise self._words.unsupported()
        return process

    def _begin_start(self) -> asyncio.Task[ForkProcess]:
        if self._starting is None:
            self._starting = asyncio.create_task(self._started(), name="fork-process-start")
            self._starting.add_done_callback(self._start_ended)
        return self._starting

    def _start_ended(self, task: asyncio.Task[ForkProcess]) -> None:
        self._starting = None
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failed_at = self._clock()
            self._log(self._words.failed, reason=str(error.__cause__ or error))

    async def _started(self) -> ForkProcess:
        if self.process is not None:
            self._log(self._words.failed, reason="the process was lost; starting another")
            await self.process.close()
            self.process = None
        if self._failed_at is not None and self._clock() - self._failed_at < RESTART_PAUSE_S:
            raise ProcessFailed("is being started again")
        self.process = await ForkProcess.start(self._start, self._command)
        if self.process.error is not None:
            self._log(self._words.failed, reason=self.process.error)
        return self.process
