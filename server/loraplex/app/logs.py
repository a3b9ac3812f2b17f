"""One JSON line an event on standard error, from structlog and from libraries' own logging alike.

docs/log-line.schema.json has the schema of every line.
"""

from __future__ import annotations

import logging
import sys
from typing import Any, TextIO

import structlog
from structlog.typing import EventDict, WrappedLogger

from loraplex.engine.log_hooks import install_log_hooks


class _NamedLogger(structlog.WriteLogger):
    """Writes a line at once. `print` would write its end apart, and a line of `logging` could come between."""

    def __init__(self, name: str, file: TextIO) -> None:
        super().__init__(file)
        self.name = name


def configure_logging(level: str) -> None:
    """Called once by each command that serves. Control characters cannot break a line: JSON escapes them."""
    number, stderr = getattr(logging, level.upper()), sys.stderr
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
    ]
    structlog.configure(
        processors=[*shared, _add_origin, structlog.processors.JSONRenderer()],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=lambda *names: _NamedLogger(names[0] if names else "loraplex", stderr),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[
                _as_message,
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.JSONRenderer(),
            ],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(number)
    # Our own access log has the tenant and the version, and "serving" names both ports; uvicorn's lines would only
    # repeat them. httpx logs every request of the CLI at info.
    for name in ("uvicorn.access", "uvicorn.error", "httpx"):
        logging.getLogger(name).setLevel(logging.WARNING)


def log_everything() -> None:
    """Also what Python writes to standard error by itself. For a process that only serves."""
    log = structlog.get_logger("loraplex")

    def report(event: str, error: BaseException, **fields: Any) -> None:
        log.error(event, exc_info=error, **fields)

    install_log_hooks(report)


def _add_origin(logger: WrappedLogger, method: str, line: EventDict) -> EventDict:
    line["process"] = "server"
    line["logger"] = logger.name
    return line


def _as_message(logger: WrappedLogger, method: str, line: EventDict) -> EventDict:
    """A library's line: the event is `log`, its text the message."""
    line["message"] = line["event"]
    line["event"] = "log"
    line["process"] = "server"
    line["logger"] = line["_record"].name
    return line
