"""Log lines of the engine process: JSON on standard error, by the schema of docs/log-line.schema.json."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import traceback
from datetime import UTC, datetime
from typing import Any


def log(event: str, *, level: str = "info", exc_info: bool | BaseException = False, **fields: Any) -> None:
    """One line. `exc_info`: an exception, or True for the one that is being handled."""
    line = {
        "timestamp": datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z"),
        "level": level,
        "process": "engine",
        "logger": "engine",
        "event": event,
        "pid": os.getpid(),
        **fields,
    }
    if exc_info:
        error = exc_info if isinstance(exc_info, BaseException) else sys.exception()
        line["exception"] = "".join(traceback.format_exception(error)).rstrip()
    # A log that cannot be written (the parent has gone) must not end a step.
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(json.dumps(line, default=str) + "\n")
        sys.stderr.flush()


def report(event: str, error: BaseException, **fields: Any) -> None:
    """Write an error as a line of the log, for `install_log_hooks`."""
    log(event, level="error", exc_info=error, **fields)


class JsonLogs(logging.Handler):
    """Lines of the engine's modules and of libraries: the event is `log`, their text the `message`. `always`: fields of
    each line."""

    def __init__(self, **always: str) -> None:
        super().__init__()
        self._always = always

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        try:
            message = record.getMessage()
        except Exception:  # arguments that do not fit its text, which must not end a step
            message = str(record.msg)
        log(
            "log",
            level=record.levelname.lower(),
            exc_info=error or False,
            logger=record.name,
            message=message,
            **self._always,
        )
