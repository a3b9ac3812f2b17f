"""Log lines about an engine process, of the server and of an engine that dials in."""

from __future__ import annotations

import logging
from typing import Any

import structlog

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
    """Log a report of the supervisor about its engine process."""
    structlog.get_logger("loraplex").log(ENGINE_LEVELS.get(event, logging.INFO), event, **fields)


class StartLog:
    """A line when the engine's start gets on, and one every ten seconds while it does not."""

    def __init__(self) -> None:
        self._log = structlog.get_logger("loraplex")
        self._last: tuple[str, int] | None = None

    def __call__(self, stage: str, seconds: float) -> None:
        now = (stage, int(seconds) // 10)
        if now != self._last:
            self._last = now
            self._log.info("engine_starting", stage=stage, seconds=round(seconds))
