"""A question to several engines."""

from __future__ import annotations

import asyncio

import pytest

from loraplex.serving.engines.merged import SLOW_S, answers
from loraplex.serving.errors import EngineUnavailable
from support.virtual_time import VirtualTimeLoop


async def after(seconds: float, answer: str = "") -> str:
    await asyncio.sleep(seconds)
    if not answer:
        raise EngineUnavailable("it has gone")
    return answer


def ask(**asked: tuple[float, str]) -> tuple[dict[str, str], float]:
    """The answers, and the seconds until they are there."""

    async def run() -> tuple[dict[str, str], float]:
        found = await answers({name: after(*its) for name, its in asked.items()})
        return found, asyncio.get_running_loop().time()

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(run())


def test_all_answer() -> None:
    assert ask(a=(0.1, "x"), b=(0.5, "y")) == ({"a": "x", "b": "y"}, pytest.approx(0.5))


def test_a_slow_one_is_left_out() -> None:
    assert ask(a=(0.1, "x"), b=(60.0, "y")) == ({"a": "x"}, pytest.approx(0.1 + SLOW_S))


def test_one_that_fails_is_left_out_and_no_answer() -> None:
    assert ask(a=(0.1, ""), b=(5.0, "y")) == ({"b": "y"}, pytest.approx(5.0))


def test_where_all_fail_the_first_error_is_raised() -> None:
    with pytest.raises(EngineUnavailable, match="gone"):
        ask(a=(0.1, ""), b=(0.2, ""))
