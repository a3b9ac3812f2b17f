"""The engines as operators see them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from loraplex.engine.reports import EngineInfo

ReplicaState = Literal["ready", "draining", "away"]


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


def shortage(reports: Sequence[ReplicaReport], num_wanted: int) -> str | None:
    """Which engines are missing, and why, where fewer take requests than there should be."""
    num_ready = sum(report.state == "ready" for report in reports)
    if num_ready >= num_wanted:
        return None
    said = [f"{report.id}: {report.reason}" for report in reports if report.state != "ready"]
    if len(reports) < num_wanted:
        said.append(f"{num_wanted - len(reports)} have not joined")
    return f"{num_ready} of {num_wanted} engines take requests: {'; '.join(said)}"
