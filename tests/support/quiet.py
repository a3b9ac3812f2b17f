"""Servers of tests that say nothing but what went wrong."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

import structlog


@contextlib.contextmanager
def errors_alone() -> Iterator[None]:
    """Errors only, each on one line."""
    structlog.configure(
        processors=[structlog.processors.JSONRenderer(default=str)],
        wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR),
    )
    yield
    structlog.reset_defaults()
