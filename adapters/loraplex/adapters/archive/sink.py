"""The output of an archive's members: two fixed files and those of its chats, or a refusal."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, NoReturn, Self

from loraplex.adapters.admission.safetensors_header import ADAPTER_LIMITS, HeaderLimits, check_start
from loraplex.adapters.contents.kinds import START_BYTES
from loraplex.adapters.contents.places import Contents, Folder, folders_shown, weights_kind
from loraplex.adapters.errors import AdapterRefused
from loraplex.adapters.store.fault_points import Fault, FaultPoint, no_fault
from loraplex.adapters.store.files import (
    CONFIG_NAME,
    POOLED_FILE_BYTES,
    TENSORS_NAME,
    TENSORS_NAMES,
    TOKENIZER_NAME,
    UPLOAD_FILE_BYTES,
    create_file,
    place_in,
    shown,
    write_all,
)

MAX_ENTRIES = 10_000
MAX_CHAT_FILES = 16
"""Files of chats that are kept until it is known in which folder the adapter lies, and as many of
`POOLED_FILE_BYTES`."""
_MAX_NAME = 4096
_CHEAP_BYTES = 1 << 20


def bad_archive(what: str) -> NoReturn:
    raise AdapterRefused("bad_archive", f"the archive was refused: {what}")


class MemberSink:
    """Sorts the members of one archive and writes those that count into `dest`, under their fixed names. They lie at
    the top or in one folder of the top, or in `only`.

    A context manager: leaving it with an exception removes what was written.
    """

    def __init__(
        self,
        dest: Path,
        max_bytes: int,
        fault: Fault = no_fault,
        reserve: Callable[[int], None] = lambda num_bytes: None,
        only: Folder | None = None,
        limits: HeaderLimits = ADAPTER_LIMITS,
    ) -> None:
        self._dest = dest
        self._limits = limits
        self._fault = fault
        self._reserve = reserve
        self._max_bytes = max_bytes
        self._expected = 0
        self._tensors_size = 0
        self._start = b""
        self._seen: set[Folder] = set()
        self._entries = 0
        self._only = only
        self._folder = only
        self._tensors_name: str | None = None
        self._others: list[Folder] = []
        self._files: dict[str, BinaryIO] = {}
        self._chat_files: dict[str, tuple[Folder, str]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name, file in self._files.items():
            file.close()
            if error is not None:
                (self._dest / name).unlink(missing_ok=True)
        for _, leaf in self._chat_files.values() if error is not None else ():
            (self._dest / leaf).unlink(missing_ok=True)

    def check_entry(self, raw_name: bytes) -> Folder:
        """Count any entry and check its name; its parts. Raises AdapterRefused("bad_archive")."""
        self._entries += 1
        if self._entries > MAX_ENTRIES:
            bad_archive(f"it has more than {MAX_ENTRIES} entries")
        if not raw_name or len(raw_name) > _MAX_NAME or b"\0" in raw_name:
            bad_archive("an entry has no usable name")
        name = raw_name.decode("utf-8", "surrogateescape").replace("\\", "/")
        parts = tuple(part for part in name.split("/") if part not in ("", "."))
        if name.startswith("/") or ".." in parts or (parts and parts[0].endswith(":")):
            bad_archive(f"the entry {shown(name)} points outside of it")
        return parts

    def claim(self, raw_name: bytes) -> str | None:
        """Take note of a regular file: the fixed name it is to be written under, or None to skip it.

        Raises AdapterRefused("bad_archive") for a second file of that name or a second adapter.
        """
        parts = self.check_entry(raw_name)
        if not parts or parts in self._seen:
            bad_archive(f"the entry {shown('/'.join(parts))} comes twice or has no name")
        self._seen.add(parts)
        leaf, folder = parts[-1], parts[:-1]
        if "/".join(parts[-2:]) in UPLOAD_FILE_BYTES:
            leaf, folder = "/".join(parts[-2:]), parts[:-2]
        is_deeper = folder != self._only and (self._only is not None or len(folder) > 1)
        if leaf in UPLOAD_FILE_BYTES:
            return None if is_deeper else self._claim_chat_file(leaf, folder)
        if leaf != CONFIG_NAME and leaf not in TENSORS_NAMES:
            if weights_kind(leaf) is not None:
                self._others.append(parts)
            return None
        if is_deeper:
            self._others.append(parts)
            return None
        if self._folder not in (None, folder):
            both = folders_shown(sorted((self._folder or (), folder)))
            bad_archive(
                f"it holds files of an adapter in more than one folder, {both}; pack the two files of one"
            )
        self._folder = folder
        if leaf == CONFIG_NAME:
            return CONFIG_NAME
        if self._tensors_name not in (None, leaf):
            bad_archive(f"it holds {self._tensors_name} and {leaf}; pack one of them")
        self._tensors_name = leaf
        return TENSORS_NAME

    def _claim_chat_file(self, leaf: str, folder: Folder) -> str | None:
        """Claim a chat file; it counts if it lies beside the adapter's two files, which may come later."""
        of_pooling = leaf in POOLED_FILE_BYTES
        alike = sum((other in POOLED_FILE_BYTES) == of_pooling for _, other in self._chat_files.values())
        if self._folder not in (None, folder) or alike == MAX_CHAT_FILES:
            return None
        name = f"{len(self._chat_files)}-{leaf.replace('/', '-')}"
        self._chat_files[name] = (folder, leaf)
        return name

    def expect(self, name: str, size: int) -> bool:
        """Count the member of that fixed name by its declared size, before any of it is read; the readers never write
        more. False: it is to be skipped.

        Raises AdapterRefused("too_large"), and what `reserve` raises.
        """
        if name in self._chat_files:
            _, leaf = self._chat_files[name]
            if size > UPLOAD_FILE_BYTES[leaf]:
                if leaf == TOKENIZER_NAME:
                    return False
                raise AdapterRefused(
                    "too_large",
                    f"the archive's {leaf} has more than {UPLOAD_FILE_BYTES[leaf]} bytes; leave it out",
                )
        self._expected += size
        if self._expected > self._max_bytes:
            self.too_large()
        if name == TENSORS_NAME:
            self._tensors_size = size
        self._reserve(size)
        return True

    def write(self, name: str, data: bytes | memoryview) -> None:
        """Append to the file of that fixed name. Raises OSError, and AdapterRefused (not_safetensors, too_large) where
        the first bytes of a large tensor file are not those of one."""
        if not data:
            return
        if name == TENSORS_NAME and self._tensors_size > _CHEAP_BYTES and len(self._start) < START_BYTES:
            # The inspection would refuse it too, after all of it was unpacked. It tells more, so small files are left
            # to it.
            self._start += bytes(data[: START_BYTES - len(self._start)])
            if len(self._start) == START_BYTES:
                check_start(self._start, self._tensors_size, self._limits)
        path = self._dest / name
        if name not in self._files:
            self._fault(FaultPoint.UNPACK_CREATE, path)
            self._files[name] = create_file(path)
        self._fault(FaultPoint.UNPACK_WRITE, path)
        write_all(self._files[name], data)

    @property
    def found_nothing(self) -> bool:
        """Whether no member had the name of an adapter's file or of other weights."""
        return self._folder is None and not self._others

    def finish(self) -> Folder | None:
        """The deeper folder to unpack instead, where nothing lies higher and it alone holds an adapter. None: all is
        done. Refuses an archive that did not bring both files."""
        if CONFIG_NAME not in self._files or TENSORS_NAME not in self._files:
            return self._look_deeper()
        self._settle_chat_files()
        return None

    def _look_deeper(self) -> Folder:
        contents = Contents.of(self._others)
        if self._folder is None and (chosen := contents.chosen()) is not None:
            self._settle_chat_files()
            return chosen[0]
        if self._folder is None and contents.adapters:
            folders = folders_shown([folder for folder, _ in contents.adapters])
            bad_archive(f"it holds several adapters, in {folders}; pack the files of one")
        if TENSORS_NAME not in self._files:
            contents.check_format()
        lacking = CONFIG_NAME if CONFIG_NAME not in self._files else TENSORS_NAME
        bad_archive(f"it holds no {lacking} with content, at its top or in one folder")

    def _settle_chat_files(self) -> None:
        for name, (folder, leaf) in self._chat_files.items():
            path = self._dest / name
            if name in self._files and folder == self._folder:
                path.rename(place_in(self._dest, leaf))
            else:
                path.unlink(missing_ok=True)

    def too_large(self) -> NoReturn:
        raise AdapterRefused("too_large", f"the archive unpacks to more than {self._max_bytes} bytes")
