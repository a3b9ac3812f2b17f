"""Slices of time: the sums of all requests that ended in it, and the figures of the largest tenants and adapters.

A closed slice is a few flat buffers, so that its size is bounded whatever the number of tenants and adapters. A history
has 90 of them. `MAX_TENANTS` and `MAX_ADAPTERS` are chosen so that they, with names of the longest kind, and the slices
that are open take less than 16 MB.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from loraplex.control.history.figures import ERRORS, LIMITED, REQUESTS, WIDTH, add_to, zeros

Key = tuple[str, str, int]
"""A tenant, the name of an adapter and the number of its version; ("…", "", 0) of all that a tenant asked."""
MAX_TENANTS = 64
MAX_ADAPTERS = 512
"""Rows of a closed slice. A quarter of them are for those with the most errors and refusals, the rest for those with
the most requests. Where there are more, each tenant has an equal part of them before the largest have what is left."""
OPEN_TENANTS = 128
OPEN_ADAPTERS = 768
OPEN_FAILING = 128
"""Rows of a slice that is still open: the first ones to come, and more for those whose first request failed. Where it
is full, a tenant with less than an equal part takes the place of the smallest row of the tenant with the most."""
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
        self._of_tenant: Counter[str] = Counter()
        self._cut = False

    def row(self, key: Key, *, failing: bool) -> array[int] | None:
        """The row of this key; None where there is no room for another one."""
        found = self._rows.get(key)
        if found is None:
            if len(self._rows) >= self._room + (OPEN_FAILING if failing else 0):
                self._cut = True
                if not self._make_room(key[0]):
                    return None
            found = self._rows[key] = zeros()
            self._of_tenant[key[0]] += 1
        return found

    def _make_room(self, tenant: str) -> bool:
        """Drop a row of the tenant with the most, if this one has less than an equal part and is still below it with
        one more."""
        wanted = self._of_tenant[tenant] + 1
        (loser, most), *_ = self._of_tenant.most_common(1)
        if most <= wanted or wanted * len(self._of_tenant) > self._room:
            return False
        rows = self._rows
        smallest = min(
            (key for key in rows if key[0] == loser),
            key=lambda key: (_trouble(rows[key]), rows[key][REQUESTS]),
        )
        del rows[smallest]
        self._of_tenant[loser] -= 1
        return True

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
    """Rows with the most errors and refusals, up to a quarter of `most`, and then those with the most requests; of each
    an equal part of every tenant first."""
    if len(rows) <= most:
        return rows
    in_trouble = [key for key, row in rows.items() if any(_trouble(row))]
    failing = _shared(sorted(in_trouble, key=lambda key: _trouble(rows[key]), reverse=True), most // 4)
    chosen = set(failing)
    others = [key for key in rows if key not in chosen]
    by_requests = sorted(others, key=lambda key: rows[key][REQUESTS], reverse=True)
    return {key: rows[key] for key in (*failing, *_shared(by_requests, most - len(failing)))}


def _trouble(row: Sequence[int]) -> tuple[int, int]:
    return row[ERRORS], row[LIMITED]


def _shared(keys: Sequence[Key], most: int) -> list[Key]:
    """The first `most` of these keys: an equal part of each tenant before more of any."""
    part = max(1, most // max(1, len({key[0] for key in keys})))
    taken: Counter[str] = Counter()
    within, beyond = list[Key](), list[Key]()
    for key in keys:
        taken[key[0]] += 1
        (within if taken[key[0]] <= part else beyond).append(key)
    return [*within, *beyond][:most]
