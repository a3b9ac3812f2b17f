"""Messages to the script in Redis and its answers, in msgpack. Times are microseconds of Redis' clock; a `name` is
OWNER:ID:WHAT, an `owner` OWNER:ID, as they stand in the keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from loraplex.control.limits.plan import LimitPlan, Owner, RateCharge


class Rate(msgspec.Struct, frozen=True):
    name: str
    limit: int
    cost: int
    tokens: bool
    """False: a request, whose charge stays if anything came of it."""


class Seat(msgspec.Struct, frozen=True):
    """A place, with what it bounds; what it does not name has no limit."""

    owner: str
    bounds: dict[str, int]


class Request(msgspec.Struct, frozen=True):
    """A reservation that was made `age` microseconds ago, and has not ended. `told`: it was reported to Redis before,
    and may have lost it or given it back."""

    id: str
    age: float
    told: bool
    rates: list[Rate]
    places: list[Seat]
    held: Mapping[str, int]


class Spending(msgspec.Struct, frozen=True):
    """The state of a window: that it was spent until `seen`; and what was charged without Redis: `sum` in tokens,
    and `floor`, the time until which they alone would spend it. Both times are microseconds from now."""

    name: str
    limit: int
    seen: float
    sum: float
    floor: float


class Caller(msgspec.Struct, frozen=True):
    """`number` names the caller's joining. `clock`: the time of Redis by the caller's own clock, -1 where it is not
    known; `decisions`: how many Redis had counted when it last answered."""

    replica: str
    number: str
    clock: float
    decisions: int


class Tell(msgspec.Struct, frozen=True):
    """Before a Join: what is known of windows. `born`: the data that Redis had at the last joining, empty at first.
    `is_doubtful`: some of it may have expired since. `batch` names the sums, which do not change while they are
    reported.
    """

    by: Caller
    born: str
    is_doubtful: bool
    batch: str
    rates: list[Spending]


class Join(msgspec.Struct, frozen=True):
    """`ended`: request → what it used, -1 for nothing at all. `live`: all that have not ended. `asked`: those whose
    answer is still on its way, which stay as they are. `born`, `is_doubtful`: as in a Tell."""

    by: Caller
    born: str
    is_doubtful: bool
    ended: dict[str, int]
    live: list[Request]
    asked: list[str]


class Reserve(msgspec.Struct, frozen=True):
    by: Caller
    id: str
    rates: list[Rate]
    places: list[Seat]
    held: Mapping[str, int]


class Settle(msgspec.Struct, frozen=True):
    by: Caller
    ended: dict[str, int]


class Beat(msgspec.Struct, frozen=True):
    """A heartbeat; or, as a Leave, the last word."""

    by: Caller


class Reply(msgspec.Struct, frozen=True):
    """`unknown`: Redis does not know this joining of this replica; `late`: its time is more than a second beyond the
    caller's; neither did anything. `decisions` that changed its data. `spent` and `waits`: microseconds, for each rate
    of the plan; `waits` until it, or once it passed the same one again, would pass. `over` for each
    place: what there is too much of. `windows`: by name, what is spent after settling. `replicas` that live.
    `has_lost`: other data than `born` named before, or less."""

    status: Literal["ok", "refused", "unknown", "late"]
    now: float
    decisions: int
    spent: list[float] = []
    waits: list[float] = []
    over: list[list[str]] = []
    windows: dict[str, float] = {}
    replicas: int = 0
    has_lost: bool = False
    born: str = ""


def window_name(charge: RateCharge) -> str:
    return f"{owner_name(charge.owner)}:{charge.what}"


def owner_name(owner: Owner) -> str:
    return f"{owner.kind}:{owner.id}"


def rates_of(plan: LimitPlan) -> list[Rate]:
    return [Rate(window_name(one), one.limit, one.cost, one.is_of_tokens) for one in plan.rates]


def seats_of(plan: LimitPlan) -> list[Seat]:
    return [
        Seat(owner_name(one.owner), {what: most for what, most in one.limits.items() if most is not None})
        for one in plan.places
    ]
