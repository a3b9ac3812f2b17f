"""The cluster as operators see it: its engines, where adapters live, and what moved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from loraplex.adapters.ref import AdapterRef
from loraplex.engine.reports import EngineInfo, EngineStats
from loraplex.serving.client.engine_client import EngineClient

ReplicaState = Literal["ready", "draining", "away"]
PlaceReason = Literal["home", "copy", "overflow", "leaving"]
"""Why an engine has an adapter, as `loraplex.serving.cluster.placement` says."""


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """One engine. `reason`: why it is not ready, None where it is. `info` is None before it has been up, `pid` while no
    process runs. `mean_s`: seconds of a request, lately. `num_hot`, `num_warm`: versions on its device, and in its host
    memory alone."""

    id: str
    node: str
    pid: int | None
    state: ReplicaState
    reason: str | None
    num_restarts: int
    num_live: int
    mean_s: float
    num_hot: int
    num_warm: int
    info: EngineInfo | None


@dataclass(frozen=True, slots=True)
class PlacedVersion:
    """Where the version of `ref` lives: engines by name, with the reason. Equal bytes of several tenants are one; `ref`
    names the one that came first."""

    ref: AdapterRef
    places: Sequence[tuple[str, PlaceReason]]


class ClusterView(Protocol):
    """Several engines behind one client, or the only one. Counters begin with the server process."""

    @property
    def num_wanted(self) -> int:
        """Engines that there should be."""
        ...

    @property
    def num_failed_over(self) -> int:
        """Sequences that went on with another engine after theirs was lost."""
        ...

    @property
    def num_continued(self) -> int:
        """Those of them whose answer had begun."""
        ...

    @property
    def num_moved(self) -> int:
        """Adapters that began to move to another engine without need."""
        ...

    @property
    def num_managers_lost(self) -> int:
        """Processes that start engines, as Ray's manager, which ended or lost their head."""
        ...

    def reports(self) -> Sequence[ReplicaReport]:
        """The engines, by name."""
        ...

    def placed(self, limit: int, after: str = "") -> Sequence[PlacedVersion]:
        """The first `limit` versions with a place whose digest comes after this one, by digest."""
        ...

    async def replica_stats(self) -> Mapping[str, EngineStats]:
        """The figures of each engine that is up, by name. Raises ServingError where none is, or one does not answer."""
        ...

    def drain(self, name: str) -> None:
        """Give an engine nothing new from here on. Raises KeyError where there is none of this name."""
        ...


class ClusterClient(EngineClient, ClusterView, Protocol):
    """The engines as both planes use them."""


def shortage(view: ClusterView) -> str | None:
    """Which engines are missing, and why, where fewer take requests than there should be."""
    reports = view.reports()
    num_ready = sum(report.state == "ready" for report in reports)
    if num_ready >= view.num_wanted:
        return None
    said = [f"{report.id}: {report.reason}" for report in reports if report.state != "ready"]
    if len(reports) < view.num_wanted:
        said.append(f"{view.num_wanted - len(reports)} have not joined")
    return f"{num_ready} of {view.num_wanted} engines take requests: {'; '.join(said)}"
