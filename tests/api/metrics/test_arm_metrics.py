"""The series of a watched release's arms: what they count, and how many there may be."""

from __future__ import annotations

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from loraplex.api.metrics.arm_metrics import ArmMeter
from loraplex.control.usage.outcome import Outcome
from loraplex.control.usage.records import CANCELLED
from support.control.usage import ended


def outcome(name: str = "support", version: int = 2, **changes: object) -> Outcome:
    fields = {"adapter": name, "version": version, "completion_tokens": 11} | changes
    return Outcome.of(ended(**fields))


def scraped(registry: CollectorRegistry) -> dict[tuple[str, str, str], float]:
    """Counts by metric, adapter, and outcome."""
    return {
        (sample.name, sample.labels["adapter"], sample.labels.get("outcome", "")): sample.value
        for family in text_string_to_metric_families(generate_latest(registry).decode())
        for sample in family.samples
        if sample.name.endswith(("_total", "_count", "_sum"))
    }


def test_each_arm_has_its_outcomes_and_times() -> None:
    registry = CollectorRegistry()
    meter = ArmMeter(registry)
    for status in ("stop", "length", "internal_error", CANCELLED):
        meter.ended(outcome(status=status, first_token_s=0.5, total_s=1.5))
    meter.ended(outcome(version=1, status="adapter_unavailable", first_token_s=None))
    found = scraped(registry)
    requests = {key[1:]: value for key, value in found.items() if key[0] == "loraplex_release_requests_total"}
    assert requests == {
        ("support@v2", "ok"): 2,
        ("support@v2", "failed"): 1,
        ("support@v2", "other"): 1,
        ("support@v1", "failed"): 1,
    }
    assert found["loraplex_release_first_token_seconds_sum", "support@v2", ""] == 2.0
    assert found["loraplex_release_inter_token_seconds_sum", "support@v2", ""] == 4 * 0.1
    assert found["loraplex_release_first_token_seconds_count", "support@v1", ""] == 0


def test_arms_beyond_the_bound_share_series_and_leave_none_behind() -> None:
    registry = CollectorRegistry()
    now = [0.0]
    meter = ArmMeter(registry, max_arms=2, clock=lambda: now[0])
    for version in (1, 2, 3):
        meter.ended(outcome(version=version))
    assert {adapter for _, adapter, _ in scraped(registry)} == {"support@v1", "support@v2", "other"}
    now[0] = 7200.0
    meter.ended(outcome(version=4))
    assert {adapter for _, adapter, _ in scraped(registry)} == {"support@v4", "support@v2", "other"}
    now[0] = 14400.0
    for tenant in ("t1", "t2"):
        meter.ended(outcome(tenant_id=tenant))
    assert {adapter for _, adapter, _ in scraped(registry)} == {"support@v2"}
