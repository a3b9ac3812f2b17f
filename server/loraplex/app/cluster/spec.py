"""Messages between the server, its manager and the replicas."""

from __future__ import annotations

import hashlib
import re
from typing import Any

import msgspec

from loraplex.serving.supervision.engine_supervisor import ENGINE_COMMAND


class ClusterSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Engines that dial `join` (HOST:PORT). `settings` are an engine's, as `loraplex engine` takes them; one that is
    missing comes from the environment of the replica. More or fewer replicas must be wanted for `up_delay_s` or
    `down_delay_s` seconds. They are called by `prefix` and a name that Ray chooses. `gpus` of each; None: 1 where the
    engine runs on a GPU. `address` is a running cluster's, `head` that of a Ray of our own, whose files are in
    `folder`."""

    join: str
    settings: dict[str, Any] = {}
    min_replicas: int = 1
    max_replicas: int = 1
    up_delay_s: float = 10.0
    down_delay_s: float = 300.0
    prefix: str = "ray-"
    gpus: float | None = None
    address: str = ""
    head: str = ""
    folder: str = ""
    engine_command: tuple[str, ...] = ENGINE_COMMAND


NAME = "loraplex"


def application_prefix(spec: ClusterSpec) -> str:
    """Beginning of the names of a server's applications on a cluster that others use too."""
    return f"{NAME}-{re.sub('[^A-Za-z0-9]+', '-', spec.join).strip('-')}-"


def application_name(spec: ClusterSpec) -> str:
    """Name of the application: by what its engines are given on a running cluster, where an earlier manager may have
    left one of the same."""
    if not spec.address:
        return NAME
    given = msgspec.json.encode(msgspec.structs.replace(spec, prefix="", folder=""), order="sorted")
    return application_prefix(spec) + hashlib.sha256(given).hexdigest()[:12]


class Event(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line to the server: from the manager `ready` (all replicas serve), `head_lost` or `failed`, from the process of
    a Ray of our own `started` or `failed`."""

    name: str
    reason: str = ""
    seconds: float = 0.0
    address: str = ""
