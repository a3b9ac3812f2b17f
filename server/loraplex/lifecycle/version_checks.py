"""The check of new versions' numbers: the engine measures a version, the reference judges, the catalog decides.

A series may have the numbers of few versions checked, and each held to the log probabilities of its trainer.

An upload waits here for the verdict on its version. `run` checks what nobody waits for: versions whose upload did not
wait, whose server died, or that could not be checked before.

No tenant's checks keep another's waiting, however long they take: a tenant has one at a time, the engine measures them
side by side, and the reference computes them in turns. A version that the engine dies of must not end engine after
engine: it is measured once more, alone, and rejected where the engine dies again. Meanwhile its tenant's checks pause.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import anyio
import anyio.to_thread
import structlog

from loraplex.adapters.errors import AdapterRefused, LoraplexError
from loraplex.adapters.numerics import NumbersCheck, NumbersVerdict, SiteOutputs
from loraplex.adapters.store.files import CONFIG_NAME, TENSORS_NAME
from loraplex.adapters.store.interface import Store
from loraplex.control.agreement import Agreement
from loraplex.control.catalog.adapters import Catalog
from loraplex.control.catalog.validation import Validation
from loraplex.control.db.database import Database
from loraplex.control.errors import (
    AdapterNotFound,
    AdapterUnavailable,
    NumbersUnchecked,
    TenantNotFound,
    VersionNotFound,
    VersionRejected,
)
from loraplex.control.tenancy.tenants import Tenants
from loraplex.control.types import CheckOutcome, Refusal, VersionInfo
from loraplex.lifecycle.agreement_checks import AgreementChecks
from loraplex.lifecycle.base_errors import BaseErrors
from loraplex.lifecycle.engine_turns import EngineTurns
from loraplex.lifecycle.eviction import SurplusRemoval, evict_removed
from loraplex.lifecycle.tenant_terms import TermsSender
from loraplex.serving.engines.engines import Engines
from loraplex.serving.errors import (
    EngineDraining,
    EngineLost,
    EngineOverloaded,
    EngineUnavailable,
    ServingError,
)

WAIT_S = 30.0
"""How long an upload waits for its verdict. Common HTTP clients wait for a minute."""
MEASURE_S = 90.0
"""Longest time for one version in the engine, which ends a measurement itself after 60 s."""
MAX_CHECKS = 64
"""Versions that are checked at a time, one of a tenant. Most wait in the engine's queue: it measures one a step."""
REFERENCE_S = 0.05
"""Time that the reference computes one version before the next one has its turn."""
STUCK_S = 300.0
"""After which a turn of the reference is given up: its storage hangs. One site may take a minute, as DoRA of a high
rank on an output head."""
SCAN_S = 30.0
"""How often `run` looks for versions that this server knows nothing of."""
LEFT_ALONE_S = 120.0
"""Such a version is left to the server that took it until it is so old, except at a start."""
FIRST_RETRY_S, LONGEST_RETRY_S = 2.0, 300.0
MAX_DEATHS = 2
"""Deaths of the engine while it measures a version that reject it. Before the last one it was measured alone."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 10.0, 3600.0
"""Pauses of a tenant's checks after deaths of the engine during one of them, each `_PAUSE_FACTOR` times the one before:
after five deaths within five minutes, with nothing served between them, the engine would stay down."""
_PAUSE_FACTOR = 12
_MOST_DOUBLINGS = 16
_SHORTEST_PAUSE_S = 1.0
_CRASHED = (
    "the engine died twice while it measured this version, the second time with no other beside it; tell the operator, "
    "whose log has the reason"
)
_Key = tuple[str, str, int]
_T = TypeVar("_T")

log = structlog.get_logger("loraplex.admin")


@dataclass(frozen=True, slots=True)
class _Attempt:
    """A version after an attempt. `reason`: why it is still validating; `transient`: that may pass within seconds."""

    info: VersionInfo
    reason: str | None = None
    transient: bool = False


@dataclass(frozen=True, slots=True)
class _Verdict:
    """`refusal` None: the version is accepted. The others are None where its series does not want them."""

    refusal: Refusal | None = None
    numbers: dict[str, Any] | None = None
    """The reference error, for the report."""
    agreement: Agreement | None = None
    """The comparison with its trainer."""

    @property
    def figures(self) -> dict[str, Any] | None:
        return None if self.agreement is None else self.agreement.figures()


@dataclass(slots=True)
class _Retry:
    failures: int = 0
    due: float = 0.0


class _ChecksPaused(LoraplexError):
    """The tenant's checks wait, since the engine died during one."""

    code = "numbers_unchecked"


