"""Grammars are built once, in a process that can be killed, before an engine gets them."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from loraplex.engine.ipc.loop import Log
from loraplex.serving.errors import GrammarRefused, GrammarsUnavailable, GrammarTimeSpent
from loraplex.serving.forks.messages import JobDone
from loraplex.serving.forks.pool import ForkPool, PoolLimits, PoolWords, wall_s
from loraplex.serving.grammar.messages import Check, Checked, CheckerSetup
from loraplex.serving.grammar.verdicts import GrammarVerdict, VerdictCache, verdict_key

WORKER_COMMAND = (sys.executable, "-m", "loraplex.serving.grammar.worker")
CACHE_BYTES = 8 << 20
CPU_SHARE = 0.05
"""Part of one core that a tenant's checks may take over time, beside `burst_s`: about 25 new schemas of 2 ms a
second."""

CheckOutcome = Literal["accepted", "refused", "too_costly", "rejected", "unavailable"]
_WORDS = PoolWords(
    many="Too many grammars are being checked",
    process="The process that checks grammars",
    spent="Your schemas and grammars have taken too much processing time to build. Use simpler ones, or ones that were "
    "used before.",
    failed="grammar_process_failed",
    unavailable=GrammarsUnavailable,
    time_spent=GrammarTimeSpent,
    unsupported=lambda: GrammarRefused(
        "this model's tokenizer cannot be used for structured output; the log says why"
    ),
)


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

    def of_pool(self) -> PoolLimits:
        return PoolLimits(
            self.cpu_s,
            wall_s(self.cpu_s),
            self.memory,
            self.at_once,
            self.max_waiting,
            self.burst_s,
            CPU_SHARE,
        )


class GrammarChecker:
    """A checker of one event loop. `model_dir` has the model's tokenizer, `eos_ids` end its answers. `on_check` gets
    the outcome and the seconds of every check that was not answered from the cache."""

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
        self.pool = ForkPool(
            msgspec.msgpack.encode(CheckerSetup(model_dir, tuple(eos_ids))),
            command,
            self._limits.of_pool(),
            _WORDS,
            log=log,
            clock=clock,
        )
        self._on_check = on_check
        self._clock = clock
        self._cache = VerdictCache(CACHE_BYTES)
        self._checks: dict[tuple[str, bytes], asyncio.Task[GrammarVerdict]] = {}

    def start(self) -> None:
        """Begin to start the process; the first check waits for it."""
        self.pool.start()

    async def close(self) -> None:
        for task in self._checks.values():
            task.cancel()
        await self.pool.close()

    async def check(self, tenant: str, text: str) -> None:
        """Returns where the grammar can be used. Raises GrammarRefused with the library's reason, GrammarTimeSpent and
        GrammarsUnavailable."""
        await self._verdict(tenant, text, gbnf=False)

    async def lark_of_gbnf(self, tenant: str, text: str) -> str:
        """The grammar of a GBNF text, checked as above. Raises the same."""
        return (await self._verdict(tenant, text, gbnf=True)).lark

    async def _verdict(self, tenant: str, text: str, *, gbnf: bool) -> GrammarVerdict:
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

    async def _checked(self, tenant: str, key: bytes, text: str, *, gbnf: bool) -> GrammarVerdict:
        began = self._clock()
        outcome: CheckOutcome = "unavailable"
        try:
            done = await self.pool.run(tenant, msgspec.msgpack.encode(Check(text, gbnf)))
            verdict = self._verdict_of(done)
            outcome = "accepted" if verdict.reason is None else "refused"
            if done.outcome in ("too_slow", "too_large"):
                outcome = "too_costly"
            self._cache.put(tenant, key, verdict)
            return verdict
        except GrammarTimeSpent:
            outcome = "rejected"
            raise
        except GrammarsUnavailable as error:
            outcome = "rejected" if error.is_full else "unavailable"
            raise
        finally:
            self._on_check(outcome, self._clock() - began)

    def _ended(self, tenant: str, key: bytes, task: asyncio.Task[GrammarVerdict]) -> None:
        del self._checks[tenant, key]
        if not task.cancelled():
            task.exception()  # its callers may all have gone

    def _verdict_of(self, done: JobDone) -> GrammarVerdict:
        match done.outcome:
            case "done":
                checked = msgspec.msgpack.decode(done.body, type=Checked)
                return GrammarVerdict(checked.reason, checked.lark)
            case "too_slow":
                return GrammarVerdict(
                    f"it takes more than {self._limits.cpu_s:g} s of processing time to build or to follow; use fewer "
                    "or simpler patterns"
                )
            case "too_large":
                return GrammarVerdict(
                    f"building it takes more than {self._limits.memory >> 20} MiB of memory, or of nesting"
                )
            case _:
                raise GrammarsUnavailable("The machine is too busy to check this grammar. Please try again.")
