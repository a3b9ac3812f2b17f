"""A process that migrates, for tests that start several at once. It imports little, so that they are quick."""

from __future__ import annotations

from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier

from loraplex.migrations.run import upgrade


def migrate(url: str, together: Barrier, applied: Queue[list[str]]) -> None:
    together.wait(60)
    applied.put(upgrade(url))
