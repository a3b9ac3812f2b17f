"""`answers_per_minute`, a limit of a new kind, from its JSON to what a caller is told."""

import asyncio

import pytest

from loraplex.admin.schemas.limits import Limits as LimitsBody
from loraplex.api.limit_headers import limit_headers
from loraplex.app.commands.shared.values import parse_limits
from loraplex.app.setting_types import server_limits
from loraplex.app.settings import load_settings
from loraplex.control.errors import NeverFits, RateLimited
from loraplex.control.limits.in_process import InProcessLimiter
from loraplex.control.limits.plan import plan_request
from loraplex.control.limits.redis_messages import rates_of
from loraplex.control.types import LIMIT_KINDS, NO_LIMITS, Limits, Principal, ReachedLimit

asked = LimitsBody.model_validate({"answers_per_minute": 5}).model_dump(exclude_none=True)
assert asked == parse_limits(["answers_per_minute=5"], of_key=True) == {"answers_per_minute": 5}
caller = Principal("acme", "key", frozenset(), tenant_limits=Limits(**asked))
settings = load_settings({"server_limit": ["answers_per_minute=9"]})
assert server_limits(settings.server_limit) == Limits(answers_per_minute=9)
assert "answers" in LIMIT_KINDS


def plan(n: int):
    return plan_request(caller, NO_LIMITS, prompt_tokens=1, asked_tokens=1, default_tokens=1, n=n)


async def ask() -> None:
    limiter = InProcessLimiter()
    headers = dict(limit_headers((await limiter.reserve("one", plan(3))).windows))
    assert headers["x-ratelimit-limit-answers"] == "5"
    assert headers["x-ratelimit-remaining-answers"] == "2"
    with pytest.raises(RateLimited) as refused:
        await limiter.reserve("two", plan(3))
    assert refused.value.message == "The tenant's limit of 5 answers a minute is reached."
    assert refused.value.reached == ReachedLimit("tenant", "answers")


asyncio.run(ask())
assert [(rate.name, rate.cost) for rate in rates_of(plan(3))] == [("tenant:acme:answers", 3)]
with pytest.raises(NeverFits, match="6 answers"):
    plan(6)
