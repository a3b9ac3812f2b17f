"""What servers of tests log."""

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
    try:
        yield
    finally:
        structlog.reset_defaults()


@contextlib.contextmanager
def all_levels() -> Iterator[None]:
    """Every line, also in a process where `errors_alone` holds for other tests."""
    before = structlog.get_config()
    structlog.reset_defaults()
    try:
        yield
    finally:
        structlog.configure(**before)
