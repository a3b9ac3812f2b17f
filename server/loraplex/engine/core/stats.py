"""Counters and gauges of the engine."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterable
from typing import Any

from loraplex.adapters.cache.adapter_cache import AdapterCache
from loraplex.engine.reports import STEP_TOKENS, CacheEntry, EngineStats, TenantStats
from loraplex.engine.scheduling.scheduler import Scheduler
from loraplex.engine.types import Sequence, SequenceState, StepPlan, StepResult


class StepTokens:
    """Counts steps by their tokens, for `EngineStats.steps_by_tokens`."""

    def __init__(self) -> None:
        self.total = 0
        self._steps = [0] * (len(STEP_TOKENS) + 1)

    @property
    def steps(self) -> tuple[int, ...]:
        return tuple(self._steps)

    def computed(self, plan: StepPlan, result: StepResult) -> None:
        num_tokens = sum(map(len, result.token_ids))
        for row in plan.scheduled:
            num_tokens += max(0, min(row.num_tokens, row.seq.num_prompt - row.start))
        self.total += num_tokens
        self._steps[bisect_left(STEP_TOKENS, num_tokens)] += 1


def engine_stats(scheduler: Scheduler, cache: AdapterCache[Any], live: Collection[Sequence]) -> EngineStats:
    """The counters of scheduler and cache. `live` are all requests that have not ended."""
    usage = cache.usage()
    running = Counter(seq.request.tenant_id for seq in scheduler.running)
    return EngineStats(
        num_running=len(scheduler.running),
        num_waiting=scheduler.num_waiting,
        num_waiting_for_grammar=len(scheduler.held),
        num_kv_blocks=scheduler.blocks.num_blocks,
        num_kv_blocks_used=scheduler.blocks.num_used,
        num_preemptions=scheduler.num_preemptions,
        prefix_cache_queries=scheduler.prefix_queries,
        prefix_cache_hits=scheduler.prefix_hits,
        num_arena_pages=usage.num_pages,
        num_arena_pages_used=usage.num_pages_used,
        host_bytes=usage.host_bytes,
        host_bytes_used=usage.host_bytes_used,
        num_leases=usage.num_leases,
        num_adapter_slots=usage.num_slots,
        num_adapter_slots_used=usage.num_slots_used,
        adapter_loads=usage.loads,
        adapter_copies=usage.copies,
        adapter_load_failures=usage.load_failures,
        adapter_load_seconds=usage.load_seconds,
        device_evictions=usage.device_evictions,
        host_evictions=usage.host_evictions,
        cap_evictions=usage.cap_evictions,
        evictions=usage.evictions,
        num_pins=usage.num_pinned,
        num_pins_held=usage.num_pins_held,
        num_pins_coming=usage.num_pins_coming,
        num_warming=usage.num_warming,
        warmed=usage.warmed,
        reserved_bytes=cache.tenants.reserved_bytes,
        reservable_bytes=cache.tenants.reservable_bytes,
        tenant_bytes=cache.tenants.tenant_bytes(),
        running_adapters=_digests(scheduler.running),
        waiting_adapters=_digests(seq for seq in live if seq.state is SequenceState.WAITING),
        tenants={
            tenant: TenantStats(running[tenant], requests - running[tenant], counter)
            for tenant, requests, counter in scheduler.queue.tenants()
        },
    )


def cache_entries(
    cache: AdapterCache[Any], now: float, digests: Collection[str] | None = None
) -> list[CacheEntry]:
    """Where the adapter versions are, all or those of `digests`; `now` by the cache's clock."""
    return [
        CacheEntry(
            ref=entry.ref,
            state=entry.state,
            loading=entry.loading,
            pinned=entry.pinned,
            leases=entry.leases,
            device_bytes=entry.device_bytes,
            host_bytes=entry.host_bytes,
            idle_s=None if entry.last_used is None else max(0.0, now - entry.last_used),
            load_seconds=entry.load_seconds,
            error=entry.error,
        )
        for entry in cache.entries(digests)
    ]


def _digests(sequences: Iterable[Sequence]) -> tuple[str, ...]:
    return tuple(sorted({ref.digest for seq in sequences if (ref := seq.request.adapter) is not None}))
