"""Engines of a cluster learn what the others served their tenants."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from loraplex.serving.engines.fairness import ServiceExchange
from loraplex.serving.engines.replica import Replica
from loraplex.serving.engines.session import EngineSession
from loraplex.serving.errors import EngineUnavailable


class Session:
    """Serves the same in each second, and keeps what it is told."""

    def __init__(self, served: Mapping[str, float]) -> None:
        self.served = dict(served)
        self.is_away = False
        self.told: list[dict[str, float]] = []

    async def exchange_service(self, elsewhere: Mapping[str, float]) -> dict[str, float]:
        if self.is_away:
            raise EngineUnavailable("it has gone")
        self.told.append(dict(elsewhere))
        return self.served


def replicas(*sessions: Session) -> list[Replica]:
    return [Replica(f"replica-{number}", cast(EngineSession, each)) for number, each in enumerate(sessions)]


async def test_each_is_told_what_the_others_served() -> None:
    first, second, third = Session({"a": 3.0, "b": 1.0}), Session({"a": 4.0}), Session({})
    exchange = ServiceExchange()
    for _ in range(2):
        await exchange.exchange(replicas(first, second, third))
    assert [first.told[0], second.told[0], third.told[0]] == [{}, {}, {}]
    assert first.told[1] == {"a": 4.0}
    assert second.told[1] == {"a": 3.0, "b": 1.0}
    assert third.told[1] == {"a": 7.0, "b": 1.0}


async def test_one_that_does_not_answer_served_nothing() -> None:
    first, second = Session({"a": 3.0}), Session({"a": 4.0})
    exchange = ServiceExchange()
    await exchange.exchange(replicas(first, second))
    second.is_away = True
    await exchange.exchange(replicas(first, second))
    second.is_away = False
    await exchange.exchange(replicas(first, second))
    assert first.told == [{}, {"a": 4.0}, {}]
    assert second.told == [{}, {"a": 3.0}]


async def test_a_single_engine_is_told_nothing() -> None:
    only = Session({"a": 3.0})
    await ServiceExchange().exchange(replicas(only))
    assert only.told == []
