"""Memory that Ray takes beside the engines."""

from __future__ import annotations

from typing import Final

OBJECT_STORE_BYTES: Final = 80 << 20
"""Nearly the least that Ray takes, in /dev/shm: nothing of ours goes through it."""
RAY_BYTES: Final = 600 << 20
"""Memory of Ray's head, controller, dashboard, agents and driver."""
REPLICA_BYTES: Final = 100 << 20
"""The actor beside each engine."""


def ray_bytes(replicas: int) -> int:
    """Memory of Ray's own processes for this number of engines on one machine."""
    return RAY_BYTES + replicas * REPLICA_BYTES
