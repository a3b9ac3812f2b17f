"""How much each adapter version is asked for, so that an engine that starts again loads the working set first."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter

from loraplex.adapters.ref import AdapterRef

HALF_LIFE_S = 12 * 3600.0
"""A use counts half as much after this time."""
MAX_KNOWN = 8192
"""Versions that are counted; of more, the least recently used are forgotten."""
MAX_RANKED = 4096
"""Versions that are recorded and loaded again."""
MAX_USES = 1e12


@dataclass(slots=True)
class Known:
    """One version: `uses` as of `at`. `was_loaded`: some engine has had it in memory, so loading it does no harm."""

    ref: AdapterRef
    uses: float = 0.0
    at: float = 0.0
    was_loaded: bool = False


@dataclass(frozen=True, slots=True)
class Uses:
    """The uses of a version, each by its age."""

    ref: AdapterRef
    uses: float


class Demand:
    """The versions that requests named, with their decayed uses. For one event loop; `clock` gives seconds since the
    epoch. A use costs a few operations, whatever is known.

    Only versions that an engine has loaded are ranked. One that ends the engine process when it is loaded would end
    each that is started after it.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._known: OrderedDict[str, Known] = OrderedDict()
        self.num_changes = 0

    def __contains__(self, digest: str) -> bool:
        return digest in self._known

    def use(self, ref: AdapterRef) -> None:
        """A request names it."""
        known = self.know(ref)
        now = self._clock()
        known.uses = min(known.uses * decay(now - known.at) + 1, MAX_USES)
        known.at = now
        self.num_changes += 1

    def know(self, ref: AdapterRef) -> Known:
        """Know a version that may be used soon, or is pinned."""
        known = self._known.get(ref.digest)
        if known is None:
            known = self._known[ref.digest] = Known(ref)
            if len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)
        known.ref = ref
        self._known.move_to_end(ref.digest)
        return known

    def loaded(self, digests: Iterable[str]) -> None:
        """These are in an engine's memory."""
        for digest in digests:
            known = self._known.get(digest)
            if known is not None and not known.was_loaded:
                known.was_loaded = True
                self.num_changes += 1

    def forget(self, digest: str) -> None:
        """Forget a deleted version."""
        if self._known.pop(digest, None) is not None:
            self.num_changes += 1

    def restore(self, uses: Iterable[Uses]) -> None:
        """Restore the uses that an earlier life recorded, as of now. Uses since then are added."""
        now = self._clock()
        for recorded in uses:
            known = self.know(recorded.ref)
            known.uses = min(known.uses * decay(now - known.at) + recorded.uses, MAX_USES)
            known.at, known.was_loaded = now, True
        self.num_changes += 1

    def ranked(self, also: Collection[str] = ()) -> list[Uses]:
        """The versions by use, at most `MAX_RANKED`, the most used first, and of equal ones the most recent. Without a
        use, only those of `also`."""
        return rank(self.known(), self._clock(), also)

    def known(self) -> list[Known]:
        """Everything known, for `rank` in another thread."""
        return list(self._known.values())


def rank(known: Sequence[Known], now: float, also: Collection[str] = ()) -> list[Uses]:
    """See `Demand.ranked`."""
    found = [
        Uses(each.ref, each.uses * decay(now - each.at))
        for each in reversed(known)
        if each.was_loaded and (each.uses or each.ref.digest in also)
    ]
    return sorted(found, key=attrgetter("uses"), reverse=True)[:MAX_RANKED]


def decay(age_s: float) -> float:
    """The part of a use that is left after this time. A clock that was set back, or a time from the future, decays
    nothing."""
    return float(0.5 ** (max(0.0, age_s) / HALF_LIFE_S))
