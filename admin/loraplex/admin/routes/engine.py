"""/engine and /cache."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Query

from loraplex.adapters.cache.residency import CacheEntry
from loraplex.admin.framework.dependencies import Operator, Services
from loraplex.admin.framework.route import AdminRoute
from loraplex.admin.schemas.engine import (
    CachePage,
    CachePins,
    CacheQuery,
    CacheRow,
    CacheTier,
    CacheTotals,
    Engine,
    EngineMemory,
    ExpertLayer,
    Experts,
    PrefixDisk,
    PrefixTier,
)
from loraplex.control.catalog.all_versions import list_all_versions
from loraplex.control.types import VersionInfo
from loraplex.engine.reports import EngineInfo, EngineStats
from loraplex.serving.errors import ServingError

_RESIDENCY = {"hot": ["device", "host", "disk"], "warm": ["host", "disk"], "cold": ["disk"]}


router = APIRouter(route_class=AdminRoute)


@router.get("/engine")
async def get_engine(_: Operator, services: Services) -> Engine:
    """Show the engine's settings and gauges."""
    engine = services.engine
    stats: dict[str, Any] | None = None
    if engine.healthy:
        try:
            stats = dataclasses.asdict(await engine.stats())
        except ServingError:
            stats = None  # the engine has just gone; `healthy` below reports it
    info = dataclasses.asdict(engine.info)
    memory = info.pop("memory")
    return Engine(
        healthy=engine.healthy,
        unhealthy_reason=engine.unhealthy_reason,
        restarts=engine.num_restarts,
        live_requests=engine.num_live,
        memory=None if memory is None else EngineMemory(**memory),
        info=info,
        stats=stats,
    )


@router.get("/engine/experts")
async def get_experts(_: Operator, services: Services) -> Experts:
    """Show how many rows the routers of a mixture sent to each expert since the engine began."""
    rows = await services.engine.expert_rows()
    return Experts(layers=[ExpertLayer(layer=layer, rows=list(its)) for layer, its in sorted(rows.items())])


@router.get("/cache")
async def list_cache(_: Operator, query: Annotated[CacheQuery, Query()], services: Services) -> CachePage:
    """List where every version is: device, host memory, disk; and what each tier holds."""
    read = partial(list_all_versions, tenant_id=query.tenant, adapter=query.adapter)
    page = await services.database.run(read, services.database, query.limit, query.cursor)
    digests = {info.digest for info in page.items}
    known = {entry.ref.digest: entry for entry in await services.engine.cache(digests)}
    rows = [_row(info, known.get(info.digest)) for info in page.items]
    totals = _totals(await services.engine.stats(), services.engine.info)
    return CachePage(data=rows, next_cursor=page.next_cursor, totals=totals)


def _totals(stats: EngineStats, info: EngineInfo) -> CacheTotals:
    def tier(name: str, used: int, capacity: int, loads: int, stage: str) -> CacheTier:
        seconds = stats.adapter_load_seconds.get(stage, 0.0)
        evictions = stats.evictions.get(name, {})
        return CacheTier(
            bytes_used=used,
            bytes_capacity=capacity,
            loads=loads,
            load_seconds=seconds,
            evictions=evictions,
        )

    counts, block = stats.kv_host, info.kv_host_block_bytes
    page, pages, used = info.arena_page_bytes, stats.num_arena_pages, stats.num_arena_pages_used
    return CacheTotals(
        device=tier("device", used * page, pages * page, stats.adapter_copies, "copy"),
        host=tier("host", stats.host_bytes_used, stats.host_bytes, stats.adapter_loads, "disk"),
        prefixes=PrefixTier(
            bytes_used=stats.num_kv_host_blocks_used * block,
            bytes_capacity=stats.num_kv_host_blocks * block,
            written=counts.written,
            restored=counts.restored,
            evicted=counts.evicted,
            refused=counts.refused,
            states_written=counts.states_written,
            states_restored=counts.states_restored,
            states_evicted=counts.states_evicted,
            restore_seconds=counts.restore_s,
            disk=PrefixDisk(
                bytes_used=stats.kv_disk_bytes_used,
                bytes_capacity=stats.kv_disk_bytes,
                off=stats.num_kv_disks_off,
                **dataclasses.asdict(stats.kv_disk),
            ),
        ),
        pins=CachePins(pinned=stats.num_pins, held=stats.num_pins_held, coming=stats.num_pins_coming),
        queue_waits=stats.num_adapter_waits,
        queue_seconds=stats.adapter_wait_s,
    )


def residency(entry: CacheEntry | None) -> list[str]:
    """The tiers that hold a version, the fastest first; None: the engine does not know it."""
    if entry is None:
        return _RESIDENCY["cold"]
    return [tier for tier in _RESIDENCY[entry.state] if tier != "host" or entry.host_bytes]


def _row(info: VersionInfo, entry: CacheEntry | None) -> CacheRow:
    fields: dict[str, Any] = {
        "tenant_id": info.tenant_id,
        "name": info.name,
        "version": info.version,
        "digest": info.digest,
        "pinned": info.pinned,
        "disk_bytes": info.bytes,
        "residency": residency(entry),
        "loading": False,
        "leases": 0,
        "device_bytes": 0,
        "host_bytes": 0,
        "last_used_seconds_ago": None,
        "load_seconds": {},
        "replicas": [],
        "error": None,
    }
    if entry is not None:
        fields |= {
            "loading": entry.loading,
            "leases": entry.leases,
            "device_bytes": entry.device_bytes,
            "host_bytes": entry.host_bytes,
            "last_used_seconds_ago": entry.idle_s,
            "load_seconds": entry.load_seconds,
            "replicas": list(entry.replicas),
            "error": entry.error,
        }
    return CacheRow(**fields)
