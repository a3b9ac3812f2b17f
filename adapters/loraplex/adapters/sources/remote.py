"""Writing an adapter's files from a place beyond the network: sizes first, within a deadline."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from loraplex.adapters.contents.kinds import PICKLE
from loraplex.adapters.contents.places import foreign_weights
from loraplex.adapters.errors import AdapterRefused
from loraplex.adapters.sources.errors import SourceNotFound, SourceUnavailable
from loraplex.adapters.store.artifact_store import Staging
from loraplex.adapters.store.fault_points import FaultPoint
from loraplex.adapters.store.files import (
    CONFIG_NAME,
    MAX_CONFIG_BYTES,
    MLX_TENSORS_NAME,
    TENSORS_NAME,
    TOKENIZER_BYTES,
    TOKENIZER_NAME,
    UPLOAD_FILE_BYTES,
    create_file,
    disk_failures_named,
    place_in,
    write_all,
)

DEADLINE_S = 600.0
"""Seconds that all bytes of an adapter may take to come."""
_PICKLED_NAME = "adapter_model.bin"
"""The name that PEFT gives weights that it pickles."""
_MOST_BYTES = {CONFIG_NAME: MAX_CONFIG_BYTES, **UPLOAD_FILE_BYTES}


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file that has been found: its size in bytes as its place tells it, and its content."""

    size: int
    chunks: Iterator[bytes]


def find_remote(find: Callable[[str], RemoteFile]) -> dict[str, RemoteFile]:
    """An adapter's files by the names that they are stored under. `find` looks one up by its name and raises
    SourceNotFound; mlx-lm's tensors are looked for where PEFT's are missing.

    Raises SourceNotFound where one of the two is missing, AdapterRefused (not_safetensors) where there are pickled
    weights instead, and what `find` raises.
    """
    files = {CONFIG_NAME: find(CONFIG_NAME), TENSORS_NAME: _find_tensors(find)}
    for name in UPLOAD_FILE_BYTES:
        with contextlib.suppress(SourceNotFound):
            files[name] = find(name)
    if TOKENIZER_NAME in files and files[TOKENIZER_NAME].size > TOKENIZER_BYTES:
        del files[TOKENIZER_NAME]
    return files


def _find_tensors(find: Callable[[str], RemoteFile]) -> RemoteFile:
    try:
        return find(TENSORS_NAME)
    except SourceNotFound:
        with contextlib.suppress(SourceNotFound):
            return find(MLX_TENSORS_NAME)
        with contextlib.suppress(SourceNotFound):
            find(_PICKLED_NAME)
            raise foreign_weights(_PICKLED_NAME, PICKLE) from None
        raise


def write_remote(
    files: Mapping[str, RemoteFile],
    staging: Staging,
    *,
    max_bytes: int,
    reserve: Callable[[int], None],
    deadline_s: float = DEADLINE_S,
) -> None:
    """The files by their names into `staging`. `reserve` hears of their sizes before a byte is read, and may raise.

    Raises AdapterRefused (too_large), SourceUnavailable for a file that is longer or shorter than was told or that
    does not come in time, StoreFull, StoreFailed, and what `reserve` and the chunks raise.
    """
    for name, file in files.items():
        check_size(name, file.size, max_bytes)
    total = sum(file.size for file in files.values())
    check_size("the adapter", total, max_bytes)
    reserve(total)
    until = time.monotonic() + deadline_s
    for name, file in files.items():
        _write(name, file, staging, until)


def check_size(name: str, size: int, max_bytes: int) -> None:
    """Raises AdapterRefused (too_large)."""
    bound = min(max_bytes, _MOST_BYTES.get(name, max_bytes))
    if size > bound:
        raise AdapterRefused("too_large", f"In the source, {name} is larger than {bound} bytes.")


def _write(name: str, file: RemoteFile, staging: Staging, until: float) -> None:
    with disk_failures_named():
        target = place_in(staging.directory, name)
        staging.fault(FaultPoint.RECEIVE_CREATE, target)
        into = create_file(target)
    left = file.size
    with into:
        for data in file.chunks:
            left -= len(data)
            if left < 0 or time.monotonic() > until:
                break
            with disk_failures_named():
                staging.fault(FaultPoint.RECEIVE_WRITE, target)
                write_all(into, data)
    if time.monotonic() > until:
        raise SourceUnavailable(f"{name} did not come in time from its source.")
    if left:
        raise SourceUnavailable(f"{name} is not as long as its source says; try again.")
