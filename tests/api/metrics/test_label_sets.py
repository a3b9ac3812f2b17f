"""Labels that clients can choose are bounded, shared between tenants, and taken back only where that is fair."""

from __future__ import annotations

import random
import time
from collections import Counter

import pytest
from prometheus_client.parser import text_string_to_metric_families

from loraplex.adapters.cache.residency import CacheEntry
from loraplex.api.metrics import EngineSnapshot, Metrics
from loraplex.api.metrics.label_sets import IDLE_S, OTHER, LabelSets
from loraplex.engine.reports import EngineStats
from support.engine.fake_engine import fake_engine_info
from support.http.data_plane import BASE, ref

Labels = dict[tuple[str, ...], float]
ORDER = ("tenant", "adapter", "status", "kind", "code")


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def scrape(metrics: Metrics) -> dict[str, Labels]:
    """The label values and the value of each sample of ours, by name."""
    snapshot = EngineSnapshot(fake_engine_info(), EngineStats(), [], True, 0)
    found: dict[str, Labels] = {}
    for family in text_string_to_metric_families(metrics.render(snapshot).decode()):
        for sample in family.samples:
            labels = tuple(sample.labels[name] for name in ORDER if name in sample.labels)
            found.setdefault(sample.name, {})[labels] = sample.value
    return found


def requests_of(metrics: Metrics) -> Labels:
    """Requests by (tenant, adapter, status)."""
    return scrape(metrics).get("loraplex_requests_total", {})


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_a_tenant_keeps_its_label_where_its_adapter_has_none(clock: Clock) -> None:
    metrics = Metrics(BASE, max_label_sets=4, clock=clock)
    for number in range(10):
        metrics.request_answered("acme", ref("acme", f"a{number}", 1), 200)
    found = requests_of(metrics)
    assert found["acme", OTHER, "200"] == 6
    assert len(found) == 5


def test_an_unused_pair_makes_room_for_a_new_one(clock: Clock) -> None:
    metrics = Metrics(BASE, max_label_sets=2, clock=clock)
    metrics.request_answered("acme", ref("acme", "old", 1), 500)
    metrics.request_answered("acme", ref("acme", "old", 1), 200)
    clock.now = 1.0
    metrics.request_answered("acme", ref("acme", "used", 1), 200)
    clock.now = IDLE_S
    metrics.request_answered("acme", ref("acme", "new", 1), 200)
    assert set(requests_of(metrics)) == {("acme", "used@v1", "200"), ("acme", "new@v1", "200")}
    metrics.request_answered("acme", ref("acme", "old", 1), 200)
    assert requests_of(metrics)["acme", OTHER, "200"] == 1  # the other two are in use


def test_nothing_is_taken_back_while_there_is_room(clock: Clock) -> None:
    metrics = Metrics(BASE, max_label_sets=2, clock=clock)
    metrics.request_answered("acme", ref("acme", "old", 1), 200)
    clock.now = 100 * IDLE_S
    metrics.request_answered("acme", ref("acme", "new", 1), 200)
    assert requests_of(metrics)["acme", "old@v1", "200"] == 1


def test_an_unused_tenant_makes_room_with_all_that_it_had(clock: Clock) -> None:
    metrics = Metrics(BASE, max_label_sets=2, clock=clock)

    def everything(tenant: str) -> None:
        for name in ("a", "b", "c"):
            metrics.request_answered(tenant, ref(tenant, name, 1), 200)
        metrics.refused_by_limit(tenant, "rate_limit_exceeded")
        metrics.sequence_ended(
            tenant,
            "stop",
            prompt_tokens=1,
            completion_tokens=1,
            cached_tokens=0,
            max_tokens=16,
            seconds=1.0,
            timing=None,
        )

    everything("old")
    clock.now = IDLE_S
    everything("acme")
    everything("new")
    everything("late")
    found = scrape(metrics)
    tenants = {
        name: {labels[0] for labels in found[name]}
        for name in (
            "loraplex_requests_total",
            "loraplex_tenant_requests_total",
            "loraplex_tokens_total",
            "loraplex_limiter_refusals_total",
        )
    }
    assert tenants == {name: {"acme", "new", OTHER} for name in tenants}


def test_a_tenant_of_many_names_leaves_room_for_others(clock: Clock) -> None:
    """The present pairs of the others stay, and a newcomer gets labels."""
    metrics = Metrics(BASE, max_label_sets=50, clock=clock)
    for name in range(10_000):
        clock.now += 1
        metrics.request_answered("hostile", ref("hostile", f"h{name}", 1), 200)
        for own in range(5):
            metrics.request_answered("acme", ref("acme", f"a{own}", 1), 200)
        if name >= 5000:
            metrics.request_answered("newcomer", ref("newcomer", f"n{name % 5}", 1), 200)
    found = requests_of(metrics)
    assert {found["acme", f"a{own}@v1", "200"] for own in range(5)} == {10_000}
    assert {found["newcomer", f"n{own}@v1", "200"] for own in range(5)} == {1000}
    assert ("acme", OTHER, "200") not in found
    assert ("newcomer", OTHER, "200") not in found
    totals = scrape(metrics)["loraplex_tenant_requests_total"]
    assert totals == {
        ("hostile", "200"): 10_000,
        ("acme", "200"): 50_000,
        ("newcomer", "200"): 5000,
    }


