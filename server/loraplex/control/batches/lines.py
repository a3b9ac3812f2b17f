"""Cutting a file of JSON lines into parts while it arrives. No I/O here."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from pydantic_core import from_json

from loraplex.control.errors import InvalidValue

MAX_FILE_BYTES = 200_000_000
MAX_LINES = 50_000
MAX_LINE_BYTES = 4 << 20
PART_BYTES = 256 << 10
"""A part ends with the line that reaches this size."""
PART_LINES = 64


@dataclass(frozen=True, slots=True)
class Part:
    """Whole lines with their ends. `repeated` are the numbers of lines whose custom_id came before in the file."""

    first_line: int
    data: bytes
    repeated: tuple[int, ...]


@dataclass(slots=True)
class LineCutter:
    """Give it the file piece by piece; it returns the parts that are complete. Blank lines count as lines, and are no
    requests."""

    requests: int = 0
    """Lines so far that are not blank."""
    size: int = 0
    """Bytes so far."""
    _num_lines: int = 0
    _rest: bytearray = field(default_factory=bytearray)  # of a line that has not ended
    _lines: list[bytes] = field(default_factory=list)  # of the part that is being filled
    _lines_bytes: int = 0
    _repeated: list[int] = field(default_factory=list)
    _seen: set[bytes] = field(default_factory=set)  # digests of custom_ids

    def feed(self, data: bytes) -> list[Part]:
        """Raises InvalidValue for a file that is too large, a line that is too long, or too many of them."""
        self.size += len(data)
        if self.size > MAX_FILE_BYTES:
            raise _refused(f"The file is larger than {MAX_FILE_BYTES} bytes. Send it as several files.")
        parts: list[Part] = []
        *ended, rest = data.split(b"\n")
        for line in ended:
            parts += self._add(bytes(self._rest) + line + b"\n")
            self._rest.clear()
        self._rest += rest
        _check_length(self._num_lines + 1, len(self._rest))
        return parts

    def finish(self) -> list[Part]:
        """The last parts of a file that has ended. Raises as `feed` does, and for a file without a request."""
        parts = self._add(bytes(self._rest)) if self._rest else []
        self._rest.clear()
        if self._lines:
            parts.append(self._part())
        if not self.requests:
            raise _refused("The file holds no request: send one request as JSON in each line.")
        return parts

    def _add(self, line: bytes) -> list[Part]:
        self._num_lines += 1
        if self._num_lines > MAX_LINES:
            raise _refused(f"The file has more than {MAX_LINES} lines. Send it as several files.")
        _check_length(self._num_lines, len(line))
        self._lines.append(line)
        self._lines_bytes += len(line)
        if line.strip():
            self.requests += 1
            if (custom_id := _custom_id(line)) is not None:
                digest = hashlib.blake2b(custom_id.encode(), digest_size=16).digest()
                if digest in self._seen:
                    self._repeated.append(self._num_lines)
                self._seen.add(digest)
        is_full = len(self._lines) >= PART_LINES or self._lines_bytes >= PART_BYTES
        return [self._part()] if is_full else []

    def _part(self) -> Part:
        first = self._num_lines - len(self._lines) + 1
        part = Part(first, b"".join(self._lines), tuple(self._repeated))
        self._lines, self._repeated, self._lines_bytes = [], [], 0
        return part


def _check_length(number: int, size: int) -> None:
    if size > MAX_LINE_BYTES:
        raise _refused(f"Line {number} is longer than {MAX_LINE_BYTES} bytes.")


def _custom_id(line: bytes) -> str | None:
    """None of a line that has none; what is wrong with it is said when it is its turn."""
    try:
        request = from_json(line, allow_inf_nan=False)
    except ValueError:
        return None
    found = request.get("custom_id") if isinstance(request, dict) else None
    return found if isinstance(found, str) else None


def _refused(message: str) -> InvalidValue:
    return InvalidValue(message, param="file")
