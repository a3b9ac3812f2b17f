"""Which bytes of the store are still somebody's: the only place that deletes artifacts."""

from __future__ import annotations

import threading
from collections.abc import Iterable

import structlog
from sqlalchemy import select

from loraplex.adapters.store import ArtifactStore, SweepReport
from loraplex.control.database import Database
from loraplex.control.tables import AdapterVersion
from loraplex.control.types import Removal

log = structlog.get_logger("loraplex")


class Artifacts:
    """The store beside the table that refers to it.

    `lock` is held from an artifact's commit to its row's, and around deletions, so that no upload can publish
    bytes that a deletion of the same content is about to remove.
    """

    def __init__(self, database: Database, store: ArtifactStore) -> None:
        self._database = database
        self.store = store
        self.lock = threading.RLock()

    def remove_unused(self, digests: Iterable[str]) -> Removal:
        """Delete those of `digests` that no living version has. The lock is held by the caller since before it
        deleted the rows."""
        with self.lock:
            unused = sorted(set(digests) - self.live())
            for digest in unused:
                try:
                    self.store.delete(digest)
                except OSError as error:
                    # The rows are gone, and so is the version for everybody. The next start sweeps the bytes.
                    log.warning("artifact_not_removed", digest=digest, reason=str(error))
            return Removal(tuple(unused))

    def live(self) -> set[str]:
        with self._database.read() as session:
            query = select(AdapterVersion.digest).where(AdapterVersion.state != "deleted").distinct()
            return set(session.scalars(query))

    def sweep(self) -> SweepReport:
        """At the start, before anything is served: remove what a crash left behind."""
        with self.lock:
            return self.store.sweep(self.live())
