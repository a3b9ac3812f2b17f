"""Python's own writes to standard error, as events of a log. Both processes of a server use it."""

from __future__ import annotations

import logging
import sys
import threading
from types import TracebackType
from typing import Any, Protocol


class Report(Protocol):
    def __call__(self, event: str, error: BaseException, **fields: Any) -> None: ...


def install_log_hooks(report: Report) -> None:
    """From now on an exception that nothing catches, in any thread, goes to `report`, and libraries' warnings go to
    `logging`. For a process of a server, which keeps them to its end."""

    def uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        report("uncaught_exception", error)

    def in_thread(ended: threading.ExceptHookArgs) -> None:
        if ended.exc_value is not None and not isinstance(ended.exc_value, SystemExit):
            report("thread_failed", ended.exc_value, thread=ended.thread and ended.thread.name)

    def ignored(hooked: sys.UnraisableHookArgs) -> None:
        # Not the object: its repr may hold a request's text.
        if hooked.exc_value is not None:
            report("exception_ignored", hooked.exc_value)

    sys.excepthook = uncaught
    threading.excepthook = in_thread
    sys.unraisablehook = ignored
    logging.captureWarnings(True)
    logging.raiseExceptions = False  # a line that cannot be written would be reported in plain text
