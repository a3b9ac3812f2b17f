"""Reports of a process below the server: `Event` lines on stdout, and nothing else there."""

from __future__ import annotations

import os
from collections.abc import Callable

import msgspec

from loraplex.app.cluster.spec import Event


def open_events() -> Callable[[Event], None]:
    """The pipe to the server for events alone: whatever prints writes to standard error from here on."""
    events = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def tell(event: Event) -> None:
        events.write(msgspec.json.encode(event).decode() + "\n")
        events.flush()

    return tell


def one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:2000]
