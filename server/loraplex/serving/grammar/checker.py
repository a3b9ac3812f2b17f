"""Grammars are built once, in a process that can be killed, before an engine gets them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal
from weakref import WeakValueDictionary

from loraplex.engine.ipc.loop import Log
from loraplex.serving.errors import GrammarRefused, GrammarsUnavailable, GrammarTimeSpent
from loraplex.serving.fair_share import FairShare
from loraplex.serving.grammar.messages import Checked, Start
from loraplex.serving.grammar.process import WORKER_COMMAND, GrammarProcess
from loraplex.serving.grammar.verdicts import Verdict, VerdictCache, verdict_key

CACHE_BYTES = 8 << 20
CPU_SHARE = 0.01
"""Of one core: the part of it that a tenant's checks may take over time, beside `burst_s`."""
WALL_FACTOR, MIN_WALL_S = 60.0, 30.0
"""A check has its CPU time multiplied by this to end, and no less than that, where the machine is busy."""
RESTART_PAUSE_S = 1.0

CheckOutcome = Literal["accepted", "refused", "too_costly", "rejected", "unavailable"]


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """`cpu_s`: CPU time to build one grammar and to sample a few tokens; `memory`: bytes for it. `at_once`: checks
    that run at a time; a tenant has half of them at most. `max_waiting`: checks of all tenants that wait or run.
    `burst_s`: CPU time that a tenant may use before it waits."""

    cpu_s: float = 0.5
    at_once: int = 2
    memory: int = 512 << 20
    max_waiting: int = 512
    burst_s: float = 5.0


@dataclass(slots=True)
class _Spent:
    """A tenant's CPU time that has not been paid back yet."""

    cpu_s: float
    at: float


