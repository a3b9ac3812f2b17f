"""A streaming reader of tar archives (POSIX ustar and pax, GNU long names) in bounded memory.

Layout: IEEE Std 1003.1, "pax", ustar interchange format; GNU tar manual, "Basic Tar Format".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from loraplex.adapters.archive.sink import MemberSink, bad_archive

_BLOCK = 512
_MAX_EXTENDED = 256 << 10
_REGULAR = (b"0", b"\0", b"7")
_LINKS_AND_DEVICES = {
    b"1": "a hard link",
    b"2": "a symbolic link",
    b"3": "a device",
    b"4": "a device",
    b"6": "a pipe",
}


class ByteStream:
    """Bytes from chunks, by count. Reading past `limit` calls `on_limit`, which raises."""

    def __init__(self, chunks: Iterator[bytes], limit: int, on_limit: Callable[[], None]) -> None:
        self._chunks = chunks
        self._rest = memoryview(b"")
        self._left = limit
        self._on_limit = on_limit

    def pieces(self, count: int) -> Iterator[memoryview]:
        """Exactly `count` bytes, piece by piece. Raises AdapterRefused when the stream ends before."""
        while count:
            piece = self._next(count)
            if not piece:
                bad_archive("it is truncated")
            count -= len(piece)
            yield piece

    def read_exactly(self, count: int) -> bytes:
        return b"".join(self.pieces(count))

    def skip(self, count: int) -> None:
        for _ in self.pieces(count):
            pass

    def drain(self) -> Iterator[memoryview]:
        """All that is left."""
        while piece := self._next(self._left + 1):
            yield piece

    def _next(self, count: int) -> memoryview:
        while not self._rest:
            chunk = next(self._chunks, None)
            if chunk is None:
                return self._rest
            self._rest = memoryview(chunk)
        piece, self._rest = self._rest[:count], self._rest[count:]
        self._left -= len(piece)
        if self._left < 0:
            self._on_limit()
        return piece


def read_tar(stream: ByteStream, sink: MemberSink) -> None:
    """Feed the regular files of a tar to `sink`, to the end of the stream.

    Raises AdapterRefused("bad_archive") for anything damaged, for links, devices and sparse files.
    """
    long_name: bytes | None = None
    long_size: int | None = None
    while True:
        block = stream.read_exactly(_BLOCK)
        if not any(block):
            break
        _check_sum(block)
        size = _number(block[124:136])
        kind = block[156:157]
        if kind in (b"x", b"g", b"L", b"K"):
            sink.check_entry(b"extended header")
            payload = _extended(stream, size)
            if kind == b"L":
                long_name = payload.split(b"\0", 1)[0]
            elif kind == b"x":
                long_name, long_size = _pax(payload, long_name)
            elif kind == b"g" and _pax(payload, None) != (None, None):
                bad_archive("a global header renames or resizes its entries")
            continue
        name = long_name if long_name is not None else _short_name(block)
        size = long_size if long_size is not None else size
        long_name = long_size = None
        if kind in _LINKS_AND_DEVICES:
            bad_archive(f"it holds {_LINKS_AND_DEVICES[kind]}; pack the files themselves")
        if kind == b"5" or (kind in _REGULAR and name.endswith(b"/")):
            sink.check_entry(name)
            stream.skip(_padded(size))
        elif kind in _REGULAR:
            _read_member(stream, sink, name, size)
        else:
            bad_archive("it holds an entry of an unsupported type")
    if any(bytes(piece).count(0) != len(piece) for piece in stream.drain()):
        bad_archive("data follows its end")


def _read_member(stream: ByteStream, sink: MemberSink, name: bytes, size: int) -> None:
    target = sink.claim(name)
    if target is None or not sink.expect(target, size):
        stream.skip(_padded(size))
        return
    for piece in stream.pieces(size):
        sink.write(target, piece)
    stream.skip(_padded(size) - size)


def _extended(stream: ByteStream, size: int) -> bytes:
    if size > _MAX_EXTENDED:
        bad_archive(f"an extended header has more than {_MAX_EXTENDED} bytes")
    payload = stream.read_exactly(size)
    stream.skip(_padded(size) - size)
    return payload


def _pax(payload: bytes, name: bytes | None) -> tuple[bytes | None, int | None]:
    """The `path` (else `name`) and `size` records of "<length> <key>=<value>\\n" records."""
    size: int | None = None
    position = 0
    while position < len(payload):
        digits, space, _ = payload[position : position + 8].partition(b" ")
        length = int(digits) if space and digits.isdigit() else 0
        record = payload[position : position + length]
        key, equals, value = record[len(digits) + 1 : -1].partition(b"=")
        if not equals or len(record) != length or not record.endswith(b"\n"):
            bad_archive("an extended header is damaged")
        if key.startswith(b"GNU.sparse"):
            bad_archive("it holds a sparse file")
        if key == b"path":
            name = value
        elif key == b"size":
            if not value.isdigit() or len(value) > 18:
                bad_archive("an extended header gives a bad size")
            size = int(value)
        position += length
    return name, size


def _short_name(block: bytes) -> bytes:
    name = block[:100].split(b"\0", 1)[0]
    prefix = block[345:500].split(b"\0", 1)[0] if block[257:263] == b"ustar\0" else b""
    return prefix + b"/" + name if prefix else name


def _check_sum(block: bytes) -> None:
    stated = _number(block[148:156])
    blanked = block[:148] + b" " * 8 + block[156:]
    total = sum(blanked)
    # Some old writers summed signed bytes.
    if stated not in (total, total - 256 * sum(byte > 127 for byte in blanked)):
        bad_archive("it is no tar archive, or a header in it is damaged")


def _number(field: bytes) -> int:
    if field[0] == 0x80:  # GNU's base-256, for sizes beyond eight octal gigabytes
        return int.from_bytes(field[1:], "big")
    digits = field.strip(b" \0")
    if not digits.isdigit() or b"8" in digits or b"9" in digits:
        bad_archive("it is no tar archive, or a header in it is damaged")
    return int(digits, 8)


def _padded(size: int) -> int:
    return -(-size // _BLOCK) * _BLOCK
