"""How far a server's start is, by its `/readyz`: a line for each stage, and its seconds at a terminal."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

import httpx
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from loraplex.adapters.errors import LoraplexError

SILENCE_S = 900.0
"""Longest time without any answer. A server that answers bounds its own start, and ends where it fails."""
REMINDER_S = 30.0
"""Between two lines of one stage, where no terminal shows its seconds."""
POLL_S = 0.2


class NotStarted(LoraplexError):
    """The server did not answer at all; the message says for how long."""

    code = "not_started"


def await_ready(
    url: str,
    console: Console,
    check: Callable[[], None],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Return when `url` (a `/readyz`) answers 200. However long a stage takes, it is awaited: `check` is called before
    each question, and raises where the server has ended. Raises NotStarted after `SILENCE_S` without an answer."""
    shown = _Shown(console, clock)
    heard_at = clock()
    with shown:
        while True:
            check()
            with contextlib.suppress(httpx.HTTPError, ValueError):
                answer = httpx.get(url, timeout=2)
                if answer.status_code == 200:
                    return
                shown.stage(str(answer.json().get("reason", "")))
                heard_at = clock()
            if clock() - heard_at > SILENCE_S:
                raise NotStarted(f"the server has not answered for {SILENCE_S:.0f} s.")
            sleep(POLL_S)


class _Shown:
    """The stage that goes on: a bar with its seconds at a terminal, which moves while nobody knows how long it takes;
    elsewhere a line now and then."""

    def __init__(self, console: Console, clock: Callable[[], float]) -> None:
        self._console = console
        self._clock = clock
        self._bar: Progress | None = None
        if console.is_terminal:
            columns = (
                TextColumn("   "),
                BarColumn(20),
                TextColumn("{task.description}"),
                TimeElapsedColumn(),
            )
            self._bar = Progress(*columns, console=console, transient=True)
            self._bar.add_task("the server's process starts", total=None)
        self._reason = ""
        self._began = self._said = clock()

    def __enter__(self) -> _Shown:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: Any) -> None:
        if self._bar is not None:
            self._bar.stop()

    def stage(self, reason: str) -> None:
        now = self._clock()
        if reason != self._reason:
            self._reason, self._began, self._said = reason, now, now
            self._line(reason)
            if self._bar is not None:
                [task] = self._bar.task_ids
                self._bar.reset(task, total=None, description=escape(reason))
        elif self._bar is None and now - self._said >= REMINDER_S:
            self._said = now
            self._line(f"{reason}: {now - self._began:.0f} s so far")

    def _line(self, text: str) -> None:
        self._console.print(f"    {escape(text)}", highlight=False, soft_wrap=True)
