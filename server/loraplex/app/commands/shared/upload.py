"""Files on their way to a server."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import IO, Any

from loraplex.app.transfer_bar import transfer_bar


class _Watched:
    """A file for httpx, which sends it in pieces; `note` is called with the bytes of each."""

    def __init__(self, file: IO[bytes], note: Callable[[int], None]) -> None:
        self._file = file
        self._note = note

    def fileno(self) -> int:
        """Where httpx asks for the size."""
        return self._file.fileno()

    def read(self, num_bytes: int = -1) -> bytes:
        piece = self._file.read(num_bytes)
        self._note(len(piece))
        return piece


@contextmanager
def upload_progress(
    files: Mapping[str, IO[bytes]], *, is_quiet: bool
) -> Iterator[dict[str, tuple[str, Any]]]:
    """`files` by name, for httpx's multipart; while they are read a bar on stderr shows how far, at a terminal and not
    where `is_quiet`."""
    total = sum(os.fstat(file.fileno()).st_size for file in files.values())
    with transfer_bar(total, "uploading", "uploaded; the server is checking it", is_quiet=is_quiet) as note:
        if note is None:
            yield {name: (name, file) for name, file in files.items()}
        else:
            yield {name: (name, _Watched(file, note)) for name, file in files.items()}
