"""The measurement of what another form of the base does to a version, once the version is ready.

It takes much longer than the check of numbers, and decides nothing: so a version takes traffic meanwhile. One version
is measured at a time, and the tenants take turns. An upload waits for the figures as long as for its verdict; later
they are in the version's report.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import anyio
import anyio.to_thread
import msgspec
import structlog

from loraplex.adapters.admission.trained_base import is_to_be_measured, served_form
from loraplex.adapters.errors import LoraplexError
from loraplex.adapters.store.files import CONFIG_NAME, TENSORS_NAME
from loraplex.adapters.store.interface import Store
from loraplex.control.catalog.validation import Validation
from loraplex.control.db.database import Database
from loraplex.control.types import VersionInfo
from loraplex.engine.base_error.messages import BaseErrorFigures, BaseErrorTask
from loraplex.engine.base_error.prompts import prompt_tokens
from loraplex.serving.forks.process import bare_environment
from loraplex.serving.supervision.child import Child

COMMAND = (sys.executable, "-m", "loraplex.engine.base_error")
TIME_LIMIT_S = 3600.0
"""An 8B takes about seven minutes of one core. At the lowest priority, beside an engine that uses all cores, it gets a
fraction of one."""
_KILL_WAIT_S = 5.0
_MOST_ANSWER_BYTES = 1 << 16
_ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


async def measure_in_process(
    task: BaseErrorTask, *, command: Sequence[str] = COMMAND, limit_s: float = TIME_LIMIT_S
) -> BaseErrorFigures:
    """The figures, or the reason why there are none: also where the process cannot be started, breaks, or takes longer
    than `limit_s` seconds. It does not outlive the call."""
    answer, to_answer = os.pipe()
    try:
        child = Child([*command, str(to_answer)], [to_answer], bare_environment() | _ENVIRONMENT)
    except OSError as error:
        os.close(answer)
        return BaseErrorFigures(reason=f"the process that measures did not start: {error.strerror}")
    finally:
        os.close(to_answer)
    try:
        child.tell(msgspec.json.encode(task))
        if not await child.wait_exit(limit_s):
            return BaseErrorFigures(reason=f"the measurement took longer than {limit_s:g} s")
        return _read(answer, child.exited.result())
    finally:
        os.close(answer)
        await child.kill(_KILL_WAIT_S)


def _read(answer: int, status: int) -> BaseErrorFigures:
    """The process has ended: what it wrote is there."""
    try:
        return msgspec.json.decode(os.read(answer, _MOST_ANSWER_BYTES), type=BaseErrorFigures)
    except msgspec.MsgspecError:
        how = f"with {status}" if status >= 0 else f"by {signal.Signals(-status).name}"
        return BaseErrorFigures(reason=f"the process that measures ended {how}, without an answer")


FETCH_S = 300.0
"""After which the storage of a version's files is given up."""
MOST_WAITING = 64
"""Versions of a tenant that wait for their measurement; it takes minutes for a large base."""
_OTHER_FORM = "the server serves the base in another form than when the version was uploaded"
_Key = tuple[str, str, int]

log = structlog.get_logger("loraplex.admin")
WARN_ABOVE = 0.1
"""Nats a token by which another form of the base may change an adapter's answers before its report warns."""


@dataclass(frozen=True, slots=True)
class ServedBase:
    """The served base as a measurement needs it, beside its spec. `encode`: its tokenizer. `max_model_len` and
    the folders are the engine's settings."""

    encode: Callable[[str], list[int]]
    max_model_len: int = 0
    cache_dir: Path | None = None
    plan_dir: Path | None = None


