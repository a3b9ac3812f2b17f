"""The metrics that gateways and dashboards read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.routing import Route

from loraplex.adapters.cache.residency import CacheEntry
from loraplex.adapters.cache.tenant_memory import TenantBytes
from loraplex.api.metrics import EngineSnapshot, Metrics, Scraper
from loraplex.api.routes.metrics import metrics_route
from loraplex.control.errors import QuotaSpent, RateLimited
from loraplex.control.types import ReachedLimit
from loraplex.engine.reports import (
    EngineInfo,
    EngineStats,
    ExpertStats,
    KVDiskCounts,
    KVHostCounts,
    SpeculationCounts,
    TenantStats,
)
from loraplex.engine.types import Timing
from loraplex.serving.errors import EngineUnavailable
from support.clients import vllm_metrics
from support.engine.fake_engine import FakeEngineClient, Reply, fake_engine_info
from support.http.data_plane import BASE, DataPlane, Refused, ref, running_data_plane

KEY = {"Authorization": "Bearer lpx_acme"}


def parse(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = (sample.name, frozenset(sample.labels.items()))
            assert key not in samples, key
            samples[key] = sample.value
    return samples


def value(samples: Any, name: str, **labels: str) -> float:
    found: float = samples[name, frozenset(labels.items())]
    return found


class Late:
    """The metrics of a data plane are there only once it is."""

    def __init__(self, apps: list[Any]) -> None:
        self._apps = apps

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self._apps[0](scope, receive, send)


@pytest.fixture
def own(tmp_path: Path) -> Iterator[DataPlane]:
    """A data plane of its own, with the admin port's metrics mounted beside it."""
    late: list[Any] = []
    with running_data_plane(tmp_path / "model", extra_routes=[Route("/all", Late(late))]) as running:
        late.append(metrics_route(Scraper(running.metrics, running.engine, engine_timeout=60)).app)
        yield running
        running.settle_all()


def scrape(plane: DataPlane) -> Any:
    answer = plane.http.get(f"{plane.url}/all")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    return parse(answer.text)


def test_the_names_and_labels_of_vllm(own: DataPlane) -> None:
    samples = scrape(own)
    assert vllm_metrics.DASHBOARDS - {name for name, _ in samples} == set()
    for name, labels in samples:
        if name.startswith("vllm:") and name != "vllm:lora_requests_info":
            assert ("model_name", BASE) in labels, name
    (lora,) = [labels for name, labels in samples if name == "vllm:lora_requests_info"]
    assert {name for name, _ in lora} == {"max_lora", "running_lora_adapters", "waiting_lora_adapters"}


def test_requests_are_counted(own: DataPlane) -> None:
    own.engine.script(
        Reply(text="abcd", cached_tokens=2), Reply(text="abcdef"), Reply(error=("internal_error", "x"))
    )
    body = {"model": "pirate", "prompt": "xyz"}
    url = f"{own.url}/v1/completions"
    httpx.post(url, json=body, headers=KEY)
    httpx.post(url, json={**body, "max_tokens": 2}, headers=KEY)
    httpx.post(url, json=body, headers=KEY)
    own.limiter.refuse_with = [Refused("rate_limit_exceeded")]
    httpx.post(url, json=body, headers=KEY)
    own.settle_all()
    samples = scrape(own)
    for reason, count in {"stop": 1, "length": 1, "error": 1, "abort": 0}.items():
        labels = {"model_name": BASE, "finished_reason": reason}
        assert value(samples, "vllm:request_success_total", **labels) == count
    assert value(samples, "vllm:generation_tokens_total", model_name=BASE) == 5 + 2
    assert value(samples, "vllm:time_to_first_token_seconds_count", model_name=BASE) == 2
    assert value(samples, "vllm:request_generation_tokens_sum", model_name=BASE) == 5 + 2
    assert value(samples, "vllm:request_queue_time_seconds_count", model_name=BASE) == 2
    assert value(samples, "loraplex_tokens_total", tenant="acme", kind="completion") == 5 + 2
    assert value(samples, "loraplex_tokens_total", tenant="acme", kind="cached") == 2
    for status, count in {"200": 2, "500": 1, "429": 1}.items():
        labels = {"tenant": "acme", "adapter": "pirate@v2", "status": status}
        assert value(samples, "loraplex_requests_total", **labels) == count
    assert value(samples, "loraplex_limiter_refusals_total", tenant="acme", code="rate_limit_exceeded") == 1


def histogram(samples: Any, name: str) -> tuple[float, float]:
    """How many observations, and their sum."""
    count = value(samples, f"vllm:{name}_count", model_name=BASE)
    return count, value(samples, f"vllm:{name}_sum", model_name=BASE)