class GrammarChecker:
    """For one event loop. `model_dir` has the model's tokenizer, `eos_ids` end its answers. `on_check` gets the outcome
    and the seconds of every check that was not answered from the cache."""

    def __init__(
        self,
        model_dir: str,
        *,
        eos_ids: Sequence[int] = (),
        limits: GrammarLimits | None = None,
        command: Sequence[str] = WORKER_COMMAND,
        on_check: Callable[[CheckOutcome, float], None] = lambda outcome, seconds: None,
        log: Log = lambda event, **fields: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limits = limits or GrammarLimits()
        wall_s = max(MIN_WALL_S, WALL_FACTOR * self._limits.cpu_s)
        self._start = Start(model_dir, tuple(eos_ids), self._limits.cpu_s, wall_s, memory=self._limits.memory)
        self._command = command
        self._on_check = on_check
        self._log = log
        self._clock = clock
        self._cache = VerdictCache(CACHE_BYTES)
        self._waiting = FairShare()
        self._turns = asyncio.Semaphore(self._limits.at_once)
        self._turns_of: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        self._spent: dict[str, _Spent] = {}
        self._checks: dict[tuple[str, bytes], asyncio.Task[Verdict]] = {}
        self._process: GrammarProcess | None = None
        self._starting: asyncio.Task[GrammarProcess] | None = None
        self._failed_at: float | None = None

    def start(self) -> None:
        """Begin to start the process; the first check waits for it."""
        self._begin_start()

    async def close(self) -> None:
        if self._starting is not None:
            await asyncio.wait({self._starting})
        for task in self._checks.values():
            task.cancel()
        if self._process is not None:
            await self._process.close()

    async def check(self, tenant: str, text: str) -> None:
        """Returns where the grammar can be used. Raises GrammarRefused with the library's reason, GrammarTimeSpent and
        GrammarsUnavailable."""
        await self._verdict(tenant, text, gbnf=False)

    async def lark_of_gbnf(self, tenant: str, text: str) -> str:
        """The grammar of a GBNF text, checked as above. Raises the same."""
        return (await self._verdict(tenant, text, gbnf=True)).lark

    async def _verdict(self, tenant: str, text: str, *, gbnf: bool) -> Verdict:
        key = verdict_key(text, gbnf=gbnf)
        verdict = self._cache.get(tenant, key)
        if verdict is None:
            task = self._checks.get((tenant, key))
            if task is None:
                task = asyncio.create_task(self._checked(tenant, key, text, gbnf=gbnf))
                self._checks[tenant, key] = task
                task.add_done_callback(lambda ended: self._ended(tenant, key, ended))
            # A caller that goes away leaves it to the others; it is bounded.
            verdict = await asyncio.shield(task)
        if verdict.reason is not None:
            raise GrammarRefused(verdict.reason)
        return verdict

    async def _checked(self, tenant: str, key: bytes, text: str, *, gbnf: bool) -> Verdict:
        began = self._clock()
        outcome: CheckOutcome = "unavailable"
        try:
            self._check_spent(tenant)
            if not self._waiting.acquire(tenant, self._limits.max_waiting):
                outcome = "rejected"
                held = self._waiting.held(tenant)
                raise GrammarsUnavailable(
                    f"Too many grammars are being checked, {held} of them yours. Please try again.",
                    is_own=self._waiting.is_beyond_share(tenant, self._limits.max_waiting),
                )
            try:
                async with self._turn_of(tenant), self._turns:
                    self._check_spent(tenant)
                    checked = await (await self._running()).check(text, gbnf=gbnf)
            finally:
                self._waiting.release(tenant)
            self._charge(tenant, checked.cpu_s)
            verdict = self._verdict_of(checked)
            outcome = "accepted" if verdict.reason is None else "refused"
            if checked.outcome in ("too_slow", "too_large"):
                outcome = "too_costly"
            self._cache.put(tenant, key, verdict)
            return verdict
        except GrammarTimeSpent:
            outcome = "rejected"
            raise
        finally:
            self._on_check(outcome, self._clock() - began)

    def _ended(self, tenant: str, key: bytes, task: asyncio.Task[Verdict]) -> None:
        del self._checks[tenant, key]
        if not task.cancelled():
            task.exception()  # its callers may all have gone

    def _verdict_of(self, checked: Checked) -> Verdict:
        match checked.outcome:
            case "accepted":
                return Verdict(lark=checked.text)
            case "refused":
                return Verdict(checked.text)
            case "too_slow":
                return Verdict(
                    f"it takes more than {self._limits.cpu_s:g} s of processing time to build or to follow; use fewer "
                    "or simpler patterns"
                )
            case "too_large":
                return Verdict(
                    f"building it takes more than {self._limits.memory >> 20} MiB of memory, or of nesting"
                )
            case _:
                raise GrammarsUnavailable("The machine is too busy to check this grammar. Please try again.")

    def _turn_of(self, tenant: str) -> asyncio.Semaphore:
        turns = self._turns_of.get(tenant)
        if turns is None:
            turns = self._turns_of[tenant] = asyncio.Semaphore(max(1, self._limits.at_once // 2))
        return turns

    # What a tenant has spent.

    def _left(self, tenant: str) -> float:
        """Seconds that are not paid back yet."""
        spent = self._spent.get(tenant)
        if spent is None:
            return 0.0
        left = spent.cpu_s - (self._clock() - spent.at) * CPU_SHARE
        if left <= 0:
            del self._spent[tenant]
            return 0.0
        return left

    def _check_spent(self, tenant: str) -> None:
        if (beyond := self._left(tenant) - self._limits.burst_s) > 0:
            raise GrammarTimeSpent(
                "Your schemas and grammars have taken too much processing time to build. Use simpler ones, or ones "
                "that were used before.",
                beyond / CPU_SHARE,
            )

    def _charge(self, tenant: str, cpu_s: float) -> None:
        self._spent[tenant] = _Spent(self._left(tenant) + cpu_s, self._clock())

    # The process.

    async def _running(self) -> GrammarProcess:
        """Raises GrammarsUnavailable, and GrammarRefused where the model's tokenizer is not supported."""
        process = self._process
        if process is None or not process.alive:
            process = await asyncio.shield(self._begin_start())
        if process.error is not None:
            raise GrammarRefused(
                "this model's tokenizer cannot be used for structured output; the log says why"
            )
        return process

    def _begin_start(self) -> asyncio.Task[GrammarProcess]:
        if self._starting is None:
            self._starting = asyncio.create_task(self._started(), name="grammar-process-start")
            self._starting.add_done_callback(self._start_ended)
        return self._starting

    def _start_ended(self, task: asyncio.Task[GrammarProcess]) -> None:
        self._starting = None
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failed_at = self._clock()
            self._log("grammar_process_failed", reason=str(error.__cause__ or error))

    async def _started(self) -> GrammarProcess:
        if self._process is not None:
            self._log("grammar_process_failed", reason="the process was lost; starting another")
            await self._process.close()
            self._process = None
        if self._failed_at is not None and self._clock() - self._failed_at < RESTART_PAUSE_S:
            raise GrammarsUnavailable("The process that checks grammars is being started again.")
        self._process = await GrammarProcess.start(self._start, self._command)
        if self._process.error is not None:
            self._log("grammar_process_failed", reason=self._process.error)
        return self._process
