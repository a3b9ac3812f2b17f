"""The processes of a drill: those of a Ray that runs already are no children of it."""

from __future__ import annotations

import contextlib
import os

import psutil

MARK = "DRILL_MARK"
"""The variable by which they are known."""


def marked(mark: str, word: str = "") -> list[psutil.Process]:
    """Processes with this mark, but not this one, the oldest first, with this word in their command line."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            is_ours = process.pid != os.getpid() and process.environ().get(MARK) == mark
            if is_ours and word in " ".join(process.cmdline()):
                found.append((process.create_time(), process))
    return [process for _, process in sorted(found, key=lambda pair: pair[0])]
