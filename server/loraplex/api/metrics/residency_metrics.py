"""Metrics of adapters in memory, under the names of vLLM's pull request 54830, which gateways are about to read. The
names may still change: a setting adds these metrics."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate

from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.utils import floatToGoString

from loraplex.adapters.cache.residency import CacheEntry
from loraplex.engine.reports import EngineStats

MAX_SHOWN = 1000
"""Adapters with a series of their own, those on the device first."""
LOAD_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_LEVELS = {"hot": "gpu", "warm": "cpu"}


class LoadTimes:
    """A histogram of the loads that scrapes have seen: the latest one of each version at a scrape, all its stages
    together. Loads between two scrapes of the same version count once."""

    def __init__(self) -> None:
        self._counts = [0] * (len(LOAD_S) + 1)
        self._sum = 0.0
        self._seen: dict[str, dict[str, float]] = {}

    def observe(self, cache: Iterable[CacheEntry]) -> None:
        seen = {entry.ref.digest: entry.load_seconds for entry in cache if entry.load_seconds}
        for digest, stages in seen.items():
            if stages != self._seen.get(digest):
                seconds = stages.get("disk", 0.0) + stages.get("copy", 0.0)
                self._counts[bisect_left(LOAD_S, seconds)] += 1
                self._sum += seconds
        self._seen = seen

    def family(self, model_name: str) -> Metric:
        family = HistogramMetricFamily(
            "vllm:lora_adapter_load_seconds",
            "Time of a load of an adapter, from the disk to the device.",
            labels=["model_name"],
        )
        bounds = [*map(floatToGoString, LOAD_S), "+Inf"]
        counts = zip(bounds, accumulate(self._counts), strict=True)
        family.add_metric([model_name], list(counts), self._sum)
        return family


def residency_families(
    cache: Sequence[CacheEntry], stats: EngineStats, model_name: str, *, adapter_names: bool
) -> Iterable[Metric]:
    """The adapters in memory. Without `adapter_names` they are told by the head of their digest, which is nobody's
    data. Versions and tenants with one name are one series, that of the fastest tier."""
    loaded = GaugeMetricFamily(
        "vllm:lora_adapter_loaded",
        "1 for each adapter in memory: on the device (gpu), or in host memory alone (cpu).",
        labels=["model_name", "adapter_name", "level", "pinned", "rank"],
    )
    shown: dict[str, CacheEntry] = {}
    resident = [entry for entry in cache if entry.state in _LEVELS]
    for entry in sorted(resident, key=lambda entry: (entry.state != "hot", not entry.pinned)):
        if len(shown) == MAX_SHOWN:
            break
        shown.setdefault(entry.ref.name if adapter_names else entry.ref.digest[:12], entry)
    for name, entry in shown.items():
        pinned = "true" if entry.pinned else "false"
        loaded.add_metric([model_name, name, _LEVELS[entry.state], pinned, str(entry.ref.rank)], 1)
    yield loaded
    num_hot = sum(entry.state == "hot" for entry in resident)
    for name, text, value in (
        ("num_gpu_loaded_lora_adapters", "Adapters on the device.", num_hot),
        ("max_gpu_lora_adapters", "Slots of adapters on the device.", stats.num_adapter_slots),
    ):
        family = GaugeMetricFamily(f"vllm:{name}", text, labels=["model_name"])
        family.add_metric([model_name], value)
        yield family
