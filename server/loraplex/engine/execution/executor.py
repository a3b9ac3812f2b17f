"""Where forward passes run."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

_T = TypeVar("_T")


class Executor:
    """One worker thread that runs what it is given, strictly in that order. An exception belongs to the `Future`
    of the work that raised it; the worker goes on with the next."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="forward")

    def submit(self, work: Callable[[], _T]) -> Future[_T]:
        """Raises RuntimeError after `close`."""
        return self._pool.submit(work)

    def close(self) -> None:
        """Finish what was submitted, and end the thread."""
        self._pool.shutdown(wait=True)
