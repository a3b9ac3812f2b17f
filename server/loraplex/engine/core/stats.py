"""Counters and gauges of the engine."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import asdict, fields
from typing import Any

from loraplex.adapters.cache.adapter_cache import AdapterCache
from loraplex.engine.execution.step_results import RowResult
from loraplex.engine.kv.disk_tier import DiskTier
from loraplex.engine.reports import (
    STEP_TOKENS,
    EngineStats,
    KVDiskCounts,
    KVHostCounts,
    SpeculationCounts,
    TenantStats,
)
from loraplex.engine.scheduling.scheduler import Scheduler
from loraplex.engine.types import Sequence, SequenceState, StepPlan


class StepTokens:
    """Counts steps by their tokens, for `EngineStats.steps_by_tokens`."""

    def __init__(self) -> None:
        self.total = 0
        self._steps = [0] * (len(STEP_TOKENS) + 1)

    @property
    def steps(self) -> tuple[int, ...]:
        return tuple(self._steps)

    def computed(self, plan: StepPlan, results: Iterable[RowResult]) -> None:
        num_tokens = sum(len(result.token_ids) for result in results)
        for row in plan.scheduled:
            num_tokens += max(0, min(row.num_tokens, row.num_prompt - row.start))
        self.total += num_tokens
        self._steps[bisect_left(STEP_TOKENS, num_tokens)] += 1


def engine_stats(
    scheduler: Scheduler, cache: AdapterCache[Any], live: Collection[Sequence], lacks_disk: bool
) -> EngineStats:
    """The counters of scheduler and cache. `live` are all requests that have not ended. `lacks_disk`: there should be a
    disk for prefixes."""
    usage = cache.usage()
    lines, host, disk = scheduler.batch_lines, scheduler.blocks.host, scheduler.blocks.disk
    ordinary = () if lines.is_on else scheduler.running.keys()
    running = Counter(seq.request.tenant_id for seq in ordinary)
    return EngineStats(
        **{field.name: getattr(usage, field.name) for field in fields(usage)},
        num_running=len(ordinary),
        num_waiting=scheduler.num_waiting,
        num_kv_blocks=scheduler.blocks.num_blocks,
        num_kv_blocks_used=scheduler.blocks.num_used - scheduler.background.num_blocks - lines.num_blocks,
        num_states_used=scheduler.blocks.num_states_used,
        num_snapshots=0 if (states := scheduler.blocks.states) is None else states.num_cached,
        num_kv_host_blocks=0 if host is None else host.num_slots,
        num_kv_host_blocks_used=0 if host is None else len(host),
        kv_host=KVHostCounts() if host is None else KVHostCounts(**asdict(host.counts)),
        kv_disk_bytes=0 if disk is None else disk.store.counts.capacity,
        kv_disk_bytes_used=0 if disk is None else disk.store.counts.num_bytes,
        num_kv_disks_off=int(lacks_disk if disk is None else disk.is_off),
        kv_disk=KVDiskCounts() if disk is None else _disk_counts(disk),
        num_preemptions=scheduler.num_preemptions,
        prefix_cache_queries=scheduler.prefix_use.queries,
        prefix_cache_hits=scheduler.prefix_use.hits,
        reserved_bytes=cache.tenants.reserved_bytes,
        reservable_bytes=cache.tenants.reservable_bytes,
        tenant_bytes=cache.tenants.tenant_bytes(),
        running_adapters=_digests(ordinary),
        waiting_adapters=_digests(
            seq for seq in live if seq.state is SequenceState.WAITING and not seq.request.background
        ),
        tenants={
            tenant: TenantStats(running[tenant], requests - running[tenant], counter)
            for tenant, requests, counter in (() if lines.is_on else scheduler.queue.tenants())
        },
        speculation=_speculation_counts(scheduler),
    )


def _disk_counts(disk: DiskTier) -> KVDiskCounts:
    counts = disk.store.counts
    return KVDiskCounts(
        written=counts.written,
        restored=disk.num_restored,
        evicted=counts.evicted,
        refused=disk.num_not_asked + sum(counts.refused.values()),
        damaged=counts.damaged,
        late=disk.num_late,
    )


def _speculation_counts(scheduler: Scheduler) -> SpeculationCounts:
    if scheduler.speculation is None:
        return SpeculationCounts()
    drafter = scheduler.speculation.drafter
    return SpeculationCounts(
        drafted={str(source): count for source, count in drafter.num_drafted.items()},
        accepted={str(source): count for source, count in drafter.num_accepted.items()},
    )


def _digests(sequences: Iterable[Sequence]) -> tuple[str, ...]:
    return tuple(sorted({ref.digest for seq in sequences if (ref := seq.request.adapter) is not None}))
