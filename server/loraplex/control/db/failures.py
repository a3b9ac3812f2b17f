"""Maps the database's errors: it is gone, it is busy, or the row exists already."""

from __future__ import annotations

from sqlalchemy.exc import DBAPIError, IntegrityError, OperationalError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from loraplex.adapters.errors import LoraplexError, StoreFull
from loraplex.control.errors import Conflict, DatabaseBusy, DatabaseDenied, DatabaseUnavailable

_GONE = frozenset({"57P01", "57P02", "57P03", "57P05", "53300", "25006", "F0000"})
"""SQLSTATEs beside class 08 of a server that stops, starts, takes no more connections, or may only be read."""
_BUSY = frozenset({"40001", "40P01", "55P03", "57014", "25P03"})
"""Serialisation failure, deadlock, lock not to be had in time, statement too long, transaction idle too long."""
_DENIED = "42501"
"""The user lacks a privilege."""
_SQLITE_GONE = ("SQLITE_CANTOPEN", "SQLITE_IOERR", "SQLITE_CORRUPT", "SQLITE_NOTADB", "SQLITE_READONLY")
_SQLITE_BUSY = ("SQLITE_BUSY", "SQLITE_LOCKED")


def meaning_of(error: SQLAlchemyError) -> LoraplexError | None:
    """The error to raise in place of this one; None for what is our own bug."""
    if isinstance(error, IntegrityError):
        return Conflict("What this needs was changed at the same moment; look again, then try again.")
    if isinstance(error, PoolTimeout):
        return DatabaseBusy()
    if not isinstance(error, DBAPIError):
        return None
    name = getattr(error.orig, "sqlite_errorname", None)
    if isinstance(name, str):
        return _of_sqlite(name)
    state = getattr(error.orig, "sqlstate", None)
    if error.connection_invalidated or (state is None and isinstance(error, OperationalError)):
        return DatabaseUnavailable()
    if state is None:
        return None
    if state in _GONE or state.startswith("08"):
        return DatabaseUnavailable()
    if state == _DENIED:
        return DatabaseDenied()
    if state in _BUSY or state.startswith("53"):
        return DatabaseBusy()
    return None


def _of_sqlite(name: str) -> LoraplexError | None:
    if name.startswith(_SQLITE_BUSY):
        return DatabaseBusy()
    if name.startswith(_SQLITE_GONE):
        return DatabaseUnavailable()
    if name.startswith("SQLITE_FULL"):
        return StoreFull("the database's disk is full; nothing was changed")
    return None
