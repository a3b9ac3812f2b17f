"""Which member serves a request: the one where it waits least, and among equals always the same, so that a conversation
finds its KV blocks."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import NamedTuple

from loraplex.serving.placement.hashing import first, key_of

LOAD_WEIGHT = 2.0
"""Weight of a load's seconds beside a wait's: it takes memory from others, too."""
EVEN = 1.25
"""Load of a member, over the mean of those with an equal wait and one sequence, up to which its place in the order
counts (bounded loads, as in `placement`)."""


class MemberLoad(NamedTuple):
    """A member that takes requests. `key`: `hashing.key_of` its id. `load`: sequences that run or wait there; `places`:
    sequences at once; `mean_s`: seconds of a request, lately."""

    key: int
    load: int
    places: int
    mean_s: float


def choose(
    members: Mapping[str, MemberLoad],
    *,
    places: Collection[str] = (),
    resident: Collection[str] = (),
    load_s: float = 0.0,
    prefix: bytes = b"",
) -> str | None:
    """The member for a request; None where there is none. `places`: where its adapter lives, `resident`: which members
    have it on their device, `load_s`: seconds that a load of it takes; all empty for the base. Members outside `places`
    are asked where each of these would have it wait. `prefix`: the name of the request's first KV
    block."""
    among = [name for name in places if name in members]
    if not among or all(members[name].load >= members[name].places for name in among):
        among = list(members)
    if not among:
        return None
    least, equal = math.inf, []
    for name in among:
        _, load, seats, mean_s = members[name]
        wait = (load - seats + 1) / seats * mean_s if load >= seats else 0.0
        if name not in resident:
            wait += LOAD_WEIGHT * load_s
        if wait < least:
            least, equal = wait, [name]
        elif wait == least:
            equal.append(name)
    if resident:
        equal = [name for name in equal if name in resident] or equal
    most_load = EVEN * sum([members[name].load for name in equal]) / len(equal) + 1
    even = {name: members[name].key for name in equal if members[name].load <= most_load}
    return first(key_of(prefix), even)
