"""Files on their way to a server."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import IO, Any


class _Watched:
    """A file for httpx, which sends it in pieces; `note` is told the bytes of each."""

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
    if is_quiet or not sys.stderr.isatty():
        yield {name: (name, file) for name, file in files.items()}
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    total = sum(os.fstat(file.fileno()).st_size for file in files.values())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("uploading", total=total)

        def note(num_bytes: int) -> None:
            progress.advance(task, num_bytes)
            if progress.finished:
                progress.update(task, description="uploaded; the server is checking it")

        yield {name: (name, _Watched(file, note)) for name, file in files.items()}