def test_the_phases_and_parameters_of_requests(own: DataPlane) -> None:
    own.engine.script(
        Reply(text="a" * 9, eos=False, cached_tokens=2, timing=Timing(0.5, 2.0, 7.0, 6.0, 2)),
        Reply(text="ab", eos=False, cached_tokens=2, timing=Timing(1.0, 2.0, 5.0, 4.0)),
        Reply(text="a", eos=False, timing=Timing(0.25, 1.0, 2.0, 1.0, 1)),
    )
    url = f"{own.url}/v1/completions"
    httpx.post(url, json={"model": BASE, "prompt": "xyz", "n": 2, "max_tokens": 12}, headers=KEY)
    httpx.post(url, json={"model": BASE, "prompt": "xyz", "max_tokens": 7}, headers=KEY)
    own.settle_all()
    samples = scrape(own)
    sequences = 3
    assert histogram(samples, "request_queue_time_seconds") == (sequences, 0.5 + 1.0 + 0.25)
    assert histogram(samples, "request_prefill_time_seconds") == (sequences, 1.5 + 1.0 + 0.75)
    assert histogram(samples, "request_decode_time_seconds") == (sequences, 4.0 + 2.0 + 0.0)
    assert histogram(samples, "request_inference_time_seconds") == (sequences, 5.5 + 3.0 + 0.75)
    assert histogram(samples, "request_time_per_output_token_seconds") == (sequences, 4.0 / 8 + 2.0 + 0.0)
    assert histogram(samples, "request_num_preemptions") == (sequences, 3)
    assert histogram(samples, "request_params_max_tokens") == (sequences, 12 + 12 + 7)
    assert histogram(samples, "request_prefill_kv_computed_tokens") == (sequences, 1 + 1 + 3)
    assert value(samples, "vllm:prompt_tokens_cached_total", model_name=BASE) == 4
    # Of a request, whatever its number of choices.
    assert histogram(samples, "request_params_n") == (2, 2 + 1)
    assert histogram(samples, "request_max_num_generation_tokens") == (2, 9 + 1)


def test_a_sequence_without_a_token_has_no_phases(own: DataPlane) -> None:
    own.engine.script(Reply(eos=False, error=("internal_error", "x")))
    httpx.post(f"{own.url}/v1/completions", json={"model": BASE, "prompt": "xyz"}, headers=KEY)
    own.settle_all()
    samples = scrape(own)
    for phase in ("prefill_time_seconds", "decode_time_seconds", "inference_time_seconds"):
        assert histogram(samples, f"request_{phase}") == (0, 0)
    assert histogram(samples, "request_params_n") == (1, 1)


def test_the_tokens_of_steps_survive_a_restart_of_the_engine() -> None:
    metrics = Metrics(BASE)
    steps = (0, 2, 0, 0, 0, 1, *[0] * 7, 1)
    for counts, tokens in ((steps, 20_100), ((1, *[0] * 13), 1)):
        state = snapshot(steps_by_tokens=counts, num_step_tokens=tokens)
        samples = parse(metrics.render(state).decode())
    name = "iteration_tokens_total"
    assert histogram(samples, name) == (5, 20_101)
    for bound, count in {"1.0": 1, "8.0": 3, "64.0": 3, "128.0": 4, "16384.0": 4, "+Inf": 5}.items():
        assert value(samples, f"vllm:{name}_bucket", model_name=BASE, le=bound) == count


def test_steps_by_experts_survive_a_restart_of_the_engine() -> None:
    metrics = Metrics(BASE)
    first = ExpertStats((0, 0, 3, *[0] * 8), 10.5, (3, *[0] * 10), 3.0)
    for stats in (first, ExpertStats((1, *[0] * 10), 1.0, (0, 0, 0, 0, 1, *[0] * 6), 2.5)):
        samples = parse(metrics.render(snapshot(experts=stats)).decode())
    touched, imbalance = "loraplex_engine_experts_touched", "loraplex_engine_expert_imbalance"
    for bound, count in {"1.0": 1, "2.0": 1, "4.0": 4, "512.0": 4, "+Inf": 4}.items():
        assert value(samples, f"{touched}_bucket", le=bound) == count
    assert value(samples, f"{touched}_sum") == 11.5
    assert value(samples, f"{imbalance}_bucket", le="1.0") == 3
    assert value(samples, f"{imbalance}_bucket", le="+Inf") == value(samples, f"{imbalance}_count") == 4
    assert value(samples, f"{imbalance}_sum") == 5.5


