"""The reports of several engines as one."""

from __future__ import annotations

from dataclasses import fields, replace

from loraplex.adapters.cache.residency import CacheEntry
from loraplex.adapters.cache.tenant_memory import TenantBytes
from loraplex.adapters.ref import AdapterRef
from loraplex.engine.reports import EngineStats, ExpertStats, SpeculationCounts, TenantStats
from loraplex.serving.engines.merged import COUNTERS, Totals, merge_cache, merge_info, merge_stats
from support.engine.fake_engine import fake_engine_info

FIRST = EngineStats(
    num_running=2, prompt_tokens=10, steps_by_tokens=(1, 2), evictions={"device": {"room": 1}},
    tenants={"a": TenantStats(1, 2, 5.0)}, tenant_bytes={"a": TenantBytes(3, 4)}, running_adapters=("x", "y"),
    speculation=SpeculationCounts({"own": 8, "history": 2}, {"own": 5}),
    experts=ExpertStats((0, 3), 7.5, (2, 1), 4.0),
)  # fmt: skip
SECOND = EngineStats(
    num_running=3, prompt_tokens=7, steps_by_tokens=(0, 5), evictions={"device": {"room": 2, "cap": 1}},
    tenants={"a": TenantStats(0, 1, 9.0), "b": TenantStats()}, tenant_bytes={"b": TenantBytes(1, 0)},
    running_adapters=("y",), speculation=SpeculationCounts({"own": 1}, {"own": 1, "history": 0}),
)  # fmt: skip


def test_statistics_are_summed() -> None:
    merged = merge_stats([FIRST, SECOND])
    assert (merged.num_running, merged.prompt_tokens, merged.steps_by_tokens) == (5, 17, (1, 7))
    assert merged.evictions == {"device": {"room": 3, "cap": 1}}
    assert merged.tenants == {"a": TenantStats(1, 3, 9.0), "b": TenantStats()}
    assert merged.tenant_bytes == {"a": TenantBytes(3, 4), "b": TenantBytes(1, 0)}
    assert merged.running_adapters == ("x", "y")
    assert merged.speculation == SpeculationCounts({"own": 9, "history": 2}, {"own": 6, "history": 0})
    assert merged.experts == FIRST.experts, "an engine that has computed nothing yet"
    assert merge_stats([FIRST, FIRST]).experts == ExpertStats((0, 6), 15.0, (4, 2), 8.0)
    assert merge_stats([]) == EngineStats()


def test_an_engine_alone_is_as_it_says() -> None:
    totals = Totals()
    assert totals.merge({("r1", "0"): FIRST}) is FIRST
    assert totals.merge({("r1", "1"): EngineStats(prompt_tokens=1)}) == EngineStats(prompt_tokens=1)


def test_counters_do_not_fall_when_an_engine_goes() -> None:
    totals = Totals()
    assert totals.merge({("r1", "0"): FIRST, ("r2", "0"): SECOND}).prompt_tokens == 17
    away = totals.merge({("r1", "0"): FIRST})
    assert (away.prompt_tokens, away.num_running, away.evictions["device"]) == (17, 2, {"room": 3, "cap": 1})
    assert away.speculation.drafted == {"own": 9, "history": 2}
    assert totals.merge({("r2", "0"): SECOND}).experts == FIRST.experts
    back = totals.merge({("r1", "0"): FIRST, ("r2", "1"): EngineStats(prompt_tokens=1)})
    assert (back.prompt_tokens, back.num_running) == (18, 2)
    later = totals.merge({("r1", "0"): FIRST, ("r2", "2"): EngineStats(prompt_tokens=3)})
    assert later.prompt_tokens == 10 + 7 + 1 + 3


def test_engines_that_never_come_back_are_one_figure() -> None:
    totals = Totals()
    for number in range(200):
        totals.merge({("r1", "0"): FIRST, (f"pod-{number}", "0"): EngineStats(prompt_tokens=1)})
    assert totals.merge({("r1", "0"): FIRST}).prompt_tokens == FIRST.prompt_tokens + 200


def test_each_counter_is_named() -> None:
    """Each field of the statistics is a gauge or a counter, and a new one has to be sorted in."""
    gauges = {
        "num_running", "num_waiting", "num_waiting_for_grammar", "num_kv_blocks", "num_kv_blocks_used",
        "num_states_used", "num_snapshots", "num_kv_host_blocks", "num_kv_host_blocks_used",
        "kv_disk_bytes", "kv_disk_bytes_used", "num_kv_disks_off",
        "reserved_bytes", "reservable_bytes", "tenant_bytes", "running_adapters", "waiting_adapters", "tenants",
        "num_arena_pages", "num_arena_pages_used", "num_adapter_slots", "num_adapter_slots_used", "host_bytes",
        "host_bytes_used", "num_leases", "num_pins", "num_pins_held", "num_pins_coming", "num_warming", "reloads",
    }  # fmt: skip
    assert {field.name for field in fields(EngineStats)} == gauges | set(COUNTERS)


def test_sizes_are_summed_and_the_shortest_context_counts() -> None:
    infos = [fake_engine_info(max_model_len=100), fake_engine_info(max_model_len=90)]
    merged = merge_info(infos)
    assert (merged.max_model_len, merged.max_num_seqs) == (90, 2 * infos[0].max_num_seqs)
    assert merged.memory is not None
    assert infos[0].memory is not None
    assert merged.memory.weights == 2 * infos[0].memory.weights
    assert merge_info([replace(infos[0], memory=None), infos[1]]).memory is None


def test_an_adapter_is_where_it_is_nearest() -> None:
    ref = AdapterRef("acme", "a", 1, "d", 8)
    warm, hot = (
        CacheEntry(ref, "warm", leases=1, idle_s=4.0),
        CacheEntry(ref, "hot", pinned=True, device_bytes=9),
    )
    (merged,) = merge_cache({"r1": [warm], "r2": [hot], "r3": [CacheEntry(ref, "cold")]})
    assert (merged.state, merged.pinned, merged.leases, merged.idle_s) == ("hot", True, 1, 4.0)
    assert merged.replicas == ("r1", "r2")
    assert merge_cache({"r1": [warm]}) == [warm]
