"""One engine of a cluster: its session, and what the cluster knows of it beside."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass, field

from loraplex.engine.reports import EngineInfo
from loraplex.serving.engines.reports import ReplicaReport, ReplicaState
from loraplex.serving.engines.session import EngineSession
from loraplex.serving.errors import EngineUnavailable
from loraplex.serving.placement.choice import MemberLoad
from loraplex.serving.placement.hashing import digest_key, key_of, score
from loraplex.serving.placement.placement import Member

FIRST_MEAN_S = 2.0
"""The assumed duration of a request before one has ended."""
_NEWEST = 0.05
"""Weight of the last request in the mean duration."""


@dataclass(slots=True, eq=False)
class Replica:
    """`id` is its name in the cluster, `node` the machine that it runs on. `mean_s`: seconds of a request, lately."""

    id: str
    session: EngineSession
    node: str = ""
    is_draining: bool = False
    mean_s: float = FIRST_MEAN_S
    key: int = field(init=False)

    def __post_init__(self) -> None:
        self.key = key_of(self.id.encode())

    @property
    def state(self) -> ReplicaState:
        if not self.session.healthy:
            return "away"
        return "draining" if self.is_draining else "ready"

    @property
    def life(self) -> tuple[str, str]:
        """The replica, and which engine process of it."""
        return self.id, self.session.life

    def load(self) -> MemberLoad:
        return MemberLoad(self.key, self.session.num_live, self.session.info.max_num_seqs, self.mean_s)

    def member(self) -> Member:
        """The replica as placement sees it."""
        info = self.session.info
        return Member(self.id, info.max_num_seqs, info.arena_pages * info.arena_page_bytes, self.session.hot)

    def report(self) -> ReplicaReport:
        """The replica as operators see it."""
        info: EngineInfo | None = None
        with contextlib.suppress(EngineUnavailable):
            info = self.session.info
        states = list(self.session.resident.values())
        return ReplicaReport(
            id=self.id,
            node=self.node,
            pid=self.session.pid,
            state=self.state,
            reason=self._reason(),
            num_restarts=self.session.num_restarts,
            num_live=self.session.num_live,
            mean_s=self.mean_s,
            num_hot=states.count("hot"),
            num_warm=states.count("warm"),
            info=info,
        )

    def _reason(self) -> str | None:
        match self.state:
            case "ready":
                return None
            case "draining":
                return "it is drained: it finishes what it has and takes nothing new"
            case "away":
                return self.session.unhealthy_reason or "the engine is not ready"

    def ended(self, seconds: float) -> None:
        """A request of this duration has ended here."""
        self.mean_s += _NEWEST * (seconds - self.mean_s)


def in_order(digest: str, replicas: Iterable[Replica]) -> list[Replica]:
    """Replicas in the rendezvous order of a version."""
    key = digest_key(digest)
    return sorted(replicas, key=lambda replica: (score(key, replica.key), replica.id), reverse=True)
