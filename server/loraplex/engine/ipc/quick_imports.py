"""Imports of a process that starts, without Python's garbage collector."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def quick_imports() -> Iterator[None]:
    """Import in the block what the process needs to its end. The collector is off meanwhile, and never looks at what is
    there at the end of the block: it would find next to nothing, again and again, for a fifth of the time."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
