"""The cluster of a scripted engine: itself alone, or the engines that a test names."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from loraplex.adapters.ref import AdapterRef
from loraplex.engine.reports import EngineInfo, EngineStats
from loraplex.serving.engines.handing_over import HandoverCounts
from loraplex.serving.engines.reports import ReplicaReport
from loraplex.serving.placement.homes import PlacedVersion
from loraplex.serving.placement.placement import AdapterPlace


def fake_report(name: str, reason: str | None = None, **changes: Any) -> ReplicaReport:
    """An engine that is ready, or away for this reason."""
    report = ReplicaReport(
        id=name,
        node="here",
        pid=4711,
        state="ready" if reason is None else "away",
        reason=reason,
        num_restarts=0,
        num_live=0,
        mean_s=2.0,
        num_hot=0,
        num_warm=0,
        info=None,
    )
    return replace(report, **changes)


class FakeClusterView:
    """What Engines tells of its engines."""

    num_live: int
    healthy: bool
    info: EngineInfo
    unhealthy_reason: str | None

    def __init__(self) -> None:
        self.num_wanted = 1
        self.num_failed_over = self.num_continued = self.num_moved = self.num_managers_lost = 0
        self.handovers = HandoverCounts()
        self.replicas: dict[str, ReplicaReport] | None = None
        """Engines by name in place of the only one."""
        self.replica_figures: dict[str, EngineStats] = {}
        self.places: dict[AdapterRef, tuple[AdapterPlace, ...]] = {}

    def reports(self) -> list[ReplicaReport]:
        if self.replicas is not None:
            return [self.replicas[name] for name in sorted(self.replicas)]
        reason = None if self.healthy else self.unhealthy_reason or "the engine has not been started"
        return [
            fake_report("replica-1", reason, num_live=self.num_live, info=self.info if self.healthy else None)
        ]

    def placed(self, limit: int, after: str = "") -> list[PlacedVersion]:
        found = [PlacedVersion(ref, places) for ref, places in self.places.items() if ref.digest > after]
        return sorted(found, key=lambda version: version.ref.digest)[:limit]

    async def replica_stats(self) -> dict[str, EngineStats]:
        return self.replica_figures

    def drain(self, name: str, draining: bool = True) -> None:
        assert self.replicas is not None
        state, reason = ("draining", "it is drained") if draining else ("ready", None)
        self.replicas[name] = replace(self.replicas[name], state=state, reason=reason)
