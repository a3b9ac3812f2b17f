"""Waiting for a server that starts: as long as it says that it goes on, and no longer than it lives."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator

import httpx
import pytest
from rich.console import Console

from loraplex.app.start_watch import REMINDER_S, SILENCE_S, NotStarted, await_ready

COMPILING = "the engine is starting: compiling kernels"


class Start:
    """A server's answers, one for each question, and a clock that only waiting moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.answers: Iterator[str | None] = iter(())
        self.console = Console(file=io.StringIO(), force_terminal=False, width=200)
        monkeypatch.setattr(httpx, "get", self._get)

    def _get(self, *_: object, **__: object) -> httpx.Response:
        reason = next(self.answers)
        if reason is None:
            raise httpx.ConnectError("not yet")
        if reason == "ready":
            return httpx.Response(200, json={"status": "ok"})
        return httpx.Response(503, json={"status": "unavailable", "reason": reason})

    def _sleep(self, seconds: float) -> None:
        self.now += seconds

    def wait(self, *answers: str | None, check: Callable[[], None] = lambda: None) -> list[str]:
        """What was printed."""
        self.answers = iter(answers)
        await_ready("http://x/readyz", self.console, check, clock=lambda: self.now, sleep=self._sleep)
        assert isinstance(self.console.file, io.StringIO)
        return [line.strip() for line in self.console.file.getvalue().splitlines()]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Start:
    return Start(monkeypatch)


def test_a_stage_of_an_hour_is_awaited(start: Start) -> None:
    questions = 3600 * 5
    lines = start.wait(None, "the engine is starting: loading", *[COMPILING] * questions, "ready")
    assert start.now > 3000
    assert lines[:2] == ["the engine is starting: loading", COMPILING]
    reminders = lines[2:]
    assert len(reminders) == pytest.approx(start.now / REMINDER_S, abs=2)
    assert reminders[0].startswith(f"{COMPILING}: 30 s so far")


def test_a_server_that_ends_is_not_awaited(start: Start) -> None:
    class Ended(Exception):
        pass

    def check() -> None:
        if start.now > 5:
            raise Ended

    with pytest.raises(Ended):
        start.wait(*[COMPILING] * 1000, check=check)
    assert start.now < 6


def test_a_server_that_never_answers_is_given_up(start: Start) -> None:
    with pytest.raises(NotStarted, match="has not answered for 900 s"):
        start.wait(*[None] * 10_000)
    assert SILENCE_S < start.now < SILENCE_S + 1


def test_silence_counts_from_the_last_answer(start: Start) -> None:
    quiet = [None] * int(SILENCE_S * 4)
    assert start.wait(*quiet, COMPILING, *quiet, "ready") == [COMPILING]


def test_at_a_terminal_the_seconds_are_shown(start: Start) -> None:
    start.console = Console(file=io.StringIO(), force_terminal=True, width=200)
    lines = start.wait(*[COMPILING] * 500, "ready")
    assert sum(COMPILING in line for line in lines if "so far" in line) == 0
    assert "━" in "".join(lines), "a bar that moves"
