"""How far a transfer of files is, for people at a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def transfer_bar(
    total: int, doing: str, done: str, *, is_quiet: bool
) -> Iterator[Callable[[int], None] | None]:
    """A function to call with the bytes of each piece: a bar on stderr shows them of `total`, with the words `doing`,
    and `done` at the end. None without a terminal, or where `is_quiet`."""
    if is_quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(doing, total=total)

        def note(num_bytes: int) -> None:
            progress.advance(task, num_bytes)
            if progress.finished:
                progress.update(task, description=done)

        yield note
