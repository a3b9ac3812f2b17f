"""Metrics of the engines one by one, as a scrape of the admin port has them."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from loraplex.api.metrics import Metrics, Scraper
from loraplex.engine.reports import EngineStats
from loraplex.serving.engines.handing_over import HandoverCounts
from support.engine.fake_engine import FakeEngineClient
from support.placement.fake_cluster import fake_report

BASE = "tiny"


async def scrape(engine: FakeEngineClient, *, tenant_data: bool = True) -> dict[str, float]:
    """Values by name and labels, of the metrics of engines."""
    text = (await Scraper(Metrics(BASE), engine, tenant_data=tenant_data, engine_timeout=60).text()).decode()
    return {
        f"{sample.name}{sorted(sample.labels.values())}": sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith(("loraplex_replica", "loraplex_managers", "loraplex_kv_handover"))
    }


async def test_each_engine_has_its_own_series() -> None:
    engine = FakeEngineClient()
    await engine.start()
    engine.num_wanted = 3
    engine.num_managers_lost = 2
    engine.handovers = HandoverCounts(num_taken=7, num_refused=1, num_bytes=80, seconds=0.5)
    engine.replicas = {
        "replica-1": fake_report("replica-1", num_hot=3, num_warm=2, num_restarts=4),
        "replica-2": fake_report("replica-2", "it died"),
    }
    engine.replica_figures = {
        "replica-1": EngineStats(num_running=5, num_waiting=6, num_kv_blocks=8, num_kv_blocks_used=2)
    }
    assert await scrape(engine) == {
        "loraplex_replicas['wanted']": 3,
        "loraplex_replicas['ready']": 1,
        "loraplex_replicas['draining']": 0,
        "loraplex_replicas['away']": 1,
        "loraplex_managers_lost_total[]": 2,
        "loraplex_kv_handover_blocks_total['taken']": 7,
        "loraplex_kv_handover_blocks_total['refused']": 1,
        "loraplex_kv_handover_bytes_total[]": 80,
        "loraplex_kv_handover_seconds_total[]": 0.5,
        "loraplex_replica_up['replica-1']": 1,
        "loraplex_replica_up['replica-2']": 0,
        "loraplex_replica_restarts_total['replica-1']": 4,
        "loraplex_replica_restarts_total['replica-2']": 0,
        "loraplex_replica_adapters['hot', 'replica-1']": 3,
        "loraplex_replica_adapters['replica-1', 'warm']": 2,
        "loraplex_replica_adapters['hot', 'replica-2']": 0,
        "loraplex_replica_adapters['replica-2', 'warm']": 0,
        "loraplex_replica_running['replica-1']": 5,
        "loraplex_replica_waiting['replica-1']": 6,
        "loraplex_replica_kv_usage['replica-1']": 0.25,
    }


async def test_one_engine_has_them_too_and_tenants_see_none() -> None:
    engine = FakeEngineClient()
    await engine.start()
    assert (await scrape(engine))["loraplex_replica_up['replica-1']"] == 1
    assert await scrape(engine, tenant_data=False) == {}
    engine.kill()
    assert (await scrape(engine))["loraplex_replica_up['replica-1']"] == 0
