"""Cutting a file of JSON lines into parts while it arrives. No I/O here."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from loraplex.control.errors import InvalidValue

MAX_FILE_BYTES = 200_000_000
MAX_LINES = 50_000
MAX_LINE_BYTES = 4 << 20
PART_BYTES = 256 << 10
"""A part ends with the line that reaches this size."""
PART_LINES = 64
MAX_VALUE_BYTES = 8 << 10
"""The most bytes of a field that is read; of a custom_id of 512 characters as JSON they are 6,146."""
_MISSING = msgspec.Raw(b"null")
T = TypeVar("T")


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


class RequestLine(msgspec.Struct):
    """The fields of a line as JSON. None of them is read before it is asked for: values of a megabyte take a second,
    for which all others would wait."""

    custom_id: msgspec.Raw = _MISSING
    method: msgspec.Raw = _MISSING
    url: msgspec.Raw = _MISSING
    body: msgspec.Raw = _MISSING


class _Body(msgspec.Struct):
    stream: msgspec.Raw = _MISSING


_LINE, _BODY = msgspec.json.Decoder(RequestLine), msgspec.json.Decoder(_Body)


def read_line(data: bytes) -> RequestLine:
    """Raises ValueError for what is no JSON, and TypeError for what is no object."""
    return _read(_LINE, data)


def is_stream(body: bytes) -> bool:
    """Whether a request's body, a JSON object, asks for a stream. Raises as `read_line` does."""
    return bool(value_of(_read(_BODY, body).stream))


def value_of(raw: msgspec.Raw) -> Any:
    """A short value; None of a longer one, or of what is none."""
    data = bytes(raw)
    try:
        return msgspec.json.decode(data) if len(data) <= MAX_VALUE_BYTES else None
    except (ValueError, RecursionError):
        return None


def _read(decoder: msgspec.json.Decoder[T], data: bytes) -> T:
    try:
        return decoder.decode(data)
    except msgspec.ValidationError:
        raise TypeError("it is no JSON object") from None
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def _custom_id(line: bytes) -> str | None:
    """None of a line that has none; what is wrong with it is said when it is its turn."""
    try:
        found = value_of(read_line(line).custom_id)
    except (ValueError, TypeError):
        return None
    return found if isinstance(found, str) else None


def _refused(message: str) -> InvalidValue:
    return InvalidValue(message, param="file")
