"""Flushes of versions that serve before their bytes are on the disk."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from sqlalchemy import select, tuple_

from loraplex.adapters.errors import ArtifactMissing, LoraplexError
from loraplex.adapters.store.artifact_store import Examined
from loraplex.adapters.store.fault_points import FaultPoint
from loraplex.adapters.store.interface import Store
from loraplex.control.db.database import Database
from loraplex.control.db.tables import LIVING, AdapterVersion

_Key = tuple[str, str, int]


@dataclass(frozen=True, slots=True)
class Settled:
    """The outcome for some digests. `durable`: those that are on the disk, and whose versions say so. `failed`: those
    that a disk or a database kept from it, with the reason. `replaced`: those whose files others took the place of
    meanwhile. The rest need no flush: no version has them any more, or the store lacks them."""

    durable: tuple[str, ...]
    failed: dict[str, str]
    replaced: tuple[str, ...] = ()


class Flushes:
    """All calls are synchronous, for a worker thread. Neither takes a lock while it waits for the disk."""

    def __init__(self, database: Database, store: Store) -> None:
        self._database = database
        self._store = store

    def waiting(self) -> list[str]:
        """Digests of living versions that are not durable."""
        of = AdapterVersion
        with self._database.read() as session:
            query = select(of.digest).where(LIVING, of.durable.is_(False)).distinct()
            return list(session.scalars(query))

    def settle(self, digests: Sequence[str], suspect: Collection[str] = ()) -> Settled:
        """Flush the digests that living versions still wait for, and make those versions durable, in one transaction.
        The files of `suspect` ones, whose flush has failed before, are rewritten.

        A version is made durable only if it lives since before its bytes were flushed, and those bytes are still the
        ones that are stored: so one that was deleted and pushed again meanwhile waits for a flush of its own.
        """
        keys = self._keys(digests)
        flushed: dict[str, Examined] = {}
        failed: dict[str, str] = {}
        for digest in keys:
            try:
                flushed[digest] = self._store.flush(digest, rewrite=digest in suspect)
            except ArtifactMissing:
                continue
            except (LoraplexError, OSError) as error:
                failed[digest] = str(error)
        if not flushed:
            return Settled((), failed)
        try:
            current = self._record(keys, flushed)
        except LoraplexError as error:
            return Settled((), failed | dict.fromkeys(flushed, error.message))
        return Settled(tuple(current), failed, tuple(flushed.keys() - current))

    def _keys(self, digests: Sequence[str]) -> dict[str, list[_Key]]:
        """The living versions of each digest that are not durable; digests without one are left out."""
        of = AdapterVersion
        query = select(of.digest, of.tenant_id, of.name, of.number)
        found: dict[str, list[_Key]] = {}
        with self._database.read() as session:
            waiting = session.execute(query.where(of.digest.in_(digests), LIVING, of.durable.is_(False)))
            for digest, tenant_id, name, number in waiting:
                found.setdefault(digest, []).append((tenant_id, name, number))
        return found

    def _record(self, keys: dict[str, list[_Key]], flushed: dict[str, Examined]) -> set[str]:
        """Make the versions of what was flushed durable, of digests that are still stored as they were then."""
        of = AdapterVersion
        chosen = [key for digest in flushed for key in keys[digest]]
        with self._database.write() as session:
            current = {digest for digest, examined in flushed.items() if self._store.is_current(examined)}
            query = select(of).where(tuple_(of.tenant_id, of.name, of.number).in_(chosen), LIVING)
            for row in session.scalars(query):
                if row.digest in current:
                    row.durable = True
            self._store.fault(FaultPoint.COMMIT_DURABLE)
            return current
