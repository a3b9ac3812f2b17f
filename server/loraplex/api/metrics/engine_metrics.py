"""Metric families from what the engine tells of itself at the moment of a scrape."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, islice, product, zip_longest

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.utils import floatToGoString

from loraplex.adapters.cache.background_loads import WARM_OUTCOMES
from loraplex.adapters.cache.entries import EVICTION_REASONS
from loraplex.adapters.cache.residency import CacheEntry
from loraplex.adapters.ref import AdapterRef
from loraplex.api.metrics.cluster_metrics import ClusterSnapshot
from loraplex.api.metrics.expert_metrics import expert_families
from loraplex.api.metrics.label_sets import OTHER, LabelSets
from loraplex.engine.reports import DRAFT_SOURCES, STEP_TOKENS, EngineInfo, EngineStats

MAX_NAMED_ADAPTERS = 100
"""Adapters that vllm:lora_requests_info names at most."""


@dataclass
class Grown:
    """Counters of an engine process, made monotonic over restarts, which begin them at 0 again."""

    _base: dict[str, float] = field(default_factory=dict)
    _last: dict[str, float] = field(default_factory=dict)

    def __call__(self, name: str, value: float) -> float:
        last = self._last.get(name, 0)
        if value < last:
            self._base[name] = self._base.get(name, 0) + last
        self._last[name] = value
        return self._base.get(name, 0) + value


@dataclass(frozen=True)
class EngineSnapshot:
    """`info` is None before the engine has ever been up.

    `up` says whether `stats` and `cache` are of now; otherwise they are the last that were known."""

    info: EngineInfo | None
    stats: EngineStats
    cache: Sequence[CacheEntry]
    up: bool
    restarts: int
    cluster: ClusterSnapshot = field(default_factory=ClusterSnapshot)


def vllm_families(
    snapshot: EngineSnapshot, model_name: str, grown: Grown, now: float, *, adapter_names: bool
) -> Iterable[Metric]:
    """The engine's share of the `vllm:*` metrics. `now` in seconds since the epoch. Without `adapter_names`
    adapters are told by the head of their digest, which is nobody's data."""
    stats, info = snapshot.stats, snapshot.info

    def gauge(name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"vllm:{name}", text, labels=["model_name"])
        family.add_metric([model_name], value)
        return family

    def counter(name: str, text: str, value: int) -> Metric:
        family = CounterMetricFamily(f"vllm:{name}", text, labels=["model_name"])
        family.add_metric([model_name], grown(name, value))
        return family

    used = stats.num_kv_blocks_used / stats.num_kv_blocks if stats.num_kv_blocks else 0.0
    yield gauge("num_requests_running", "Sequences in the running batch.", stats.num_running)
    yield gauge("num_requests_waiting", "Sequences that wait to be run.", stats.num_waiting)
    yield gauge("kv_cache_usage_perc", "Share of the KV blocks in use; 1 is all of them.", used)
    yield counter("prefix_cache_queries", "Tokens looked up in the prefix cache.", stats.prefix_cache_queries)
    yield counter("prefix_cache_hits", "Tokens found in the prefix cache.", stats.prefix_cache_hits)
    yield counter(
        "num_preemptions", "Sequences that lost their KV blocks for a while.", stats.num_preemptions
    )
    yield _iteration_tokens(stats, model_name, grown)
    if info is None:
        return
    config = {
        "model_name": model_name,
        "block_size": str(info.block_size),
        "cache_dtype": info.dtype,
        "enable_prefix_caching": "True",
        "num_gpu_blocks": str(info.num_kv_blocks // info.kv_groups),
    }
    family = GaugeMetricFamily("vllm:cache_config_info", "How the KV cache is set up.", labels=list(config))
    family.add_metric(list(config.values()), 1)
    yield family
    refs = {entry.ref.digest: entry.ref for entry in snapshot.cache}
    lora = GaugeMetricFamily(
        "vllm:lora_requests_info",
        "When this was so, in seconds since the epoch, of the adapters with requests.",
        labels=["max_lora", "running_lora_adapters", "waiting_lora_adapters"],
    )
    lora.add_metric(
        [
            str(info.max_num_seqs),
            _joined(stats.running_adapters, refs, adapter_names),
            _joined(stats.waiting_adapters, refs, adapter_names),
        ],
        now,
    )
    yield lora


def _iteration_tokens(stats: EngineStats, model_name: str, grown: Grown) -> Metric:
    name = "vllm:iteration_tokens_total"
    steps = stats.steps_by_tokens or (0,) * (len(STEP_TOKENS) + 1)
    bounds = [*map(floatToGoString, STEP_TOKENS), "+Inf"]
    up_to = accumulate(grown(f"{name} {bound}", count) for bound, count in zip(bounds, steps, strict=True))
    family = HistogramMetricFamily(
        name,
        "Tokens of an engine step: prompt tokens computed and output tokens drawn.",
        labels=["model_name"],
    )
    family.add_metric([model_name], list(zip(bounds, up_to, strict=True)), grown(name, stats.num_step_tokens))
    return family


def _joined(digests: Iterable[str], refs: dict[str, AdapterRef], adapter_names: bool) -> str:
    """A label of at most `MAX_NAMED_ADAPTERS` names. The tenants take turns, so that none crowds out another's."""
    by_tenant: dict[str, set[str]] = {}
    for digest in digests:
        ref = refs.get(digest)
        name = ref.name if ref is not None and adapter_names else digest[:12]
        by_tenant.setdefault("" if ref is None else ref.tenant_id, set()).add(name)
    rounds = zip_longest(*map(sorted, by_tenant.values()))
    names = dict.fromkeys(name for turn in rounds for name in turn if name is not None)
    return ",".join(sorted(islice(names, MAX_NAMED_ADAPTERS)))


def own_families(snapshot: EngineSnapshot, labels: LabelSets, grown: Grown) -> Iterable[Metric]:
    """The engine's share of the `loraplex_*` metrics."""
    stats, info = snapshot.stats, snapshot.info
    yield GaugeMetricFamily(
        "loraplex_engine_up", "1 while the engine takes requests.", value=int(snapshot.up)
    )
    yield CounterMetricFamily(
        "loraplex_engine_restarts", "Engine processes that were started again.", value=snapshot.restarts
    )
    name = "loraplex_engine_out_of_memory"
    yield CounterMetricFamily(
        name,
        "Steps that did not fit into the device's memory, and were computed again.",
        value=grown(name, stats.num_out_of_memory),
    )
    yield _speculation(stats, grown)
    yield from expert_families(stats.experts, grown)
    versions = GaugeMetricFamily(
        "loraplex_adapter_versions", "Adapter versions by where they are.", labels=["state"]
    )
    for state in ("hot", "warm", "cold"):
        versions.add_metric([state], sum(entry.state == state for entry in snapshot.cache))
    versions.add_metric(["loading"], sum(entry.loading for entry in snapshot.cache))
    yield versions
    yield from _adapter_counters(stats, grown)
    if info is not None:
        yield _cache_bytes(stats, info)
        yield from _kv_host(stats, info, grown)
        yield from _kv_disk(stats, grown)
        yield _capacity(info)
    yield GaugeMetricFamily(
        "loraplex_engine_waiting_for_grammar",
        "Sequences that wait for their grammar to be built.",
        value=stats.num_waiting_for_grammar,
    )
    yield GaugeMetricFamily(
        "loraplex_engine_state_slots_used",
        "States that sequences hold, of a model with layers that keep one.",
        value=stats.num_states_used,
    )
    yield GaugeMetricFamily(
        "loraplex_engine_state_snapshots",
        "States that no sequence holds, by which prefixes are found.",
        value=stats.num_snapshots,
    )
    yield GaugeMetricFamily("loraplex_adapter_leases", "Leases on device pages.", value=stats.num_leases)
    running = GaugeMetricFamily("loraplex_tenant_running", "Running sequences by tenant.", labels=["tenant"])
    waiting = GaugeMetricFamily("loraplex_tenant_waiting", "Waiting sequences by tenant.", labels=["tenant"])
    counters = GaugeMetricFamily(
        "loraplex_tenant_virtual_tokens", "The fair queue's counter by tenant.", labels=["tenant"]
    )
    rest_running = rest_waiting = 0
    for tenant, share in stats.tenants.items():
        label = labels.tenant(tenant)
        if label == OTHER:
            rest_running, rest_waiting = rest_running + share.running, rest_waiting + share.waiting
            continue
        running.add_metric([label], share.running)
        waiting.add_metric([label], share.waiting)
        counters.add_metric([label], share.counter)
    if rest_running or rest_waiting:
        running.add_metric([OTHER], rest_running)
        waiting.add_metric([OTHER], rest_waiting)
    yield from (running, waiting, counters, _tenant_bytes(stats, labels))


def _speculation(stats: EngineStats, grown: Grown) -> Metric:
    name = "loraplex_speculation_tokens"
    family = CounterMetricFamily(
        name, "Drafted tokens: verified by the model, and accepted.", labels=["outcome", "source"]
    )
    counts = stats.speculation
    for outcome, by_source in (("drafted", counts.drafted), ("accepted", counts.accepted)):
        for source in DRAFT_SOURCES:
            count = grown(f"{name} {outcome} {source}", by_source.get(source, 0))
            family.add_metric([outcome, source], count)
    return family


def _adapter_counters(stats: EngineStats, grown: Grown) -> Iterable[Metric]:
    slots = GaugeMetricFamily("loraplex_adapter_slots", "Slots of adapters on the device.", labels=["kind"])
    slots.add_metric(["used"], stats.num_adapter_slots_used)
    slots.add_metric(["capacity"], stats.num_adapter_slots)
    yield slots
    name = "loraplex_adapter_loads"
    loads = CounterMetricFamily(name, "Adapters loaded, by stage: disk, copy.", labels=["stage"])
    loads.add_metric(["disk"], grown(f"{name} disk", stats.adapter_loads))
    loads.add_metric(["copy"], grown(f"{name} copy", stats.adapter_copies))
    yield loads
    name = "loraplex_adapter_load_failures"
    yield CounterMetricFamily(
        name, "Loads of adapters that failed.", value=grown(name, stats.adapter_load_failures)
    )
    name = "loraplex_adapter_evictions"
    evictions = CounterMetricFamily(
        name, "Adapters evicted to make room for others, by tier: device, host.", labels=["tier"]
    )
    evictions.add_metric(["device"], grown(f"{name} device", stats.device_evictions))
    evictions.add_metric(["host"], grown(f"{name} host", stats.host_evictions))
    yield evictions
    name = "loraplex_adapter_evictions_by_reason"
    by_reason = CounterMetricFamily(
        name, "What left a tier: for room, for its tenant's cap, deleted, failed.", labels=["tier", "reason"]
    )
    for tier, reason in product(("device", "host"), EVICTION_REASONS):
        count = stats.evictions.get(tier, {}).get(reason, 0)
        by_reason.add_metric([tier, reason], grown(f"{name} {tier} {reason}", count))
    yield by_reason
    name = "loraplex_adapter_cap_evictions"
    of_caps = CounterMetricFamily(
        name, "Those of them of a tenant at its cap, by tier: device, host.", labels=["tier"]
    )
    for tier in ("device", "host"):
        of_caps.add_metric([tier], grown(f"{name} {tier}", stats.cap_evictions.get(tier, 0)))
    yield of_caps
    yield from _start_metrics(stats, grown)
    reserved = GaugeMetricFamily(
        "loraplex_adapter_reserved_bytes",
        "Device memory that tenants have reserved, and the most that can be kept for them.",
        labels=["kind"],
    )
    reserved.add_metric(["asked"], stats.reserved_bytes)
    reserved.add_metric(["most"], stats.reservable_bytes)
    yield reserved


def _start_metrics(stats: EngineStats, grown: Grown) -> Iterable[Metric]:
    """Metrics of the adapters that an engine loads after its start, pins first."""
    pins = GaugeMetricFamily("loraplex_adapter_pins", "Pinned versions by state.", labels=["state"])
    pins.add_metric(["held"], stats.num_pins_held)
    pins.add_metric(["coming"], stats.num_pins_coming)
    pins.add_metric(["missing"], max(0, stats.num_pins - stats.num_pins_held - stats.num_pins_coming))
    yield pins
    yield GaugeMetricFamily(
        "loraplex_adapter_warming",
        "Adapters that are still to be loaded after a restart.",
        value=stats.num_warming,
    )
    name = "loraplex_adapter_warmed"
    warmed = CounterMetricFamily(
        name, "Adapters loaded again after a restart, by outcome.", labels=["outcome"]
    )
    for outcome in WARM_OUTCOMES:
        warmed.add_metric([outcome], grown(f"{name} {outcome}", stats.warmed.get(outcome, 0)))
    yield warmed


def _tenant_bytes(stats: EngineStats, labels: LabelSets) -> Metric:
    family = GaugeMetricFamily(
        "loraplex_tenant_adapter_bytes",
        "Memory that a tenant's adapters take, by tier: device, host.",
        labels=["tenant", "tier"],
    )
    by_label: dict[str, list[int]] = {}
    for tenant, held in stats.tenant_bytes.items():
        sums = by_label.setdefault(labels.tenant(tenant), [0, 0])
        sums[0] += held.device
        sums[1] += held.host
    for label, (device, host) in by_label.items():
        family.add_metric([label, "device"], device)
        family.add_metric([label, "host"], host)
    return family


def _capacity(info: EngineInfo) -> Metric:
    capacity = GaugeMetricFamily(
        "loraplex_engine_capacity",
        "Sequences that may run and that may wait, KV blocks, states and their windows.",
        labels=["kind"],
    )
    capacity.add_metric(["running"], info.max_num_seqs)
    capacity.add_metric(["waiting"], info.max_waiting)
    capacity.add_metric(["kv_blocks"], info.num_kv_blocks)
    capacity.add_metric(["state_slots"], info.num_states)
    capacity.add_metric(["state_windows"], info.num_windows)
    return capacity


def _kv_host(stats: EngineStats, info: EngineInfo, grown: Grown) -> Iterable[Metric]:
    memory = GaugeMetricFamily(
        "loraplex_kv_host_bytes", "Host memory for prefixes, used and in all.", labels=["kind"]
    )
    memory.add_metric(["used"], stats.num_kv_host_blocks_used * info.kv_host_block_bytes)
    memory.add_metric(["capacity"], stats.num_kv_host_blocks * info.kv_host_block_bytes)
    yield memory
    name, counts = "loraplex_kv_host_blocks", stats.kv_host
    blocks = CounterMetricFamily(
        name, "Blocks of prefixes: written, restored, evicted, refused.", labels=["event"]
    )
    for event in ("written", "restored", "evicted", "refused"):
        blocks.add_metric([event], grown(f"{name} {event}", getattr(counts, event)))
    yield blocks
    name = "loraplex_kv_host_states"
    states = CounterMetricFamily(name, "States of prefixes: written, restored, evicted.", labels=["event"])
    for event in ("written", "restored", "evicted"):
        states.add_metric([event], grown(f"{name} {event}", getattr(counts, f"states_{event}")))
    yield states
    name = "loraplex_kv_host_restore_seconds"
    yield CounterMetricFamily(
        name, "Time that requests waited for prefixes in host memory.", value=grown(name, counts.restore_s)
    )


def _kv_disk(stats: EngineStats, grown: Grown) -> Iterable[Metric]:
    disk = GaugeMetricFamily("loraplex_kv_disk_bytes", "Disk for prefixes, used and in all.", labels=["kind"])
    disk.add_metric(["used"], stats.kv_disk_bytes_used)
    disk.add_metric(["capacity"], stats.kv_disk_bytes)
    yield disk
    name, counts = "loraplex_kv_disk_blocks", stats.kv_disk
    blocks = CounterMetricFamily(
        name, "Blocks of prefixes: written, restored, evicted, refused, damaged.", labels=["event"]
    )
    for event in ("written", "restored", "evicted", "refused", "damaged"):
        blocks.add_metric([event], grown(f"{name} {event}", getattr(counts, event)))
    yield blocks
    name = "loraplex_kv_disk_late"
    yield CounterMetricFamily(
        name, "Requests that went on without what the disk has of them.", value=grown(name, counts.late)
    )
    yield GaugeMetricFamily(
        "loraplex_kv_disk_off", "Engines that leave their disk alone for now.", value=stats.num_kv_disks_off
    )


def _cache_bytes(stats: EngineStats, info: EngineInfo) -> Metric:
    memory = GaugeMetricFamily(
        "loraplex_adapter_cache_bytes", "Memory for adapters, used and in all.", labels=["tier", "kind"]
    )
    page = info.arena_page_bytes
    memory.add_metric(["device", "used"], stats.num_arena_pages_used * page)
    memory.add_metric(["device", "capacity"], (stats.num_arena_pages or info.arena_pages) * page)
    memory.add_metric(["host", "used"], stats.host_bytes_used)
    memory.add_metric(["host", "capacity"], stats.host_bytes or info.adapter_cpu_bytes)
    return memory
