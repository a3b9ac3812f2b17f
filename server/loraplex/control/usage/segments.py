"""Files of the usage journal: of one size, written over from the front, deleted as wholes."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass
from pathlib import Path

import structlog

from loraplex.control.usage.records import MAX_RECORD_BYTES, Record, decode_all

SEGMENT_BYTES = 4 << 20
READ_BYTES = 256 << 10
_ZEROS = bytes(64 << 10)
log = structlog.get_logger("loraplex")


@dataclass(frozen=True, slots=True, order=True)
class Position:
    """A place in a journal: the segment's number, and an offset in bytes."""

    segment: int
    offset: int


def segment_path(directory: Path, number: int) -> Path:
    return directory / f"{number:010}.segment"


def segment_numbers(directory: Path) -> list[int]:
    """Numbers of the segments that exist, the oldest first."""
    return sorted(int(path.stem) for path in directory.glob("*.segment") if path.stem.isdigit())


def sync_directory(directory: Path) -> None:
    """The names in it are on the disk when this returns. Raises OSError."""
    fd = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class Segment:
    """A file that records are appended to. Its bytes are taken from the disk when it is made, so that what is written
    into it later can't fail for want of room, and a sync has no sizes to write."""

    def __init__(self, directory: Path, number: int, size: int) -> None:
        """Raises OSError; then the file is not there."""
        self.number = number
        self.size = size
        self.used = 0
        self._path = segment_path(directory, number)
        # A try that cannot succeed would fill the disk for its time, and the database may write on the same one.
        disk = os.statvfs(directory)
        if disk.f_bavail * disk.f_frsize < size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            left = size
            while left:
                left -= os.write(self._fd, _ZEROS[:left])
            os.fsync(self._fd)
            sync_directory(directory)
        except OSError:
            os.close(self._fd)
            self._path.unlink(missing_ok=True)
            raise

    @property
    def room(self) -> int:
        return self.size - self.used

    def append(self, data: bytes | bytearray) -> None:
        """Written to the system, which keeps it though this process is killed. Raises OSError."""
        view = memoryview(data)
        while view:
            written = os.pwrite(self._fd, view, self.used)
            self.used += written
            view = view[written:]

    def sync(self) -> None:
        """Appended records are on the disk when this returns. Raises OSError; then the content of the disk is
        unknown."""
        os.fdatasync(self._fd)

    def close(self) -> None:
        os.close(self._fd)


def trim_segments(directory: Path) -> int:
    """Give back what nothing was written into, of a journal that is not appended to any more; how many bytes. Needs no
    room. Raises OSError."""
    freed = 0
    for number in segment_numbers(directory):
        path = segment_path(directory, number)
        size = path.stat().st_size
        # A record's last bytes may be zeros, too.
        end = min(size, _written(path, size) + MAX_RECORD_BYTES)
        if end < size:
            os.truncate(path, end)
            freed += size - end
    return freed


def _written(path: Path, size: int) -> int:
    """The bytes up to the last one that is not zero."""
    with open(path, "rb") as file:
        end = size
        while end:
            begin = max(0, end - len(_ZEROS))
            file.seek(begin)
            found = len(file.read(end - begin).rstrip(b"\0"))
            if found:
                return begin + found
            end = begin
    return 0


def read_records(
    directory: Path, position: Position, upto: Position | None = None
) -> tuple[list[Record], Position | None]:
    """Some records from `position` on, those before `upto` (None: whatever is whole), and where to read on; None
    where that is the end. What is damaged is passed over, with an error in the log if something whole comes behind it;
    at the end it was torn by a power cut, and no answer depended on it. Raises OSError."""
    numbers = [number for number in segment_numbers(directory) if number >= position.segment]
    if not numbers:
        return [], None
    number = numbers[0]
    end = offset = position.offset if number == position.segment else 0
    last = upto is not None and number >= upto.segment
    records: list[Record] = []
    path = segment_path(directory, number)
    with open(path, "rb") as file:
        while True:
            file.seek(offset)
            data = file.read(
                READ_BYTES if not last or upto is None else max(0, min(READ_BYTES, upto.offset - offset))
            )
            for record, record_begin, record_end in decode_all(data):
                if offset + record_begin > end:
                    lost = offset + record_begin - end
                    log.error("usage_journal_damaged", file=str(path), offset=end, lost_bytes=lost)
                records.append(record)
                end = offset + record_end
            if records:
                return records, Position(number, end)
            if len(data) < READ_BYTES:
                return [], None if last or len(numbers) == 1 else Position(numbers[1], 0)
            offset += READ_BYTES - MAX_RECORD_BYTES  # a record may begin in what was read and end behind it