@pytest.mark.parametrize("seed", range(50))
def test_random_histories_of_labels(seed: int) -> None:
    """Bounds hold at each step, and a pair in use goes only to a tenant that has fewer."""
    rng = random.Random(seed)
    limit = rng.choice([1, 2, 5, 12])
    clock = Clock()
    dropped: list[tuple[str, str | None]] = []
    labels = LabelSets(limit, idle_s=IDLE_S, clock=clock, on_drop=lambda *what: dropped.append(what))
    tenants = [f"t{number}" for number in range(rng.choice([1, 3, 8, 20]))]
    held: dict[str, dict[str, float]] = {}
    """When each pair that has labels was last used, by tenant."""
    for _ in range(500):
        clock.now += rng.choice([0.0, 1.0, 60.0, IDLE_S / 2])
        tenant, adapter = rng.choice(tenants), f"a{int(rng.expovariate(0.1))}"
        sizes = {own: len(adapters) for own, adapters in held.items()}
        got = labels.pair(tenant, adapter)
        assert got in {(tenant, adapter), (tenant, OTHER), (OTHER, OTHER)}
        assert got == (tenant, adapter) or adapter not in held.get(tenant, ())
        for own, name in dropped:
            if name is None:
                assert held.pop(own) == {}
            elif clock.now - held[own].pop(name) < IDLE_S:
                assert sizes[own] >= sizes.get(tenant, 0) + 2
                assert sizes[own] == max(sizes.values())
        dropped.clear()
        if got[0] != OTHER:
            held.setdefault(tenant, {})
        if got[1] != OTHER:
            held[tenant][adapter] = clock.now
        assert len(held) <= limit
        assert sum(map(len, held.values())) <= limit


@pytest.mark.parametrize("seed", range(4))
def test_random_histories_of_series(seed: int) -> None:
    """Each request is counted once by tenant, and a series only grows until it is taken away."""
    rng = random.Random(seed)
    clock = Clock()
    metrics = Metrics(BASE, max_label_sets=5, clock=clock)
    asked: Counter[tuple[str, str]] = Counter()
    before: Labels = {}
    for _ in range(25):
        for _ in range(8):
            clock.now += rng.choice([0.0, 1.0, 60.0, IDLE_S / 2])
            tenant, status = f"t{rng.randrange(5)}", rng.choice([200, 200, 429])
            metrics.request_answered(tenant, ref(tenant, f"a{rng.randrange(20)}", 1), status)
            asked[tenant, str(status)] += 1
        found = scrape(metrics)
        assert found["loraplex_tenant_requests_total"] == asked
        now = found["loraplex_requests_total"]
        assert all(now[labels] >= value for labels, value in before.items() if labels in now)
        assert len({labels[:2] for labels in now if labels[1] != OTHER}) <= 5
        before = now


def test_the_time_of_an_observation_does_not_grow_with_the_number_of_labels() -> None:
    def seconds_per_call(limit: int) -> float:
        clock = Clock()
        labels = LabelSets(limit, idle_s=IDLE_S, clock=clock, on_drop=lambda tenant, adapter: None)
        for number in range(limit):
            labels.pair(f"t{number % 10}", f"a{number}")
        names = [(f"t{number % 12}", f"n{number}") for number in range(20_000)]
        best = float("inf")
        for _ in range(3):
            begin = time.process_time()
            for tenant, name in names:
                clock.now += 1.0
                labels.pair(tenant, name)
            best = min(best, time.process_time() - begin)
        return best / len(names)

    assert seconds_per_call(20_000) < 5 * seconds_per_call(100)


def test_no_tenant_crowds_others_out_of_the_adapters_with_requests() -> None:
    crowd = [ref("hostile", f"a{number:03d}", 1) for number in range(500)]
    quiet = ref("acme", "zebra", 1)
    digests = tuple(sorted(one.digest for one in [*crowd, quiet]))
    cache = [CacheEntry(one, "cold") for one in [*crowd, quiet]]
    snapshot = EngineSnapshot(fake_engine_info(), EngineStats(waiting_adapters=digests), cache, True, 0)
    for family in text_string_to_metric_families(Metrics(BASE).render(snapshot).decode()):
        if family.name == "vllm:lora_requests_info":
            names = family.samples[0].labels["waiting_lora_adapters"].split(",")
    assert len(names) == 100
    assert "zebra" in names
