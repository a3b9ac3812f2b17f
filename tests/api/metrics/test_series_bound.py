"""A server of 10,000 adapters and 1,000 tenants: how large a scrape is, and what its sums mean."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.routing import Route

from loraplex.adapters.cache.residency import CacheEntry
from loraplex.adapters.cache.tenant_memory import TenantBytes
from loraplex.adapters.ref import AdapterRef
from loraplex.api.errors import ANSWERS
from loraplex.api.metrics import Metrics, Scraper
from loraplex.api.metrics.api_metrics import MAX_LABEL_SETS
from loraplex.api.metrics.label_sets import OTHER
from loraplex.api.routes.metrics import metrics_route
from loraplex.control.usage.outcome import Outcome
from loraplex.control.usage.records import CANCELLED
from loraplex.engine.reports import EngineStats, TenantStats
from support import markdown
from support.control.usage import ended
from support.http.data_plane import DataPlane, ref, running_data_plane

NUM_TENANTS, NUM_ADAPTERS = 1000, 10_000
LONGEST = 63
"""Characters of a tenant's id, and of an adapter's name."""
STATUSES = sorted({200} | {status for status, _ in ANSWERS.values()})
PAGE = " ".join(markdown.read("docs/metrics.md").split())


class Late:
    """The metrics of a data plane are there only once it is."""

    def __init__(self, apps: list[Any]) -> None:
        self._apps = apps

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self._apps[0](scope, receive, send)


@pytest.fixture
def plane(tmp_path: Path) -> Iterator[DataPlane]:
    """A data plane of its own, with the admin port's metrics mounted beside it."""
    late: list[Any] = []
    with running_data_plane(tmp_path / "model", extra_routes=[Route("/all", Late(late))]) as running:
        late.append(metrics_route(Scraper(running.metrics, running.engine)).app)
        yield running


def tenant(number: int) -> str:
    return f"tenant-{number:04d}-".ljust(LONGEST, "t")


def adapters(count: int = NUM_ADAPTERS) -> list[AdapterRef]:
    """Ten of each tenant, with the longest names that there can be."""
    return [
        ref(tenant(number % NUM_TENANTS), f"adapter-{number:05d}-".ljust(LONGEST, "a"), 999_999)
        for number in range(count)
    ]


def use(metrics: Metrics, all_adapters: list[AdapterRef], statuses: list[int]) -> None:
    """What a request leaves behind, of each adapter with each of these statuses."""
    for adapter in all_adapters:
        for status in statuses:
            metrics.request_answered(adapter.tenant_id, adapter, status)
            metrics.responded(status)
        metrics.sequence_ended(
            adapter.tenant_id,
            "stop",
            prompt_tokens=3,
            completion_tokens=2,
            cached_tokens=1,
            max_tokens=16,
            seconds=1.0,
            timing=None,
        )
        metrics.shared_with_base(adapter.tenant_id, adapter, 1)
        for code in ("rate_limit_exceeded", "insufficient_quota"):
            metrics.refused_by_limit(adapter.tenant_id, code)


def watch(metrics: Metrics, all_adapters: list[AdapterRef]) -> None:
    """Every adapter's release is watched, and its requests ended in each way."""
    for adapter in all_adapters:
        for status in ("stop", "internal_error", CANCELLED):
            fields = {"tenant_id": adapter.tenant_id, "adapter": adapter.name, "version": adapter.version}
            metrics.arms.ended(Outcome.of(ended(**fields, status=status)))


def everything_resident(plane: DataPlane, all_adapters: list[AdapterRef]) -> None:
    """All adapters are hot and have requests, of all tenants."""
    plane.engine.entries = [
        CacheEntry(one, "hot", load_seconds={"disk": 0.1, "copy": 0.02}) for one in all_adapters
    ]
    digests = tuple(one.digest for one in all_adapters)
    plane.engine.engine_stats = EngineStats(
        running_adapters=digests,
        waiting_adapters=digests,
        tenants={one.tenant_id: TenantStats(1, 1, 12345.678901) for one in all_adapters},
        tenant_bytes={one.tenant_id: TenantBytes(12345678, 12345678) for one in all_adapters},
    )


def scrape(plane: DataPlane) -> tuple[dict[str, float], int]:
    """Each series with its value, and the bytes of the text."""
    answer = httpx.get(f"{plane.url}/all", timeout=60)
    assert answer.status_code == 200
    lines = [line for line in answer.text.splitlines() if not line.startswith("#")]
    return {series: float(value) for series, value in (line.rsplit(" ", 1) for line in lines)}, len(
        answer.content
    )


