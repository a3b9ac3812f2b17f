"""Log lines about an engine process, of the server and of an engine that dials in."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import structlog

from loraplex.serving.supervision.engine_supervisor import ENGINE_COMMAND, Supervision

ENGINE_LEVELS = {
    "engine_lost": logging.ERROR,
    "engine_restart": logging.WARNING,
    "engine_restart_failed": logging.ERROR,
    "engine_gave_up": logging.ERROR,
    "engine_spare_failed": logging.WARNING,
    "pin_not_loaded": logging.WARNING,
    "engine_refused": logging.WARNING,
    "engine_left": logging.WARNING,
    "server_left": logging.WARNING,
    "server_not_joined": logging.WARNING,
    "probe_not_read": logging.WARNING,
}


def log_engine(event: str, **fields: Any) -> None:
    """Log a report of the supervisor about its engine process. The loss of one of several, whose requests all went on
    elsewhere, is no error."""
    level = ENGINE_LEVELS.get(event, logging.INFO)
    if event == "engine_lost" and "replica" in fields and not fields["failed_requests"]:
        level = logging.WARNING
    structlog.get_logger("loraplex").log(level, event, **fields)


def engine_rules(
    replica: str | None, *, keep_spare: bool, command: Sequence[str] = ENGINE_COMMAND
) -> Supervision:
    """The rules of an engine whose log lines have its name; None: it is the only one."""
    named = {} if replica is None else {"replica": replica}
    return Supervision(
        command=command if replica is None else (*command, "--replica", replica),
        log=partial(log_engine, **named),
        on_progress=StartLog(named),
        keep_spare=keep_spare,
    )


class StartLog:
    """A line when the engine's start gets on, and one every ten seconds while it does not. `named`: fields of each."""

    def __init__(self, named: Mapping[str, str]) -> None:
        self._log = structlog.get_logger("loraplex").bind(**named)
        self._last: tuple[str, int] | None = None

    def __call__(self, stage: str, seconds: float) -> None:
        now = (stage, int(seconds) // 10)
        if now != self._last:
            self._last = now
            self._log.info("engine_starting", stage=stage, seconds=round(seconds))
