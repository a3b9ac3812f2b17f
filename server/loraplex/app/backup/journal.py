"""Usage that is not in the database yet.

Journals are copied before the database: what had ended by then is in the one or in the other, and the copied database
says from where on a journal is to be read. A server that starts on the copies writes the rest, as after a crash.
"""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

from loraplex.adapters.store.files import create_file, open_regular, write_all
from loraplex.control.usage.segments import segment_numbers, segment_path

_BLOCK = 64 << 10
_ZEROS = bytes(_BLOCK)


def copy_journals(usage: Path, copies: Path) -> None:
    """The journals of all lives below `usage`, in place of those that `copies` has. Raises OSError."""
    if copies.exists():
        shutil.rmtree(copies)
    for life in sorted(usage.iterdir()) if usage.is_dir() else ():
        for number in segment_numbers(life):
            target = segment_path(copies / life.name, number)
            for folder in (copies, target.parent):
                folder.mkdir(mode=0o700, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):  # the database has it: its server removed it
                _copy_sparsely(segment_path(life, number), target)


def _copy_sparsely(source: Path, target: Path) -> None:
    """A segment is all zeros from its last record on."""
    with open_regular(source) as original, create_file(target) as copy:
        size = 0
        while data := original.read(_BLOCK):
            if data != _ZEROS[: len(data)]:
                copy.seek(size)
                write_all(copy, data)
            size += len(data)
        copy.truncate(size)
