"""Slices of time: the sums of all requests that ended in it, and the figures of the largest tenants and adapters.

A closed slice is a few flat buffers, so that its size is bounded whatever the number of tenants and adapters. A history
has 90 of them. `MAX_TENANTS` and `MAX_ADAPTERS` are chosen so that they, with names of the longest kind, and the slices
that are open take less than 16 MB.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from heapq import nlargest

import msgspec

from loraplex.control.history.figures import ERRORS, LIMITED, REQUESTS, WIDTH, add_to, zeros

Key = tuple[str, str, int]
"""A tenant, the name of an adapter and the number of its version; ("…", "", 0) of all that a tenant asked."""
MAX_TENANTS = 64
MAX_ADAPTERS = 512
"""Rows of a closed slice. A quarter of them are for those with the most errors and refusals, the rest for those with
the most requests."""
OPEN_TENANTS = 128
OPEN_ADAPTERS = 768
OPEN_FAILING = 128
"""Rows of a slice that is still open: the first ones to come, and more for those whose first request failed."""
_MOST = 2**32 - 1
_keys: msgspec.msgpack.Decoder[list[Key]] = msgspec.msgpack.Decoder(list[Key])


@dataclass(frozen=True, slots=True)
class Kept:
    """The rows that a slice keeps: names in MessagePack, and 32 bits for each place of each row. `cut`: there were
    others, which only the sums have."""

    names: bytes
    figures: array[int]
    cut: bool

    def __iter__(self) -> Iterator[tuple[Key, array[int]]]:
        for number, key in enumerate(_keys.decode(self.names)):
            yield key, self.figures[number * WIDTH : (number + 1) * WIDTH]


@dataclass(frozen=True, slots=True)
class Slice:
    """A slice that has ended; `index` times its length is its beginning."""

    index: int
    total: array[int]
    tenants: Kept
    adapters: Kept


class OpenRows:
    """Rows by key, at most `room`, and `OPEN_FAILING` more."""

    def __init__(self, room: int) -> None:
        self._room = room
        self._rows: dict[Key, array[int]] = {}
        self._cut = False

    def row(self, key: Key, *, failing: bool) -> array[int] | None:
        """The row of this key; None where there is no room for another one."""
        found = self._rows.get(key)
        if found is None:
            if len(self._rows) >= self._room + (OPEN_FAILING if failing else 0):
                self._cut = True
                return None
            found = self._rows[key] = zeros()
        return found

    def take(self, others: OpenRows) -> None:
        """Add all rows of a slice within this one."""
        self._cut = self._cut or others._cut
        for key, row in others._rows.items():
            own = self.row(key, failing=row[ERRORS] > 0)
            if own is not None:
                add_to(own, row)

    def keep(self, most: int) -> Kept:
        """The rows as a closed slice keeps them, at most `most`."""
        chosen = _largest(self._rows, most)
        figures = array("I")
        for row in chosen.values():
            figures.extend(min(number, _MOST) for number in row)
        names = msgspec.msgpack.encode(list(chosen))
        return Kept(names, figures, self._cut or len(chosen) < len(self._rows))


class OpenSlice:
    """A slice that requests still end in."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.total = zeros()
        self.tenants = OpenRows(OPEN_TENANTS)
        self.adapters = OpenRows(OPEN_ADAPTERS)

    def take(self, other: OpenSlice) -> None:
        """Add a slice within this one."""
        add_to(self.total, other.total)
        self.tenants.take(other.tenants)
        self.adapters.take(other.adapters)

    def close(self) -> Slice:
        return Slice(self.index, self.total, self.tenants.keep(MAX_TENANTS), self.adapters.keep(MAX_ADAPTERS))


def _largest(rows: Mapping[Key, array[int]], most: int) -> Mapping[Key, array[int]]:
    """Rows with the most errors and refusals, up to a quarter of `most`, and then those with the most requests."""
    if len(rows) <= most:
        return rows

    def trouble(key: Key) -> tuple[int, int]:
        return rows[key][ERRORS], rows[key][LIMITED]

    failing = nlargest(most // 4, (key for key in rows if any(trouble(key))), key=trouble)
    chosen = set(failing)
    others = (key for key in rows if key not in chosen)
    largest = nlargest(most - len(failing), others, key=lambda key: rows[key][REQUESTS])
    return {key: rows[key] for key in (*failing, *largest)}