def test_the_engine_tells_the_rest(own: DataPlane) -> None:
    pirate, secret = ref("acme", "pirate", 1), ref("rival", "secret", 1)
    own.engine.engine_stats = EngineStats(
        num_running=3, num_waiting=2, num_waiting_for_grammar=1, num_kv_blocks=100, num_kv_blocks_used=25,
        num_arena_pages=10, num_arena_pages_used=4, prefix_cache_queries=50, prefix_cache_hits=20,
        running_adapters=(pirate.digest, secret.digest), waiting_adapters=("f" * 64,),
        tenants={"acme": TenantStats(2, 1, 7.5)},
        speculation=SpeculationCounts({"own": 9, "history": 4}, {"own": 6}),
        num_kv_host_blocks=8, num_kv_host_blocks_used=3,
        kv_host=KVHostCounts(6, 5, 3, 1, 0.75, states_written=9, states_restored=8, states_evicted=7),
        kv_disk_bytes=80, kv_disk_bytes_used=30, num_kv_disks_off=1,
        kv_disk=KVDiskCounts(written=16, restored=15, evicted=13, refused=11, damaged=2, late=4),
    )  # fmt: skip
    own.engine.entries = [
        CacheEntry(pirate, "hot", load_seconds={"read": 0.1, "copy": 0.02}),
        CacheEntry(secret, "warm", loading=True),
    ]
    samples = scrape(own)
    assert value(samples, "vllm:num_requests_running", model_name=BASE) == 3
    assert value(samples, "vllm:kv_cache_usage_perc", model_name=BASE) == 0.25
    lora = {"running_lora_adapters": "pirate,secret", "waiting_lora_adapters": "f" * 12}
    assert value(samples, "vllm:lora_requests_info", max_lora="64", **lora) > 1.7e9
    assert value(samples, "loraplex_engine_up") == 1
    assert value(samples, "loraplex_engine_waiting_for_grammar") == 1
    assert value(samples, "loraplex_adapter_versions", state="hot") == 1
    assert value(samples, "loraplex_adapter_versions", state="loading") == 1
    assert value(samples, "loraplex_adapter_cache_bytes", tier="device", kind="used") == 4 * (1 << 18)
    assert value(samples, "loraplex_adapter_load_seconds_sum", stage="read") == 0.1
    assert value(samples, "loraplex_tenant_virtual_tokens", tenant="acme") == 7.5
    assert value(samples, "loraplex_kv_host_bytes", kind="used") == 3 * (1 << 12)
    assert value(samples, "loraplex_kv_host_bytes", kind="capacity") == 8 * (1 << 12)
    for event, count in (("written", 6), ("restored", 5), ("evicted", 3), ("refused", 1)):
        assert value(samples, "loraplex_kv_host_blocks_total", event=event) == count
    for event, count in (("written", 9), ("restored", 8), ("evicted", 7)):
        assert value(samples, "loraplex_kv_host_states_total", event=event) == count
    assert value(samples, "loraplex_kv_host_restore_seconds_total") == 0.75
    assert [value(samples, "loraplex_kv_disk_bytes", kind=k) for k in ("used", "capacity")] == [30, 80]
    for event, count in (("written", 16), ("restored", 15), ("evicted", 13), ("refused", 11), ("damaged", 2)):
        assert value(samples, "loraplex_kv_disk_blocks_total", event=event) == count
    assert (value(samples, "loraplex_kv_disk_late_total"), value(samples, "loraplex_kv_disk_off")) == (4, 1)
    drafts = "loraplex_speculation_tokens_total"
    assert value(samples, drafts, outcome="drafted", source="own") == 9
    assert value(samples, drafts, outcome="drafted", source="history") == 4
    assert value(samples, drafts, outcome="accepted", source="own") == 6
    assert value(samples, drafts, outcome="accepted", source="history") == 0
    # A load is observed once, however often it is seen.
    assert value(scrape(own), "loraplex_adapter_load_seconds_count", stage="read") == 1


def test_a_scrape_is_answered_while_the_engine_is_not(own: DataPlane) -> None:
    own.engine.engine_stats = EngineStats(num_running=3, num_out_of_memory=2)
    assert value(scrape(own), "loraplex_engine_out_of_memory_total") == 2
    own.on_loop(own.engine.kill)
    samples = scrape(own)
    assert value(samples, "loraplex_engine_up") == 0
    assert value(samples, "vllm:num_requests_running", model_name=BASE) == 3
    own.on_loop(own.engine.revive)
    assert value(scrape(own), "loraplex_engine_restarts_total") == 1


