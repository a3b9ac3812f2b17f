"""The engines behind the server, and where adapters live."""

from __future__ import annotations

from typing import Literal

from loraplex.admin.schemas.fields import ResponseBody


class ReplicaAdapters(ResponseBody):
    """Versions by their fastest tier: on the device, in host memory alone."""

    hot: int
    warm: int


class ReplicaRow(ResponseBody):
    """One engine. `reason`: why it is not ready. `pid` is null while no process runs; `places`, `max_model_len`,
    `numerics`, `base_fingerprint` and `device` are null before it has been up. `places`: sequences at once.
    `mean_request_seconds`: of a request, lately."""

    id: str
    node: str
    pid: int | None
    state: Literal["ready", "draining", "away"]
    reason: str | None
    restarts: int
    live_requests: int
    places: int | None
    max_model_len: int | None
    mean_request_seconds: float
    adapters: ReplicaAdapters
    numerics: str | None
    base_fingerprint: str | None
    device: str | None


class PlaceRow(ResponseBody):
    """An engine that a version lives on. `home`: the first in the version's order; `copy`: a further one, by demand;
    `overflow`: those before it are full; `leaving`: until the new place has loaded it."""

    replica: str
    reason: Literal["home", "copy", "overflow", "leaving"]


class PlacedRow(ResponseBody):
    """A version with its places. Equal bytes of several tenants are one version; it has the name by which it was asked
    for first."""

    digest: str
    tenant_id: str
    name: str
    version: str
    places: list[PlaceRow]


class ClusterPage(ResponseBody):
    """`wanted`: engines that there should be. `replicas` are all of them, on each page; `data` are the versions that
    are in demand or pinned, by digest."""

    wanted: int
    replicas: list[ReplicaRow]
    data: list[PlacedRow]
    next_cursor: str | None
