"""`loraplex` in this process, for commands that end by themselves: each process of its own imports everything again."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Mapping

import structlog
from typer.testing import CliRunner

from loraplex.app.cli import create_cli
from support.servers.live_server import Outcome

_QUIETED = ("uvicorn.access", "uvicorn.error", "httpx")


def run_here(*arguments: str, environment: Mapping[str, str] | None = None) -> Outcome:
    """As support.servers.live_server.run_command, with the same environment. The command may choose how it logs."""
    settings = {
        name: None for name in os.environ if name.startswith("LORAPLEX_") and name != "LORAPLEX_MODEL_CACHE"
    }
    with _logging_restored():
        done = CliRunner(env=settings | dict(environment or {})).invoke(create_cli(arguments[0]), arguments)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return Outcome(done.exit_code, done.stdout, done.stderr)


@contextlib.contextmanager
def _logging_restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, levels = root.handlers[:], {name: logging.getLogger(name).level for name in ("", *_QUIETED)}
    try:
        yield
    finally:
        root.handlers[:] = handlers
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
        structlog.reset_defaults()
