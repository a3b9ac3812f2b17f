"""The charges of one request on its limits: a pure function of the limits and of what was asked.

A request has two plans: it is admitted before its body is read, and reserves the rest when it is known what that is. A
limiter decides a plan in one step, in memory (`in_process`) or elsewhere; it adds no rule of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from loraplex.control.errors import NeverFits
from loraplex.control.limits.gcra import PERIOD_S
from loraplex.control.limits.periods import in_words
from loraplex.control.types import PLACES, RATES, BudgetPeriod, LimitOwner, Limits, Principal, ReachedLimit


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose limit it is: a key or a tenant by its id, or the server, whose id is empty."""

    kind: LimitOwner
    id: str


@dataclass(frozen=True, slots=True)
class RateCharge:
    """`cost` of `limit` a minute."""

    owner: Owner
    what: str
    limit: int
    cost: int

    @property
    def seconds(self) -> float:
        """The charge as a share of the period: at most PERIOD_S."""
        return self.cost * PERIOD_S / self.limit

    def kept(self, used_tokens: int | None) -> int:
        """The cost that is kept of a request that has ended: 0 where it produced nothing (None)."""
        if used_tokens is None:
            return 0
        return min(used_tokens, self.cost) if self.is_of_tokens else self.cost

    @property
    def is_of_tokens(self) -> bool:
        """Whether what was not used of it is given back."""
        return self.what == "tokens"

    @property
    def refusal(self) -> str:
        return f"The {self.owner.kind}'s limit of {self.limit} {self.what} a minute is reached."

    @property
    def reached(self) -> ReachedLimit:
        return ReachedLimit(self.owner.kind, self.what)


@dataclass(frozen=True, slots=True)
class Place:
    """The limits of one owner on what it has at a time, by PLACES; None: no limit. It is counted all the same, so that
    a limit which is set later counts what runs by then."""

    owner: Owner
    limits: Mapping[str, int | None]

    def refusal(self, what: str) -> str:
        counted = "requests" if what == "concurrency" else what
        return f"The {self.owner.kind}'s limit of {self.limits[what]} {counted} at a time is reached."

    def reached(self, what: str) -> ReachedLimit:
        return ReachedLimit(self.owner.kind, what)


@dataclass(frozen=True, slots=True)
class BudgetCharge:
    """`cost` of `limit` tokens a period. `tenant_id`: with whom the budget ends; None for the server's."""

    owner: Owner
    tenant_id: str | None
    limit: int
    period: BudgetPeriod
    cost: int


@dataclass(frozen=True, slots=True)
class LimitPlan:
    """The charges of one decision, all or nothing. A limiter decides `rates` and `places`."""

    rates: tuple[RateCharge, ...]
    places: tuple[Place, ...] = ()
    held: Mapping[str, int] = field(default_factory=dict)
    """The request's own count in each of its places, by PLACES."""
    budgets: tuple[BudgetCharge, ...] = ()
    """Taken from the slices that this server holds (`budgets.Budgets`)."""
    tokens: int = 0
    """Those of prompts and answers together."""
    output_tokens: int = 0
    """Those of each answer."""

    @property
    def is_limited(self) -> bool:
        """Whether rates or places limit the caller."""
        return bool(self.rates) or any(
            most is not None for place in self.places for most in place.limits.values()
        )


def plan_admission(principal: Principal, server: Limits) -> LimitPlan:
    """One request of every request rate there is: what is charged before anything is known of the request."""
    return LimitPlan(_rates(_owners(principal, server), {"requests": 1}))


def plan_request(
    principal: Principal,
    server: Limits,
    *,
    prompt_tokens: int,
    asked_tokens: int | None,
    default_tokens: int,
    n: int,
) -> LimitPlan:
    """The plan of an admitted request with `prompt_tokens` in all its prompts and n answers.

    `asked_tokens` is what it asks for each answer; None takes `default_tokens`, or what the limits could ever allow if
    that is less. Raises NeverFits for what no wait would make fit.
    """
    owners = _owners(principal, server)
    output = default_tokens if asked_tokens is None else asked_tokens
    for owner, limits in owners:
        _check_sequences(owner, limits, n)
        output = _fit(owner, limits, output, prompt_tokens, asked_tokens, n)
    tokens = prompt_tokens + n * output
    return LimitPlan(
        rates=_rates(owners, {"tokens": tokens}),
        places=tuple(
            Place(owner, {what: getattr(limits, name) for what, name in PLACES.items()})
            for owner, limits in owners
        ),
        held={"concurrency": 1, "sequences": n},
        budgets=tuple(
            BudgetCharge(
                owner,
                None if owner.kind == "server" else principal.tenant_id,
                limits.token_budget,
                limits.budget_period,
                tokens,
            )
            for owner, limits in owners
            if limits.token_budget is not None and limits.budget_period is not None
        ),
        tokens=tokens,
        output_tokens=output,
    )


def _rates(owners: tuple[tuple[Owner, Limits], ...], costs: Mapping[str, int]) -> tuple[RateCharge, ...]:
    """Charges on each rate that is limited, by what is charged and its cost. Raises NeverFits."""
    charges = tuple(
        RateCharge(owner, what, limit, cost)
        for owner, limits in owners
        for what, cost in costs.items()
        if (limit := getattr(limits, RATES[what])) is not None
    )
    for charge in charges:
        if charge.cost > charge.limit:
            raise NeverFits(
                f"{charge.cost} {charge.what} were asked for at once; the {charge.owner.kind}'s limit is "
                f"{charge.limit} a minute.",
                param="n",
            )
    return charges


def _owners(principal: Principal, server: Limits) -> tuple[tuple[Owner, Limits], ...]:
    return (
        (Owner("key", principal.key_id or ""), principal.key_limits),
        (Owner("tenant", principal.tenant_id or ""), principal.tenant_limits),
        (Owner("server", ""), server),
    )


def _check_sequences(owner: Owner, limits: Limits, n: int) -> None:
    most = limits.max_sequences
    if most is not None and n > most:
        raise NeverFits(
            f"{n} sequences were asked for at once; the {owner.kind}'s limit is {most}.", param="n"
        )


def _fit(owner: Owner, limits: Limits, output: int, prompt_tokens: int, asked: int | None, n: int) -> int:
    """`output` as far as this owner's limits could ever allow it."""
    most = limits.max_output_tokens
    if most is not None and output > most:
        if asked is not None:
            raise NeverFits(
                f"{asked} output tokens were asked for; the {owner.kind}'s limit is {most}.",
                param="max_tokens",
            )
        output = most
    rate = limits.tokens_per_minute
    if rate is not None:
        output = _fit_tokens(owner, rate, f"{rate} tokens a minute", output, prompt_tokens, asked, n)
    budget = limits.token_budget
    if budget is not None and limits.budget_period is not None:
        in_all = in_words(budget, limits.budget_period)
        output = _fit_tokens(owner, budget, in_all, output, prompt_tokens, asked, n)
    return output


def _fit_tokens(
    owner: Owner, most: int, limit: str, output: int, prompt_tokens: int, asked: int | None, n: int
) -> int:
    room = (most - prompt_tokens) // n
    if room < min(1, output):
        raise NeverFits(
            f"The prompt has {prompt_tokens} tokens; the {owner.kind}'s limit of {limit} can never hold it"
            f"{' and an answer' if output else ''}.",
            param="messages",
        )
    if output > room and asked is not None:
        raise NeverFits(
            f"{prompt_tokens} prompt tokens and {n} × {asked} output tokens can never fit the {owner.kind}'s "
            f"limit of {limit}.",
            param="max_tokens",
        )
    return min(output, room)
