"""The engine and its adapter cache."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from loraplex.admin.schemas import described
from loraplex.admin.schemas.fields import OmittedNull, PageQuery, ResponseBody


class CacheQuery(PageQuery):
    """Versions of this tenant, and of adapters of this name."""

    tenant: Annotated[Annotated[str, Field(pattern=described.TENANT_ID)] | None, OmittedNull()] = None
    adapter: Annotated[Annotated[str, Field(pattern=described.ADAPTER_NAME)] | None, OmittedNull()] = None


class CacheRow(ResponseBody):
    """Where one version is: `residency` names every tier that holds it, the fastest first. `load_seconds` is the
    last load by stage; `last_used_seconds_ago` is null if it was not used since the engine began. `replicas`: the
    engines that have it in memory, where the server has several."""

    tenant_id: str
    name: str
    version: str
    digest: str
    residency: list[Literal["device", "host", "disk"]]
    loading: bool
    pinned: bool
    leases: int
    device_bytes: int
    host_bytes: int
    disk_bytes: int
    last_used_seconds_ago: float | None
    load_seconds: dict[str, float]
    replicas: list[str]
    error: str | None


class CacheTier(ResponseBody):
    """One tier of memory for adapters. `loads` came into it, and took `load_seconds` together; `evictions` left it, by
    reason."""

    bytes_used: int
    bytes_capacity: int
    loads: int
    load_seconds: float
    evictions: dict[str, int]


class PrefixDisk(ResponseBody):
    """Disk for prefixes behind host memory, in blocks of 16 tokens: `written` there, `restored` from there, `evicted`
    for others, `refused` (too many that wait, a full or failing disk, an erased owner), `damaged` when read. `late`
    requests went on without theirs. `off` engines leave their disk alone for now."""

    bytes_used: int
    bytes_capacity: int
    written: int
    restored: int
    evicted: int
    refused: int
    damaged: int
    late: int
    off: int


class PrefixTier(ResponseBody):
    """Host memory for prefixes that the KV cache lost, in blocks of 16 tokens: `written` there, `restored` from there,
    `evicted` for others, `refused` since their version was deleted (with states). The same of the `states` of models
    whose layers keep one. Requests waited `restore_seconds` for theirs."""

    bytes_used: int
    bytes_capacity: int
    written: int
    restored: int
    evicted: int
    refused: int
    states_written: int
    states_restored: int
    states_evicted: int
    restore_seconds: float
    disk: PrefixDisk


class CachePins(ResponseBody):
    """Pinned versions: on the device, and on their way there. The others failed or find no memory."""

    pinned: int
    held: int
    coming: int


class CacheTotals(ResponseBody):
    """Gauges of now, and counters since the engine process began. `queue_waits` sequences waited in the queue for their
    adapter, `queue_seconds` together."""

    device: CacheTier
    host: CacheTier
    prefixes: PrefixTier
    pins: CachePins
    queue_waits: int
    queue_seconds: float


class CachePage(ResponseBody):
    """`totals` are of the whole cache, on each page."""

    data: list[CacheRow]
    next_cursor: str | None
    totals: CacheTotals


class EngineMemory(ResponseBody):
    """The device's memory in bytes by what takes it, as the start left it. `workspace`: recordings, inputs and the
    tensors of the largest step; `others`: other processes and the driver. What is null is not known on a CPU."""

    weights: int
    arena: int
    kv: int
    workspace: int | None
    others: int | None
    free: int | None
    total: int | None


class ExpertLayer(ResponseBody):
    """`rows[e]` went to expert e of this layer."""

    layer: int
    rows: list[int]


class Experts(ResponseBody):
    """The layers with a mixture; none of a model without routers."""

    layers: list[ExpertLayer]


class Engine(ResponseBody):
    """`info` is what the engine reported at its start; `stats` its gauges and counters now, null while no engine
    answers."""

    healthy: bool
    unhealthy_reason: str | None
    restarts: int
    live_requests: int
    memory: EngineMemory | None
    info: dict[str, Any]
    stats: dict[str, Any] | None