def test_the_tokens_of_the_kv_cache_are_those_of_all_layers() -> None:
    """Four blocks hold 16 tokens where layers are of four groups."""
    state = replace(snapshot(), info=replace(fake_engine_info(), num_kv_blocks=1024, kv_groups=4))
    found = [
        dict(labels)
        for name, labels in parse(Metrics(BASE).render(state).decode())
        if name == "vllm:cache_config_info"
    ]
    assert [(one["num_gpu_blocks"], one["block_size"]) for one in found] == [("256", "16")]


def snapshot(**stats: Any) -> EngineSnapshot:
    return EngineSnapshot(fake_engine_info(), EngineStats(**stats), [], True, 0)


def test_label_values_are_bounded() -> None:
    metrics = Metrics(BASE, max_label_sets=3)
    for number in range(50):
        metrics.request_answered(f"t{number}", ref(f"t{number}", f"a{number}", 1), 200)
        metrics.refused_by_limit(f"t{number}", "rate_limit_exceeded")
    metrics.request_answered("other", None, 200)
    tenants = {f"t{number}": TenantStats(1, 2, 3.0) for number in range(50)} | {
        "other": TenantStats(1, 0, 0.0)
    }
    samples = parse(metrics.render(snapshot(tenants=tenants)).decode())
    labels = {"tenant": "other", "adapter": "other", "status": "200"}
    assert value(samples, "loraplex_requests_total", **labels) == 48
    assert value(samples, "loraplex_tenant_running", tenant="other") == 48
    assert len([name for name, _ in samples if name == "loraplex_requests_total"]) == 4


def test_all_answers_are_counted_by_status_and_probes_are_not(own: DataPlane) -> None:
    body = {"model": "pirate", "prompt": "xyz"}
    url = f"{own.url}/v1/completions"
    own.limiter.refuse_with = [
        RateLimited("no", retry_after_s=1.0, reached=ReachedLimit("tenant", "tokens")),
        QuotaSpent("no", reached=ReachedLimit("key", "budget")),
    ]
    for headers, sent, status in (
        (KEY, body, 429),
        (KEY, body, 429),
        (KEY, body, 200),
        (KEY, body | {"model": "unknown"}, 404),
        ({}, body, 401),
    ):
        assert httpx.post(url, json=sent, headers=headers).status_code == status
    assert httpx.get(f"{own.url}/livez").status_code == 200
    own.settle_all()
    samples = scrape(own)
    counts = {
        labels: count for (name, labels), count in samples.items() if "_responses_total" in name and count
    }
    assert counts == {
        frozenset({("status", s)}): n for s, n in {"200": 1, "401": 1, "404": 1, "429": 2}.items()
    }
    for owner, limit in (("tenant", "tokens"), ("key", "budget")):
        assert value(samples, "loraplex_limiter_limits_reached_total", owner=owner, limit=limit) == 1


def test_loads_and_evictions_survive_a_restart_of_the_engine() -> None:
    metrics = Metrics(BASE)
    for loads, copies, device, host, failures in ((5, 9, 3, 2, 1), (1, 2, 1, 0, 0)):
        state = snapshot(
            adapter_loads=loads,
            adapter_copies=copies,
            device_evictions=device,
            host_evictions=host,
            adapter_load_failures=failures,
            num_adapter_slots=8,
            num_adapter_slots_used=3,
        )
        samples = parse(metrics.render(state).decode())
    assert value(samples, "loraplex_adapter_loads_total", stage="disk") == 6
    assert value(samples, "loraplex_adapter_loads_total", stage="copy") == 11
    assert value(samples, "loraplex_adapter_evictions_total", tier="device") == 4
    assert value(samples, "loraplex_adapter_evictions_total", tier="host") == 2
    assert value(samples, "loraplex_adapter_load_failures_total") == 1
    assert value(samples, "loraplex_adapter_slots", kind="used") == 3
    assert value(samples, "loraplex_adapter_slots", kind="capacity") == 8


def test_memory_of_tenants_is_told_by_tier_beside_what_is_reserved() -> None:
    metrics = Metrics(BASE)
    for capped in (3, 1):
        state = snapshot(
            tenant_bytes={"acme": TenantBytes(300, 500)},
            cap_evictions={"device": capped, "host": 2},
            reserved_bytes=700,
            reservable_bytes=400,
        )
        samples = parse(metrics.render(state).decode())
    assert value(samples, "loraplex_tenant_adapter_bytes", tenant="acme", tier="device") == 300
    assert value(samples, "loraplex_tenant_adapter_bytes", tenant="acme", tier="host") == 500
    assert value(samples, "loraplex_adapter_reserved_bytes", kind="asked") == 700
    assert value(samples, "loraplex_adapter_reserved_bytes", kind="most") == 400
    assert value(samples, "loraplex_adapter_cap_evictions_total", tier="device") == 4
    assert value(samples, "loraplex_adapter_cap_evictions_total", tier="host") == 4 - 2


