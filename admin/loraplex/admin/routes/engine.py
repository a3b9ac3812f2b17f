"""/engine and /cache."""

from __future__ import annotations

import dataclasses
from typing import Any

from loraplex.admin.inventory import list_all_versions
from loraplex.admin.operation import Answer, Call, Operation
from loraplex.admin.schemas import CachePage, CacheRow, Engine, PageQuery
from loraplex.admin.services import AdminServices
from loraplex.control.types import VersionInfo
from loraplex.engine.protocol import CacheEntry
from loraplex.serving.errors import ServingError

_RESIDENCY = {"hot": ["device", "host", "disk"], "warm": ["host", "disk"], "cold": ["disk"]}


def engine_operations(services: AdminServices) -> list[Operation]:
    run = services.database.run

    async def get_engine(_: Call) -> Answer:
        engine = services.engine
        stats: dict[str, Any] | None = None
        if engine.healthy:
            try:
                stats = dataclasses.asdict(await engine.stats())
            except ServingError:
                stats = None  # it went away in this moment; `healthy` below tells
        return Answer(
            Engine(
                healthy=engine.healthy,
                unhealthy_reason=engine.unhealthy_reason,
                restarts=engine.num_restarts,
                live_requests=engine.num_live,
                info=dataclasses.asdict(engine.info),
                stats=stats,
            )
        )

    async def list_cache(call: Call) -> Answer:
        query = call.query(PageQuery)
        page = await run(list_all_versions, services.database, query.limit, query.cursor)
        known = {entry.ref.digest: entry for entry in await services.engine.cache()}
        rows = [_row(info, known.get(info.digest)) for info in page.items]
        return Answer(CachePage(data=rows, next_cursor=page.next_cursor))

    return [
        Operation(
            "GET", "/engine", "operator", get_engine, "Show the engine's settings and gauges.", {200: Engine}
        ),
        Operation(
            "GET",
            "/cache",
            "operator",
            list_cache,
            "List where every version is: device, host memory, disk.",
            {200: CachePage},
            query=PageQuery,
        ),
    ]


def _row(info: VersionInfo, entry: CacheEntry | None) -> CacheRow:
    fields: dict[str, Any] = {
        "tenant_id": info.tenant_id,
        "name": info.name,
        "version": info.version,
        "digest": info.digest,
        "pinned": info.pinned,
        "disk_bytes": info.bytes,
        "residency": _RESIDENCY["cold"],
        "loading": False,
        "leases": 0,
        "device_bytes": 0,
        "host_bytes": 0,
        "last_used_seconds_ago": None,
        "load_seconds": {},
        "error": None,
    }
    if entry is not None:
        residency = [tier for tier in _RESIDENCY[entry.state] if tier != "host" or entry.host_bytes]
        fields |= {
            "residency": residency,
            "loading": entry.loading,
            "leases": entry.leases,
            "device_bytes": entry.device_bytes,
            "host_bytes": entry.host_bytes,
            "last_used_seconds_ago": entry.idle_s,
            "load_seconds": entry.load_seconds,
            "error": entry.error,
        }
    return CacheRow(**fields)
