"""Metric families of the engines behind the server, one by one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from loraplex.engine.reports import EngineStats
from loraplex.serving.engines.engines import Engines
from loraplex.serving.engines.handing_over import HandoverCounts
from loraplex.serving.engines.reports import ReplicaReport


@dataclass(frozen=True)
class ClusterSnapshot:
    """A `Engines` at the moment of a scrape. `stats`: those of the engines that are up, by name."""

    num_wanted: int = 0
    reports: Sequence[ReplicaReport] = ()
    stats: Mapping[str, EngineStats] = field(default_factory=dict)
    num_failed_over: int = 0
    num_continued: int = 0
    num_moved: int = 0
    num_managers_lost: int = 0
    handovers: HandoverCounts = field(default_factory=HandoverCounts)


def cluster_snapshot(view: Engines, stats: Mapping[str, EngineStats]) -> ClusterSnapshot:
    return ClusterSnapshot(
        view.num_wanted,
        view.reports(),
        stats,
        view.num_failed_over,
        view.num_continued,
        view.num_moved,
        view.num_managers_lost,
        view.handovers,
    )


def cluster_families(snapshot: ClusterSnapshot) -> Iterable[Metric]:
    """The series of each engine have the label `replica`, with one engine too, so that a dashboard needs no second
    form. An engine that is away has no figures of its batch."""
    replicas = GaugeMetricFamily("loraplex_replicas", "Engines, by state.", labels=["state"])
    replicas.add_metric(["wanted"], snapshot.num_wanted)
    for state in ("ready", "draining", "away"):
        replicas.add_metric([state], sum(report.state == state for report in snapshot.reports))
    yield replicas
    yield from _of_reports(snapshot.reports)
    yield from _of_stats(snapshot.stats)
    yield CounterMetricFamily(
        "loraplex_failed_over_sequences",
        "Sequences that went on with another engine after theirs was lost.",
        value=snapshot.num_failed_over,
    )
    yield CounterMetricFamily(
        "loraplex_continued_sequences",
        "Those of them whose answer had begun.",
        value=snapshot.num_continued,
    )
    yield CounterMetricFamily(
        "loraplex_adapter_moves",
        "Adapters that began to move to another engine without need.",
        value=snapshot.num_moved,
    )
    yield CounterMetricFamily(
        "loraplex_managers_lost",
        "Processes that start engines, as Ray's manager, which ended or lost their head.",
        value=snapshot.num_managers_lost,
    )
    yield from _of_handovers(snapshot.handovers)


def _of_handovers(counts: HandoverCounts) -> Iterable[Metric]:
    name = "loraplex_kv_handover_blocks"
    blocks = CounterMetricFamily(
        name, "Blocks and states of drained engines, by what became of them.", labels=["event"]
    )
    blocks.add_metric(["taken"], counts.num_taken)
    blocks.add_metric(["refused"], counts.num_refused)
    yield blocks
    told = "Bytes of drained engines' prefixes that were sent to others."
    yield CounterMetricFamily("loraplex_kv_handover_bytes", told, value=counts.num_bytes)
    told = "Time in which prefixes of drained engines were asked for and sent."
    yield CounterMetricFamily("loraplex_kv_handover_seconds", told, value=counts.seconds)


def _of_reports(reports: Iterable[ReplicaReport]) -> Iterable[Metric]:
    up = GaugeMetricFamily("loraplex_replica_up", "1 while this engine takes requests.", labels=["replica"])
    restarts = CounterMetricFamily(
        "loraplex_replica_restarts", "Processes of this engine that were started again.", labels=["replica"]
    )
    adapters = GaugeMetricFamily(
        "loraplex_replica_adapters", "Versions in this engine's memory.", labels=["replica", "state"]
    )
    for report in reports:
        up.add_metric([report.id], report.state == "ready")
        restarts.add_metric([report.id], report.num_restarts)
        adapters.add_metric([report.id, "hot"], report.num_hot)
        adapters.add_metric([report.id, "warm"], report.num_warm)
    yield from (up, restarts, adapters)


def _of_stats(stats: Mapping[str, EngineStats]) -> Iterable[Metric]:
    running = GaugeMetricFamily("loraplex_replica_running", "Running sequences.", labels=["replica"])
    waiting = GaugeMetricFamily("loraplex_replica_waiting", "Waiting sequences.", labels=["replica"])
    usage = GaugeMetricFamily(
        "loraplex_replica_kv_usage", "Share of the KV blocks in use; 1 is all of them.", labels=["replica"]
    )
    for name, its in stats.items():
        running.add_metric([name], its.num_running)
        waiting.add_metric([name], its.num_waiting)
        usage.add_metric([name], its.num_kv_blocks_used / its.num_kv_blocks if its.num_kv_blocks else 0.0)
    yield from (running, waiting, usage)
