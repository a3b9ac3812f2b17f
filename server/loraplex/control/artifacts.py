"""Which artifacts of the store are still used by a version: the only place that deletes artifacts."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

import structlog
from sqlalchemy import select
from sqlalchemy.orm import Session

from loraplex.adapters.errors import StoreFailed
from loraplex.adapters.store.artifact_store import Examined, SweepReport
from loraplex.adapters.store.interface import Store
from loraplex.adapters.store.laid_out import keep_laid_out, remove_laid_out
from loraplex.control.db.database import Database
from loraplex.control.db.tables import LIVING, AdapterVersion
from loraplex.control.errors import DatabaseBusy, DatabaseUnavailable
from loraplex.control.types import Removal

log = structlog.get_logger("loraplex")


class Artifacts:
    """The store beside the table that refers to it.

    `lock` keeps the order within this server. `holding` is held from an artifact's commit to its row's, and around
    the removal of its bytes, so that no upload to any server on this database can publish bytes that a deletion of
    the same content is about to remove. `images` is where this server's engine keeps laid-out adapters.
    """

    def __init__(self, database: Database, store: Store, images: Path | None = None) -> None:
        self._database = database
        self.store = store
        self._images = images
        self.lock = threading.RLock()

    @contextlib.contextmanager
    def holding(self, digest: str) -> Iterator[None]:
        """Hold a digest, by one thread of one server at a time, and not twice. Raises DatabaseUnavailable,
        DatabaseBusy."""
        with self.lock, self._database.lock(f"artifact:{digest}"):
            yield

    @contextlib.contextmanager
    def examined(self, digest: str) -> Iterator[Examined]:
        """`holding`, with what the stored bytes were found to be. They are read before it, and once more if others were
        put in their place meanwhile: other calls do not wait while a large artifact is hashed. Raises as `holding`
        does, and OSError."""
        while True:
            examined = self.store.examine(digest)
            with self.holding(digest):
                if self.store.is_current(examined):
                    yield examined
                    return

    def check_stored(self, digest: str) -> None:
        """Within the transaction that records a version: its bytes are still there. A caller that lost its
        connection to the database lost `holding` with it. Raises DatabaseBusy."""
        if not self.store.holds(digest):
            raise DatabaseBusy()

    def is_durable(self, digest: str) -> bool:
        """Whether a living version says of the stored bytes that they are on the disk."""
        of = AdapterVersion
        with self._database.read() as session:
            query = select(of.digest).where(of.digest == digest, LIVING, of.durable)
            return session.scalars(query.limit(1)).first() is not None

    def remove_unused(self, digests: Iterable[str], unpinned: Iterable[str] = ()) -> Removal:
        """Delete those of `digests` that no living version has. `unpinned` are those that lost their last pin."""
        unused = []
        with self.lock:
            for digest in sorted(set(digests)):
                try:
                    if self._remove_unused(digest):
                        unused.append(digest)
                except (DatabaseUnavailable, DatabaseBusy) as error:
                    # The rows are gone, and with them the version. The next start sweeps the bytes.
                    log.warning("artifact_not_removed", digest=digest, reason=error.message)
        return Removal(tuple(unused), tuple(sorted(set(unpinned) - set(unused))))

    def _remove_unused(self, digest: str) -> bool:
        with self.holding(digest), self._database.write(ages_caches=False) as session:
            if _is_live(session, digest):
                return False
            try:
                self.store.delete(digest)
                if self._images is not None:
                    remove_laid_out(self._images, digest)
            except (OSError, StoreFailed) as error:
                log.warning("artifact_not_removed", digest=digest, reason=str(error))
            return True

    def live(self) -> set[str]:
        with self._database.read() as session:
            query = select(AdapterVersion.digest).where(LIVING).distinct()
            return set(session.scalars(query))

    def sweep(self) -> SweepReport:
        """Remove what a crash left behind. Call at the start, before anything is served, and by the only
        server on this store."""
        with self.lock:
            return self.store.sweep(self.live())

    def sweep_images(self) -> None:
        """Delete laid-out adapters whose uploads are gone. Call at the start, before the engine."""
        if self._images is not None:
            try:
                keep_laid_out(self._images, self.live())
            except OSError as error:
                log.warning("image_not_removed", reason=str(error))


def _is_live(session: Session, digest: str) -> bool:
    query = select(AdapterVersion.digest).where(AdapterVersion.digest == digest, LIVING)
    return session.scalars(query.limit(1)).first() is not None


def lost_pins(session: Session, digests: Collection[str]) -> tuple[str, ...]:
    """Those of `digests`, of versions that were pinned and go with this transaction, that no version is pinned with any
    more: the engine pins bytes, whosever they are."""
    query = select(AdapterVersion.digest).where(
        AdapterVersion.digest.in_(digests), AdapterVersion.pinned, AdapterVersion.state == "ready"
    )
    return tuple(sorted(set(digests) - set(session.scalars(query))))
