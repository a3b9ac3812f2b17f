"""The files of an adapter in a directory of this machine, looked at before they are sent."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from loraplex.adapters.contents.kinds import START_BYTES, identify, identify_config
from loraplex.adapters.contents.places import Contents, Folder, folders_shown
from loraplex.adapters.errors import AdapterRefused
from loraplex.adapters.store.files import (
    CONFIG_NAME,
    TENSORS_NAME,
    TENSORS_NAMES,
    TOKENIZER_BYTES,
    TOKENIZER_NAME,
    UPLOAD_FILE_BYTES,
)
from loraplex.app.commands.shared.errors import CommandFailed

_WANTED = f"DIR must hold {CONFIG_NAME} and {TENSORS_NAME}, as PEFT's save_pretrained writes them."


def open_adapter(directory: Path, stack: contextlib.ExitStack) -> tuple[Path, dict[str, IO[bytes]]]:
    """The adapter's own directory, which may lie in `directory`, and its open files by the names of an upload. mlx-lm's
    tensors count as PEFT's. Raises CommandFailed where there is no adapter, or more than one, and for a file that is
    something else, with what it is."""
    folder, tensors_name = _find(directory)
    files = {
        name: _open(folder / own_name, stack)
        for name, own_name in ((CONFIG_NAME, CONFIG_NAME), (TENSORS_NAME, tensors_name))
    }
    for name in UPLOAD_FILE_BYTES:
        with contextlib.suppress(CommandFailed):
            files[name] = _open(folder / name, stack)
    tokenizer = files.get(TOKENIZER_NAME)
    if tokenizer is not None and os.fstat(tokenizer.fileno()).st_size > TOKENIZER_BYTES:
        del files[TOKENIZER_NAME]
    for name, look in ((CONFIG_NAME, identify_config), (TENSORS_NAME, identify)):
        file = files[name]
        kind = look(file.read(START_BYTES), os.fstat(file.fileno()).st_size)
        file.seek(0)
        if kind is not None:
            raise CommandFailed(f"{file.name} is {kind}")
    return folder, files


def _find(directory: Path) -> tuple[Path, str]:
    contents = Contents.of(_files_of(directory))
    own = next((name for folder, name in contents.adapters if not folder), None)
    if own is not None:
        return directory, own
    try:
        contents.check_format()
    except AdapterRefused as refusal:
        raise CommandFailed(f"{directory}: {refusal.message}") from refusal
    if (chosen := contents.chosen()) is not None:
        return directory.joinpath(*chosen[0]), chosen[1]
    if contents.adapters:
        folders = folders_shown([folder for folder, _ in contents.adapters])
        raise CommandFailed(
            f"{directory} holds several adapters, in {folders}; give the directory of one as DIR."
        )
    return directory, TENSORS_NAME


def _files_of(directory: Path) -> Iterator[Folder]:
    """Its files, and an adapter's files of the directories in it."""
    try:
        for entry in sorted(directory.iterdir()):
            if not entry.is_dir():
                yield (entry.name,)
                continue
            with contextlib.suppress(OSError):
                yield from ((entry.name, n) for n in (CONFIG_NAME, *TENSORS_NAMES) if (entry / n).is_file())
    except OSError as error:
        raise CommandFailed(f"{directory}: {error.strerror}.") from error


def _open(path: Path, stack: contextlib.ExitStack) -> IO[bytes]:
    try:
        return stack.enter_context(open(path, "rb"))
    except OSError as error:
        raise CommandFailed(f"{path}: {error.strerror}. {_WANTED}") from error
