"""What the script in Redis is told and answers, in msgpack. Times are microseconds of Redis' clock; a `name` is
OWNER:ID:WHAT, an `owner` OWNER:ID, as they stand in the keys."""

from __future__ import annotations

from typing import Literal

import msgspec

from loraplex.control.limits.plan import LimitPlan, Owner, RateCharge


class Rate(msgspec.Struct, frozen=True):
    name: str
    limit: int
    cost: int
    tokens: bool
    """False: a request, of which all stays where anything came of it."""


class Seat(msgspec.Struct, frozen=True):
    """A place. -1: as many as there may be."""

    owner: str
    limit: int
    max_sequences: int


class Request(msgspec.Struct, frozen=True):
    """A reservation that was made `at` that time, and has not ended. `told`: Redis was told of it before, and may have
    lost it or given it back."""

    id: str
    at: float
    told: bool
    rates: list[Rate]
    places: list[Seat]
    sequences: int


class Spending(msgspec.Struct, frozen=True):
    """What is known of a window: that it was spent until `seen`; and what was charged without Redis, of which `sum` is
    the tokens and `floor` the time until which they alone would spend it."""

    name: str
    limit: int
    seen: float
    sum: float
    floor: float


class Join(msgspec.Struct, frozen=True):
    """`number` names this joining in every later call; `born`: the data that Redis had at the last one, empty at first.
    `ended`: request → what it used, -1 for nothing at all. `live`: all that have not ended. `heard`: since then this
    replica may have decided by itself, -1 where it did not. `replicas` that it believes there are, 0 at first.
    `knows`: it has decided here before. `is_whole`: no Report follows. `batch`: the sums in `rates` only grow until it
    is another one."""

    replica: str
    number: str
    batch: str
    heard: float
    replicas: int
    born: str
    rates: list[Spending]
    ended: dict[str, int]
    live: list[Request]
    knows: bool
    is_whole: bool


class Reserve(msgspec.Struct, frozen=True):
    replica: str
    number: str
    id: str
    rates: list[Rate]
    places: list[Seat]
    sequences: int


class Report(msgspec.Struct, frozen=True):
    """More of what a Join tells, which answered `has_lost`."""

    replica: str
    number: str
    batch: str
    rates: list[Spending]
    has_lost: bool
    knows: bool
    is_last: bool


class Settle(msgspec.Struct, frozen=True):
    replica: str
    number: str
    ended: dict[str, int]


class Beat(msgspec.Struct, frozen=True):
    """A heartbeat, sent at the time `heard`. `replicas` as in a Join."""

    replica: str
    number: str
    heard: float
    replicas: int


class Leave(msgspec.Struct, frozen=True):
    """The last word."""

    replica: str
    number: str


class Reply(msgspec.Struct, frozen=True):
    """`unknown`: Redis does not know this joining of this replica, and did nothing. `spent` and `waits`: microseconds,
    for each rate of the plan; `waits` until it, or once it passed the same one again, would pass. `full` and `crowded`
    for each place: its requests and its sequences. `windows`: by name, what is spent after settling. `replicas`
    that live, `rank` of them come before this one. `has_lost`: other data than `born` named before. `ready`: all have
    told what they knew before the data was lost, or all were away, and decisions may be asked for."""

    status: Literal["ok", "refused", "unknown"]
    now: float
    spent: list[float] = []
    waits: list[float] = []
    full: list[bool] = []
    crowded: list[bool] = []
    windows: dict[str, float] = {}
    replicas: int = 0
    rank: int = 0
    has_lost: bool = False
    ready: bool = True
    born: str = ""


def window_name(charge: RateCharge) -> str:
    return f"{owner_name(charge.owner)}:{charge.what}"


def owner_name(owner: Owner) -> str:
    return f"{owner.kind}:{owner.id}"


def rates_of(plan: LimitPlan) -> list[Rate]:
    return [Rate(window_name(one), one.limit, one.cost, one.what == "tokens") for one in plan.rates]


def seats_of(plan: LimitPlan) -> list[Seat]:
    return [Seat(owner_name(one.owner), _bound(one.limit), _bound(one.max_sequences)) for one in plan.places]


def _bound(limit: int | None) -> int:
    return -1 if limit is None else limit