def test_evictions_are_told_by_reason() -> None:
    metrics = Metrics(BASE)
    for room in (3, 1):
        state = snapshot(evictions={"device": {"room": room, "deleted": 2}, "host": {"cap": 1}})
        samples = parse(metrics.render(state).decode())
    name = "loraplex_adapter_evictions_by_reason_total"
    assert value(samples, name, tier="device", reason="room") == 4
    assert value(samples, name, tier="device", reason="deleted") == 2
    assert value(samples, name, tier="host", reason="cap") == 1
    assert value(samples, name, tier="host", reason="failed") == 0


def test_warming_and_pins_are_told() -> None:
    metrics = Metrics(BASE)
    for device in (3, 1):
        state = snapshot(
            num_pins=5,
            num_pins_held=2,
            num_pins_coming=1,
            num_warming=7,
            warmed={"device": device, "failed": 1},
        )
        samples = parse(metrics.render(state).decode())
    assert value(samples, "loraplex_adapter_pins", state="held") == 2
    assert value(samples, "loraplex_adapter_pins", state="coming") == 1
    assert value(samples, "loraplex_adapter_pins", state="missing") == 2
    assert value(samples, "loraplex_adapter_warming") == 7
    assert value(samples, "loraplex_adapter_warmed_total", outcome="device") == 4
    assert value(samples, "loraplex_adapter_warmed_total", outcome="host") == 0


def test_waits_for_adapters_are_counted_for_sequences_that_waited() -> None:
    metrics = Metrics(BASE)
    for adapter_s in (None, 0.5, 1.5):
        metrics.sequence_ended(
            "acme", "stop", prompt_tokens=1, completion_tokens=1, cached_tokens=0, max_tokens=1, seconds=2.0,
            timing=Timing(1.6, 1.7, 2.0, 1.9, adapter_s=adapter_s),
        )  # fmt: skip
    samples = parse(metrics.render(snapshot()).decode())
    assert value(samples, "loraplex_adapter_wait_seconds_count") == 2
    assert value(samples, "loraplex_adapter_wait_seconds_sum") == 2.0


def test_hostile_names_keep_the_format() -> None:
    metrics = Metrics('ba"se\n\\')
    metrics.request_answered('t"\n', None, 200)
    samples = parse(metrics.render(snapshot(tenants={'x"\n': TenantStats()})).decode())
    assert value(samples, "loraplex_requests_total", tenant='t"\n', adapter="base", status="200") == 1


def test_counters_of_the_engine_survive_its_restart() -> None:
    metrics = Metrics(BASE)
    seen = [
        value(
            parse(metrics.render(snapshot(prefix_cache_hits=hits)).decode()),
            "vllm:prefix_cache_hits_total",
            model_name=BASE,
        )
        for hits in (5, 9, 2, 4)
    ]
    assert seen == [5, 9, 11, 13]


def test_metrics_without_tenant_data_name_no_tenant() -> None:
    metrics = Metrics(BASE)
    metrics.request_answered("acme", ref("acme", "pirate", 1), 200)
    pirate = ref("acme", "pirate", 1)
    state = replace(snapshot(running_adapters=(pirate.digest,)), cache=[CacheEntry(pirate, "hot")])
    text = metrics.render(state, tenant_data=False).decode()
    assert "acme" not in text
    assert "pirate" not in text
    assert pirate.digest[:12] in text


async def test_a_scrape_before_the_engine_has_ever_been_up() -> None:
    class Starting(FakeEngineClient):
        @property
        def info(self) -> EngineInfo:
            raise EngineUnavailable("the engine is starting")

    text = await Scraper(Metrics(BASE), Starting()).text()
    assert b"loraplex_engine_up 0" in text
    assert f'vllm:num_requests_waiting{{model_name="{BASE}"}} 0'.encode() in text


async def test_an_engine_that_hangs_does_not_hang_the_scrape() -> None:
    import asyncio

    class Hanging(FakeEngineClient):
        async def stats(self) -> EngineStats:
            await asyncio.Event().wait()
            raise AssertionError

    engine = Hanging()
    await engine.start()
    assert b"loraplex_engine_up 0" in await Scraper(Metrics(BASE), engine, engine_timeout=0.01).text()