class BaseErrors:
    """Measurements of one event loop. `warn_above`: the least divergence that makes a warning, in nats a token."""

    def __init__(
        self,
        *,
        database: Database,
        validation: Validation,
        store: Store,
        served: ServedBase,
        warn_above: float = WARN_ABOVE,
        measure: Callable[[BaseErrorTask], Awaitable[BaseErrorFigures]] = measure_in_process,
    ) -> None:
        self._database = database
        self._validation = validation
        self._store = store
        self._served = served
        self._warn_above = warn_above
        self._measure = measure
        self._running: dict[_Key, asyncio.Task[VersionInfo]] = {}
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._single = asyncio.Lock()
        self._left_out: set[str] = set()
        self._search: asyncio.Task[None] | None = None

    def start(self, info: VersionInfo) -> None:
        """Begin to measure a version that is ready, if its report lacks figures and no measurement is on its way. A
        tenant's beyond `MOST_WAITING` begin when the tenant has none of those left."""
        key = (info.tenant_id, info.name, info.number)
        if key in self._running or not is_to_be_measured(info.report):
            return
        if self._waiting_of(info.tenant_id) >= MOST_WAITING:
            self._left_out.add(info.tenant_id)
            return
        task = self._running[key] = asyncio.create_task(self._record(info))
        task.add_done_callback(partial(self._on_ended, key))

    async def start_unmeasured(self) -> None:
        """Begin to measure versions that an earlier server left unmeasured. Raises what the database raises."""
        for info in await self._database.run(self._validation.unmeasured):
            self.start(info)

    async def wait(self, info: VersionInfo, timeout_s: float) -> VersionInfo:
        """The version with the figures, if they come within the time; else as it is. The measurement goes on. Raises
        VersionNotFound where the version was deleted meanwhile."""
        task = self._running.get((info.tenant_id, info.name, info.number))
        if task is None:  # it may have ended since `info` was read
            lacks = is_to_be_measured(info.report)
            return await self._database.run(self._validation.current, info) if lacks else info
        await asyncio.wait({task}, timeout=max(0.0, timeout_s))
        return task.result() if task.done() and not task.cancelled() else info

    async def close(self) -> None:
        """End what is on its way: the next server begins it again."""
        self._left_out.clear()
        running: list[asyncio.Task[Any]] = list(self._running.values())
        if self._search is not None:
            running.append(self._search)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    def _waiting_of(self, tenant_id: str) -> int:
        return sum(other == tenant_id for other, _, _ in self._running)

    def _on_ended(self, key: _Key, _: asyncio.Task[VersionInfo]) -> None:
        del self._running[key]
        tenant_id = key[0]
        searching = self._search is not None and not self._search.done()
        if tenant_id in self._left_out and not searching and not self._waiting_of(tenant_id):
            self._left_out.discard(tenant_id)
            self._search = asyncio.create_task(self._find_left_out(tenant_id))

    async def _find_left_out(self, tenant_id: str) -> None:
        try:
            await self.start_unmeasured()
        except LoraplexError as error:
            # Those that are left wait for another measurement of the tenant, or for the next start of a server.
            self._left_out.add(tenant_id)
            log.warning("base_error_failed", exc_info=error)

    async def _record(self, info: VersionInfo) -> VersionInfo:
        """The version with its figures, or as it was where they cannot be written."""
        async with self._turns.setdefault(info.tenant_id, asyncio.Lock()), self._single:
            began = time.monotonic()
            try:
                figures = await self._figures(info)
            except Exception as error:
                figures = BaseErrorFigures(reason="the measurement did not begin; the server's log says why")
                log.warning("base_error_failed", exc_info=error)
            seconds = time.monotonic() - began
            found = msgspec.structs.asdict(figures)
            try:
                record = partial(self._validation.record_base_error, warn_above=self._warn_above)
                info = await self._database.run(record, info, found)
            except LoraplexError as error:
                found["reason"] = error.message
        report = log.info if figures.kl is not None and figures.kl < self._warn_above else log.warning
        report(
            "base_error_measured",
            tenant=info.tenant_id,
            adapter=f"{info.name}@{info.version}",
            seconds=round(seconds, 3),
            kl=found["kl"],
            top1=found["top1"],
            tokens=found["tokens"],
            reason=found["reason"],
        )
        return info

    async def _figures(self, info: VersionInfo) -> BaseErrorFigures:
        base, served, error = self._validation.base, self._served, info.report["base_error"]
        if error["served"] != served_form(base):
            return BaseErrorFigures(reason=_OTHER_FORM)
        async with asyncio.timeout(FETCH_S):
            folder = await anyio.to_thread.run_sync(self._store.path, info.digest, abandon_on_cancel=True)
        return await self._measure(
            BaseErrorTask(
                model_dir=base.model_dir,
                quantise=base.quantise,
                trained_on=error["trained_on"],
                config_path=str(folder / CONFIG_NAME),
                tensors_path=str(folder / TENSORS_NAME),
                digest=info.digest,
                max_rank=info.rank,
                prompts=prompt_tokens(served.encode),
                max_model_len=served.max_model_len,
                cache_dir=None if served.cache_dir is None else str(served.cache_dir),
                plan_dir=None if served.plan_dir is None else str(served.plan_dir),
            )
        )
