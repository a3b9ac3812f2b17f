"""Several engines told and asked at once, and their reports as one: gauges and counters are summed, names united. Those
of one engine are as it gave them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Collection, Coroutine, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

from loraplex.adapters.cache.residency import CacheEntry
from loraplex.engine.reports import EngineInfo, EngineStats, MemoryUse
from loraplex.engine.types import AdapterState
from loraplex.serving.errors import EngineUnavailable

T = TypeVar("T")

SLOW_S = 1.0
"""Time after the first answer in which the others have to come: half of what a scrape may take."""
_SUMMED = (
    "num_kv_blocks", "num_states", "num_windows", "kv_bytes", "arena_pages", "adapter_cpu_bytes", "max_num_seqs",
    "max_waiting",
)  # fmt: skip
COUNTERS = (
    "num_preemptions", "num_out_of_memory", "num_steps", "steps_by_tokens", "num_step_tokens", "prompt_tokens",
    "generation_tokens", "prefix_cache_queries", "prefix_cache_hits", "num_adapter_waits", "adapter_wait_s",
    "adapter_loads", "adapter_copies", "adapter_load_failures", "adapter_load_seconds", "device_evictions",
    "host_evictions", "cap_evictions", "evictions", "warmed", "speculation", "experts",
    "kv_host", "kv_disk",
)  # fmt: skip
"""Fields of `EngineStats` that count since an engine process began."""
_MOST_AWAY = 64
"""Engines that are away whose counters are kept by name."""
NEAREST: dict[AdapterState, int] = {"hot": 0, "warm": 1, "cold": 2}
"""The order in which an adapter's state on one engine stands for that on all."""


async def answers(asked: Mapping[str, Coroutine[Any, Any, T]]) -> dict[str, T]:
    """The answers to at least one question, by name, without those that fail or come too late. Raises what the first
    one raises where all fail."""
    tasks = {name: asyncio.create_task(question) for name, question in asked.items()}
    try:
        pending = set(tasks.values())
        while pending and not any(map(_has_answered, tasks.values())):
            _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        if pending:
            await asyncio.wait(pending, timeout=SLOW_S)
        found = {name: task.result() for name, task in tasks.items() if _has_answered(task)}
        return found or {name: task.result() for name, task in tasks.items()}
    finally:
        for task in tasks.values():
            task.cancel()


