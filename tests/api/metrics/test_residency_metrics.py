"""Metrics of the adapters in memory, on both ports."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from loraplex.adapters.cache.residency import CacheEntry
from loraplex.adapters.ref import AdapterRef
from loraplex.api.metrics import EngineSnapshot, Metrics
from loraplex.api.metrics.residency_metrics import MAX_SHOWN
from loraplex.engine.reports import EngineStats
from support.engine.fake_engine import fake_engine_info

BASE = "tiny"
STATS = EngineStats(num_adapter_slots=8)


def adapter(number: int, name: str = "pirate", tenant: str = "acme") -> AdapterRef:
    return AdapterRef(tenant, name, number, f"{number:064x}"[::-1], 16)


def scrape(metrics: Metrics, cache: list[CacheEntry], *, tenant_data: bool) -> str:
    snapshot = EngineSnapshot(fake_engine_info(), STATS, cache, True, 0)
    return metrics.render(snapshot, tenant_data=tenant_data).decode()


def loaded(text: str) -> dict[str, tuple[str, str, str]]:
    """Level, pin and rank by name."""
    return {
        sample.labels["adapter_name"]: tuple(sample.labels[each] for each in ("level", "pinned", "rank"))  # type: ignore[misc]
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "vllm:lora_adapter_loaded"
    }


def value(text: str, name: str) -> float:
    (found,) = [
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name and sample.labels == {"model_name": BASE}
    ]
    return found


CACHE = [
    CacheEntry(adapter(1), "warm"),
    CacheEntry(adapter(2), "hot", pinned=True),
    CacheEntry(adapter(3, "parrot", "globex"), "warm"),
    CacheEntry(adapter(4, "gone"), "cold"),
]


def test_names_on_the_admin_port() -> None:
    text = scrape(Metrics(BASE, residency=True), CACHE, tenant_data=True)
    assert loaded(text) == {"pirate": ("gpu", "true", "16"), "parrot": ("cpu", "false", "16")}
    assert value(text, "vllm:num_gpu_loaded_lora_adapters") == 1
    assert value(text, "vllm:max_gpu_lora_adapters") == 8


def test_nobodys_names_on_the_data_port() -> None:
    text = scrape(Metrics(BASE, residency=True), CACHE, tenant_data=False)
    assert loaded(text) == {
        "100000000000": ("cpu", "false", "16"),
        "200000000000": ("gpu", "true", "16"),
        "300000000000": ("cpu", "false", "16"),
    }
    assert not any(name in text for name in ("pirate", "parrot", "acme", "globex"))


def test_off_without_the_setting() -> None:
    assert "vllm:lora_adapter" not in scrape(Metrics(BASE), CACHE, tenant_data=False)


def test_a_load_counts_once_whatever_port_is_scraped() -> None:
    metrics = Metrics(BASE, residency=True)
    first = [CacheEntry(adapter(1), "hot", load_seconds={"disk": 0.1, "read": 0.09, "copy": 0.02})]
    for tenant_data in (True, False, True):
        text = scrape(metrics, first, tenant_data=tenant_data)
    assert value(text, "vllm:lora_adapter_load_seconds_count") == 1
    assert round(value(text, "vllm:lora_adapter_load_seconds_sum"), 6) == 0.12
    again = [CacheEntry(adapter(1), "hot", load_seconds={"disk": 40.0, "copy": 0.5})]
    text = scrape(metrics, again, tenant_data=False)
    assert value(text, "vllm:lora_adapter_load_seconds_count") == 2
    assert 'vllm:lora_adapter_load_seconds_bucket{le="30.0",model_name="tiny"} 1.0' in text


def test_the_number_of_series_is_bounded() -> None:
    cache = [CacheEntry(adapter(number, f"a{number}"), "warm") for number in range(MAX_SHOWN + 5)]
    cache.append(CacheEntry(adapter(9999, "last"), "hot"))
    found = loaded(scrape(Metrics(BASE, residency=True), cache, tenant_data=True))
    assert (len(found), found["last"][0]) == (MAX_SHOWN, "gpu")
