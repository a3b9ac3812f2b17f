"""SIGTERM and SIGINT of a process that drains."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Iterator


class StopSignals:
    """SIGTERM and SIGINT of one event loop: the first asks for a drain, the second for an end at once."""

    def __init__(self) -> None:
        self._first = asyncio.Event()
        self._second = asyncio.Event()

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    def _on_signal(self) -> None:
        (self._second if self._first.is_set() else self._first).set()

    def first_task(self) -> asyncio.Task[bool]:
        return asyncio.create_task(self._first.wait())

    def second_task(self) -> asyncio.Task[bool]:
        return asyncio.create_task(self._second.wait())