class VersionChecks:
    """The checks of one event loop. Checks of one tenant go one after the other. `base_errors` measures what has
    passed; None: nothing does. `on_outcome` hears of each attempt. `clock` is monotonic seconds."""

    def __init__(
        self,
        *,
        database: Database,
        catalog: Catalog,
        validation: Validation,
        tenants: Tenants,
        store: Store,
        engine: Engines,
        agreements: AgreementChecks,
        surplus: SurplusRemoval | None = None,
        base_errors: BaseErrors | None = None,
        on_outcome: Callable[[CheckOutcome], None] = lambda outcome: None,
        wait_s: float = WAIT_S,
        measure_s: float = MEASURE_S,
        scan_s: float = SCAN_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.database = database
        self.catalog = catalog
        self.engine = engine
        self.agreements = agreements
        self._validation = validation
        self._terms = TermsSender(database, tenants)
        self._store = store
        self._surplus = surplus
        self._base_errors = base_errors
        self._on_outcome = on_outcome
        self.wait_s = wait_s
        self._scan_s = scan_s
        self._clock = clock
        self._running: dict[_Key, asyncio.Task[_Attempt]] = {}
        self._retries: dict[_Key, _Retry] = {}
        self._deaths: Counter[_Key] = Counter()  # while the engine measured it
        self._paused: dict[str, _Retry] = {}  # tenants, by deaths during their checks
        self._failed = asyncio.Event()
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._slots = asyncio.Semaphore(MAX_CHECKS)
        self._engine_turns = EngineTurns(measure_s)
        self._reference = asyncio.Lock()
        self._thread = anyio.CapacityLimiter(1)
        self._fetches = anyio.CapacityLimiter(MAX_CHECKS)

    def start(self, info: VersionInfo) -> asyncio.Task[_Attempt]:
        """Attempt to check a version, unless an attempt is on its way."""
        key = _key(info)
        task = self._running.get(key)
        if task is None:
            task = self._running[key] = asyncio.create_task(self._check(info))
            task.add_done_callback(lambda _: self._running.pop(key, None))
        return task

    async def wait(self, info: VersionInfo, *, measured: bool = True) -> VersionInfo:
        """The version when it is ready, and with `measured` its base error is too, or there is no time left. Raises
        VersionRejected, NumbersUnchecked where there is no verdict in time (the check goes on), VersionNotFound where
        it was deleted meanwhile, AdapterUnavailable where its bytes were lost."""
        deadline = self._clock() + self.wait_s
        while True:
            task = self.start(info)
            await asyncio.wait({task}, timeout=deadline - self._clock())
            if not task.done():
                raise NumbersUnchecked(info, "the engine is busy, or the version is large")
            if task.cancelled():
                raise NumbersUnchecked(info, "the server is shutting down")
            attempt = task.result()
            if attempt.reason is None:
                ready = _require_ready(attempt.info)
                if self._base_errors is None or not measured:
                    return ready
                return await self._base_errors.wait(ready, deadline - self._clock())
            current = await self._current(info)  # it may be deleted, or decided elsewhere
            if current.state != "validating":
                return _require_ready(current)
            retry = self._retries.get(_key(info))
            due = self._clock() if retry is None else retry.due
            if not attempt.transient or due >= deadline:
                raise NumbersUnchecked(info, attempt.reason)
            await asyncio.sleep(due - self._clock())

    async def run(self) -> None:
        """Check what waits for it, until cancelled."""
        at_start = True
        try:
            while True:
                self._failed.clear()
                try:
                    pending = await self.database.run(self._validation.pending)
                    if at_start and self._base_errors is not None:
                        await self._base_errors.start_unmeasured()
                except LoraplexError as error:
                    log.debug("pending_checks_not_read", reason=error.message)
                else:
                    self._start_due(pending, everything=at_start)
                    at_start = False
                await asyncio.sleep(min(_SHORTEST_PAUSE_S, self._scan_s))
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._failed.wait(), self._pause())
        finally:
            running = list(self._running.values())
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            if self._surplus is not None:
                await self._surplus.close()
            if self._base_errors is not None:
                await self._base_errors.close()

    def _start_due(self, pending: list[VersionInfo], *, everything: bool) -> None:
        now, today = self._clock(), datetime.now(UTC)
        known = {_key(info) for info in pending}
        self._retries = {key: retry for key, retry in self._retries.items() if key in known}
        self._deaths = Counter({key: count for key, count in self._deaths.items() if key in known})
        for info in pending:
            retry = self._retries.get(_key(info))
            is_old = (today - info.created_at).total_seconds() >= LEFT_ALONE_S
            if retry.due <= now if retry is not None else everything or is_old:
                self.start(info)

    def _pause(self) -> float:
        """Until the next retry, or the next look at the database. A failure of a check ends it."""
        due = [retry.due for key, retry in self._retries.items() if key not in self._running]
        return min([self._scan_s, *(max(0.0, each - self._clock()) for each in due)])

    async def _check(self, info: VersionInfo) -> _Attempt:
        turn = self._turns.setdefault(info.tenant_id, asyncio.Lock())
        async with turn, self._slots:
            try:
                self._check_paused(info.tenant_id)
                attempt = await self._attempt(info)
            except Exception as error:
                return self._postponed(info, error)
        self._retries.pop(_key(info), None)
        self._deaths.pop(_key(info), None)
        return attempt

    async def _attempt(self, info: VersionInfo) -> _Attempt:
        run = self.database.run
        info = await self._current(info)
        if info.state != "validating":  # another server was first
            return _Attempt(info)
        began = self._clock()
        # Its tenant may never have sent a request to this engine.
        await self._terms.tell(self.engine, [info.tenant_id])
        verdict = await self._verdict(info)
        refusal, figures = verdict.refusal, verdict.figures
        if refusal is None:
            decision = await run(self._validation.accept, info, verdict.numbers, figures)
        elif await run(self.catalog.mark_damaged, info.digest):
            # Damaged bytes give wrong numbers; the tenant may upload the right ones again.
            with contextlib.suppress(ServingError):
                await self.engine.drop(info.digest)
            return _Attempt(await self._current(info))
        else:
            decision = await run(self._validation.reject, info, refusal, verdict.numbers, figures)
        if decision.decided:
            self._tell(decision.info, refusal, self._clock() - began)
            await evict_removed(self, decision.removal)
            if refusal is None:
                if self._base_errors is not None and info.checked != "structure":
                    self._base_errors.start(decision.info)
                if self._surplus is not None:
                    await self._surplus.after(decision.info, decision.by)
        return _Attempt(decision.info)

    async def _verdict(self, info: VersionInfo) -> _Verdict:
        """The comparison goes first: it may be tried often, and costs less than the numbers."""
        on_experts = {site for site in info.targets if site.startswith("experts.")}
        if on_experts and (lacking := on_experts.difference(self.engine.info.sites)):
            return _Verdict(Refusal("unsupported_feature", self._told_lacking(lacking)))
        found = await self._in_engine(info, partial(self.agreements.verdict, info))
        refusal, agreement = (found, None) if isinstance(found, Refusal) else found
        if refusal is not None or info.checked == "structure":
            return _Verdict(refusal, None, agreement)
        refusal, numbers = await self._numbers(info)
        return _Verdict(refusal, numbers, agreement)

    async def _numbers(self, info: VersionInfo) -> tuple[Refusal | None, dict[str, Any]]:
        outputs = await self._in_engine(info, partial(self.engine.measure_sites, info.ref()))
        return (outputs, {}) if isinstance(outputs, Refusal) else await self._judge(info, outputs)

    async def _in_engine(self, info: VersionInfo, work: Callable[[], Awaitable[_T]]) -> _T | Refusal:
        """The result of what the engine does with a version, or a refusal where it has died of that twice."""
        key = _key(info)
        turns = self._engine_turns
        try:
            async with turns.alone() if self._deaths[key] else turns.beside_others():
                return await work()
        except EngineLost:
            self._deaths[key] += 1
            if self._deaths[key] < MAX_DEATHS:
                raise
            self._note_death(info.tenant_id, self._clock())
            return Refusal("numerical_crash", _CRASHED)

    def _told_lacking(self, sites: set[str]) -> str:
        """Whether routed experts take LoRA depends on the engine: not all decoders compute it."""
        return (
            f"LoRA on the experts of a mixture ({', '.join(sorted(sites))}) is not served by this engine, which does "
            "not run the base on Loraplex's own decoder. Train linears outside of the experts instead"
        )

    async def _current(self, info: VersionInfo) -> VersionInfo:
        """The version as it is now; `deleted` also where its tenant is."""
        try:
            get = self.catalog.get_version
            return await self.database.run(get, info.tenant_id, info.name, info.version)
        except (TenantNotFound, AdapterNotFound, VersionNotFound):
            return replace(info, state="deleted")

    async def _judge(self, info: VersionInfo, outputs: SiteOutputs) -> tuple[Refusal | None, dict[str, Any]]:
        async with asyncio.timeout(STUCK_S):  # they may have to be fetched
            path = partial(self._store.path, info.digest)
            folder = await anyio.to_thread.run_sync(path, abandon_on_cancel=True, limiter=self._fetches)
        files, base = (folder / CONFIG_NAME, folder / TENSORS_NAME), self._validation.base
        try:
            check = await self._compute(lambda: NumbersCheck(*files, base, outputs))
            verdict: NumbersVerdict | None = None
            while verdict is None:
                verdict = await self._compute(lambda: check.run(REFERENCE_S))
        except AdapterRefused as error:
            return Refusal(error.code, error.message), {}
        return None if verdict.ok else Refusal("numerical_mismatch", verdict.message), verdict.report

    async def _compute(self, work: Callable[[], _T]) -> _T:
        """Run it in the one thread of the reference, after those that came before. A thread that hangs in its storage
        is left behind, also where the check is cancelled."""
        async with self._reference, asyncio.timeout(STUCK_S):
            return await anyio.to_thread.run_sync(work, abandon_on_cancel=True, limiter=self._thread)

    def _tell(self, info: VersionInfo, refusal: Refusal | None, seconds: float) -> None:
        self._on_outcome("ready" if refusal is None else "rejected")
        log.info(
            "version_checked",
            tenant=info.tenant_id,
            adapter=f"{info.name}@{info.version}",
            state=info.state,
            max_error=(info.report["reference_error"] or {}).get("max"),
            reason=None if refusal is None else refusal.message,
            seconds=round(seconds, 3),
        )

    def _postponed(self, info: VersionInfo, error: Exception) -> _Attempt:
        retry = self._retries.setdefault(_key(info), _Retry())
        retry.failures += 1
        pause = min(LONGEST_RETRY_S, FIRST_RETRY_S * 2 ** min(retry.failures - 1, _MOST_DOUBLINGS))
        pause *= 0.5 + random.random() / 2  # noqa: S311 - spreads attempts, keeps no secret
        now = self._clock()
        if isinstance(error, EngineLost):
            self._note_death(info.tenant_id, now)
        if isinstance(error, EngineLost | _ChecksPaused):
            pause = max(pause, self._paused_until(info.tenant_id) - now)
        retry.due = now + pause
        self._failed.set()
        is_expected = isinstance(error, LoraplexError | OSError)
        reason = str(error) if is_expected else "the check failed; the server's log says why"
        if isinstance(error, TimeoutError):
            reason = "it could not be measured and computed in time"
        self._on_outcome("unchecked")
        log.warning(
            "version_not_checked",
            tenant=info.tenant_id,
            adapter=f"{info.name}@{info.version}",
            reason=reason,
            retry_s=round(pause, 1),
            exc_info=None if is_expected else error,
        )
        transient = isinstance(error, EngineUnavailable | EngineOverloaded | _ChecksPaused)
        return _Attempt(info, reason, transient and not isinstance(error, EngineDraining))

    def _check_paused(self, tenant: str) -> None:
        """Raises _ChecksPaused."""
        if self._clock() < self._paused_until(tenant):
            raise _ChecksPaused(
                "the engine ended during a check of this tenant's, and the next one waits for a while"
            )

    def _paused_until(self, tenant: str) -> float:
        last = self._paused.get(tenant)
        return 0.0 if last is None else last.due

    def _note_death(self, tenant: str, now: float) -> None:
        """The engine died during one of the tenant's checks. Another version that was measured at that moment may be
        the reason, so the first pause is short. A death is forgotten an hour after its pause."""
        last = self._paused.get(tenant)
        count = 1 if last is None or now >= last.due + LONGEST_PAUSE_S else last.failures + 1
        pause = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * _PAUSE_FACTOR ** min(count - 1, _MOST_DOUBLINGS))
        self._paused[tenant] = _Retry(count, now + pause)


def _key(info: VersionInfo) -> _Key:
    return info.tenant_id, info.name, info.number


def _require_ready(info: VersionInfo) -> VersionInfo:
    """Raises VersionRejected, VersionNotFound, AdapterUnavailable."""
    if info.state == "ready":
        return info
    if info.state == "rejected":
        raise VersionRejected(info)
    if info.state in ("deleted", "retired"):
        raise VersionNotFound(f"{info.name}@{info.version} was deleted while it was being checked.")
    remedy = "its stored bytes are damaged or lost. Upload the same files again."
    if info.state == "incompatible":
        remedy = "another base model is served now. Upload a version made for that one."
    raise AdapterUnavailable(
        f"{info.name}@{info.version} is {info.state}; its numbers were not checked: {remedy}"
    )