def _has_answered(task: asyncio.Task[T]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None


async def run_some(calls: Iterable[Awaitable[None]]) -> None:
    """Run all of them to their ends. Engines that are away come back without what they are told to forget: unless all
    of them are, theirs are no errors."""
    found = await asyncio.gather(*calls, return_exceptions=True)
    errors = [error for error in found if error is not None]
    others = [error for error in errors if not isinstance(error, EngineUnavailable)]
    if others or len(errors) == len(found):
        raise next(iter(others or errors), EngineUnavailable("no engine has joined"))


async def run_all(calls: Iterable[Awaitable[None]]) -> None:
    """Run all of them to their ends; then raise the first error."""
    for found in await asyncio.gather(*calls, return_exceptions=True):
        if found is not None:
            raise found


def merge_stats(stats: Sequence[EngineStats]) -> EngineStats:
    """Sums; of a tenant's counters the highest. `EngineStats()` of none."""
    if len(stats) < 2:
        return stats[0] if stats else EngineStats()
    merged: EngineStats = _merge(stats)
    tenants = {
        tenant: replace(
            its, counter=max(one.tenants[tenant].counter for one in stats if tenant in one.tenants)
        )
        for tenant, its in merged.tenants.items()
    }
    return replace(merged, tenants=tenants)


class Totals:
    """Statistics of a cluster whose counters do not fall when an engine goes: what its earlier lives counted, and what
    one that is away had counted when it was last asked, stays in the sums. Those of an engine that was always alone are
    as it gave them."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[str, EngineStats]] = {}
        self._ended = EngineStats()

    def merge(self, stats: Mapping[tuple[str, str], EngineStats]) -> EngineStats:
        """Statistics by the name of an engine and that of its process."""
        for (name, life), its in stats.items():
            last = self._last.get(name)
            if last is not None and last[0] != life:
                self._ended = merge_stats([self._ended, counters(last[1])])
            self._last[name] = life, its
        if len(self._last) < 2:
            return merge_stats(list(stats.values()))
        there = {name for name, _ in stats}
        away = [name for name in self._last if name not in there]
        for name in away[:-_MOST_AWAY]:  # names may be those of pods, which never come back
            self._ended = merge_stats([self._ended, counters(self._last.pop(name)[1])])
        found = [counters(self._last[name][1]) for name in away[-_MOST_AWAY:]]
        return merge_stats([*stats.values(), *found, self._ended])


def counters(stats: EngineStats) -> EngineStats:
    """The counters alone."""
    return EngineStats(**{name: getattr(stats, name) for name in COUNTERS})


def merge_info(infos: Sequence[EngineInfo]) -> EngineInfo:
    """The first one's of at least one, with the sizes of all; a sequence has to fit into each of them."""
    if len(infos) == 1:
        return infos[0]
    sums = {name: sum(getattr(info, name) for info in infos) for name in _SUMMED}
    shortest = min(info.max_model_len for info in infos)
    memory = [info.memory for info in infos]
    return replace(infos[0], max_model_len=shortest, memory=_merge_memory(memory), **sums)


def merge_cache(entries: Mapping[str, Collection[CacheEntry]]) -> list[CacheEntry]:
    """Entries by engine → one of each version. Where there are several engines, it names those that have it in
    memory."""
    if len(entries) == 1:
        return list(next(iter(entries.values())))
    by_digest: dict[str, list[tuple[str, CacheEntry]]] = {}
    for name, its in entries.items():
        for entry in its:
            by_digest.setdefault(entry.ref.digest, []).append((name, entry))
    return [_merge_entries(found) for found in by_digest.values()]


def merge_expert_rows(rows: Mapping[str, Mapping[int, tuple[int, ...]]]) -> dict[int, tuple[int, ...]]:
    """Rows by engine → sums."""
    summed: dict[int, tuple[int, ...]] = _merge([dict(its) for its in rows.values()])
    return summed


def _merge_entries(found: Sequence[tuple[str, CacheEntry]]) -> CacheEntry:
    among = [entry for _, entry in found]
    nearest = min(among, key=lambda entry: NEAREST[entry.state])
    idle = [entry.idle_s for entry in among if entry.idle_s is not None]
    return replace(
        nearest,
        loading=any(entry.loading for entry in among),
        pinned=any(entry.pinned for entry in among),
        leases=sum(entry.leases for entry in among),
        pages=sum(entry.pages for entry in among),
        device_bytes=sum(entry.device_bytes for entry in among),
        host_bytes=sum(entry.host_bytes for entry in among),
        idle_s=min(idle, default=None),
        replicas=tuple(sorted(name for name, entry in found if entry.state != "cold")),
    )


def _merge_memory(memory: Sequence[MemoryUse | None]) -> MemoryUse | None:
    known = [use for use in memory if use is not None]
    if len(known) < len(memory):
        return None
    sums: dict[str, int | None] = {}
    for field in fields(MemoryUse):
        values = [getattr(use, field.name) for use in known]
        sums[field.name] = None if None in values else sum(values)
    return MemoryUse(**sums)  # type: ignore[arg-type]


def _merge(values: Sequence[Any]) -> Any:
    """One of several values of one type: numbers are summed, mappings and records merged by key, tuples of numbers
    place by place; tuples of names are a union."""
    first = values[0]
    if len(values) == 1:
        return first
    if is_dataclass(first):
        parts = {
            field.name: _merge([getattr(value, field.name) for value in values]) for field in fields(first)
        }
        return replace(first, **parts)  # type: ignore[type-var]
    if isinstance(first, Mapping):
        by_key: dict[Any, list[Any]] = {}
        for value in values:
            for key, found in value.items():
                by_key.setdefault(key, []).append(found)
        return {key: _merge(found) for key, found in by_key.items()}
    if isinstance(first, tuple):
        there = [value for value in values if value]
        if there and isinstance(there[0][0], str):
            return tuple(sorted(set().union(*there)))
        return tuple(sum(column) for column in zip(*there, strict=True))
    return sum(values)