def total(series: dict[str, float], name: str, *, by: str = "") -> Counter[str]:
    """The sums of a metric by one of its labels."""
    found: Counter[str] = Counter()
    for key, value in series.items():
        if key.startswith(f"{name}{{"):
            label = re.search(rf'[{{,]{by}="([^"]*)"', key) if by else None
            found[label[1] if label else ""] += int(value)
    return found


def stated(pattern: str) -> int:
    """A number of docs/metrics.md."""
    found = re.search(pattern, PAGE)
    assert found is not None, pattern
    return int(found[1].replace(",", ""))


def test_a_scrape_of_ten_thousand_adapters_is_bounded_and_loses_nothing(plane: DataPlane) -> None:
    everyone = adapters()
    use(plane.metrics, everyone, [200, 429])
    everything_resident(plane, everyone)
    series, num_bytes = scrape(plane)
    requests = [key for key in series if key.startswith("loraplex_requests_total{")]
    own = [key for key in requests if f'adapter="{OTHER}"' not in key]
    assert len(own) == 2 * MAX_LABEL_SETS
    assert len(series) <= stated(r"([\d,]+) series and [\d.]+ MB for two statuses")
    assert num_bytes <= 1e6 * float(re.search(r"series and ([\d.]+) MB for two statuses", PAGE)[1])  # type: ignore[index]
    # Nothing is lost by having no label: sums over adapters, tenants and statuses are what was asked.
    by_tenant = {tenant(number): 20 for number in range(NUM_TENANTS)}
    assert total(series, "loraplex_requests_total", by="tenant") == by_tenant
    assert total(series, "loraplex_tenant_requests_total", by="tenant") == by_tenant
    assert total(series, "loraplex_requests_total", by="status") == {"200": 10_000, "429": 10_000}
    assert +total(series, "loraplex_http_responses_total", by="status") == {"200": 10_000, "429": 10_000}
    tokens = {"prompt": 30_000, "cached": 10_000, "completion": 20_000}
    assert total(series, "loraplex_tokens_total", by="kind") == tokens
    assert total(series, "loraplex_limiter_refusals_total", by="tenant") == by_tenant
    assert total(series, "loraplex_tenant_running", by="tenant") == dict.fromkeys(by_tenant, 1)


def test_more_tenants_than_labels_are_counted_under_other(plane: DataPlane) -> None:
    own = [ref(tenant(number), "a", 1) for number in range(MAX_LABEL_SETS)]
    late = [ref(f"late-{number}", "a", 1) for number in range(500)]
    use(plane.metrics, [*own, *late], [200])
    everything_resident(plane, [*own, *late])
    before, _ = scrape(plane)
    use(plane.metrics, [*late, *own], [200])
    series, _ = scrape(plane)
    assert total(series, "loraplex_requests_total", by="tenant")[OTHER] == 2 * 500
    assert total(series, "loraplex_tenant_requests_total")[""] == 2 * 1500
    assert total(series, "loraplex_tokens_total", by="kind")["completion"] == 2 * 2 * 1500
    assert total(series, "loraplex_tenant_waiting")[""] == 1500
    assert series.keys() == before.keys()
    fallen = {key for key, value in before.items() if "_total" in key and series[key] < value}
    assert fallen == set(), "a counter went backwards"


@pytest.mark.slow
def test_the_stated_bound_holds_for_the_worst_scrape(plane: DataPlane) -> None:
    """Every tenant and adapter has had every status that there is, and more tenants came than there are labels."""
    everyone = [*adapters(), *(ref(f"late-{number}", "a", 1) for number in range(100))]
    use(plane.metrics, everyone, STATUSES)
    watch(plane.metrics, everyone)
    for owner in ("key", "tenant", "server"):
        for kind in ("requests", "tokens", "concurrency", "sequences", "budget"):
            plane.metrics.limits_decided("rate_limit_exceeded", 0.1, (owner, kind))  # type: ignore[arg-type]
    everything_resident(plane, everyone)
    series, num_bytes = scrape(plane)
    most_series = stated(r"at most ([\d,]+) series")
    most_bytes = stated(r"at most ([\d,]+) MB") * 1_000_000
    assert 0.9 * most_series < len(series) <= most_series
    assert 0.6 * most_bytes < num_bytes <= most_bytes
