"""Values of the database kept in memory, so that the way of a request does not lead through it."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar
from weakref import WeakValueDictionary

import anyio

from loraplex.control.db.database import Database
from loraplex.control.errors import DatabaseBusy, DatabaseUnavailable

DEFAULT_STALENESS_S = 300.0
K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class _Entry(Generic[V]):
    value: V | None
    read_at: float
    revision: int


class ReadThrough(Generic[K, V]):
    """A cache at most `ttl_s` behind the database, and not behind changes that this process makes: any change, or those
    of the subjects that a key is `aged_by`.

    While the database cannot answer, a value serves for `staleness_s` more, unless this process changed one of its
    `subjects` since it was read. What there was not is not remembered then: it may have come to be. A caller for
    whom there is nothing left to serve gets the DatabaseUnavailable or DatabaseBusy.

    Callers that miss the same key at once share one reading. At most `capacity` values are kept, and as many
    keys that have none, apart from each other: a client that guesses keys pushes out no real one. For one event loop.
    """

    def __init__(
        self,
        database: Database,
        *,
        ttl_s: float,
        capacity: int,
        staleness_s: float = DEFAULT_STALENESS_S,
        subjects: Callable[[V], Iterable[str]] = lambda _: (),
        aged_by: Callable[[K], Iterable[str]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._database = database
        self._ttl_s = ttl_s
        self._staleness_s = staleness_s
        self._subjects = subjects
        self._aged_by = aged_by
        self._capacity = capacity
        self._clock = clock
        self._found: OrderedDict[K, _Entry[V]] = OrderedDict()
        self._absent: OrderedDict[K, _Entry[V]] = OrderedDict()
        self._reading: WeakValueDictionary[K, anyio.Lock] = WeakValueDictionary()

    async def get(self, key: K, read: Callable[..., V | None], *args: Any) -> V | None:
        """The value of `read(*args)`, which runs in a worker thread unless it is known."""
        entry = self._fresh(key)
        if entry is None:
            lock = self._reading.get(key)
            if lock is None:
                lock = self._reading[key] = anyio.Lock()
            async with lock:
                entry = self._fresh(key)
                if entry is None:
                    # Noted before the reading, so that a change meanwhile makes the answer stale.
                    read_at, revision = self._clock(), self._database.revision
                    try:
                        entry = _Entry(await self._database.look_up(read, *args), read_at, revision)
                    except (DatabaseUnavailable, DatabaseBusy):
                        entry = self._stale(key)
                        if entry is None:
                            raise
                    else:
                        self._keep(key, entry)
        return entry.value

    def __len__(self) -> int:
        return len(self._found) + len(self._absent)

    def _fresh(self, key: K) -> _Entry[V] | None:
        for kept in (self._found, self._absent):
            entry = kept.get(key)
            if entry is None or self._clock() - entry.read_at >= self._ttl_s or self._is_aged(key, entry):
                continue
            kept.move_to_end(key)
            return entry
        return None

    def _is_aged(self, key: K, entry: _Entry[V]) -> bool:
        if entry.revision == self._database.revision:
            return False
        changed = self._database.changed_since
        return self._aged_by is None or any(changed(each, entry.revision) for each in self._aged_by(key))

    def _stale(self, key: K) -> _Entry[V] | None:
        entry = self._found.get(key)
        if entry is None or entry.value is None:
            return None
        if self._clock() - entry.read_at >= self._ttl_s + self._staleness_s:
            return None
        changed = self._database.changed_since
        return (
            None
            if any(changed(subject, entry.revision) for subject in self._subjects(entry.value))
            else entry
        )

    def _keep(self, key: K, entry: _Entry[V]) -> None:
        self._found.pop(key, None)
        self._absent.pop(key, None)
        kept = self._absent if entry.value is None else self._found
        kept[key] = entry
        while len(kept) > self._capacity:
            kept.popitem(last=False)
