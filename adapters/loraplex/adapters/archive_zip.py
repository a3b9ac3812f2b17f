"""A reader of zip archives that holds a bounded central directory and unpacks only the members it needs.

Layout: PKWARE APPNOTE.TXT 6.3.10. Sizes come from the central directory (with zip64 extra fields); the local
header must agree on name and method, members must not overlap each other or the directory.
"""

from __future__ import annotations

import os
import stat
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

from loraplex.adapters.archive_sink import MemberSink, bad_archive
from loraplex.adapters.files import read_into, shown

_MAX_DIRECTORY = 4 << 20
_CHUNK = 64 << 10
_OUT_CHUNK = 1 << 20
_ENCRYPTED = 0x0001 | 0x0040 | 0x2000
_STORED, _DEFLATED = 0, 8
_UNIX_HOSTS = (3, 19)
_END = struct.Struct("<4s4H2LH")
_END64_LOCATOR = struct.Struct("<4sLQL")
_END64 = struct.Struct("<4sQ2H2L4Q")
_CENTRAL = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")


@dataclass(frozen=True, slots=True)
class _Member:
    name: bytes
    method: int
    crc: int
    packed: int
    size: int
    offset: int


def read_zip(file: BinaryIO, sink: MemberSink) -> None:
    """Feed the wanted files of a zip to `sink`.

    Raises AdapterRefused("bad_archive") for anything damaged, encrypted, overlapping or a link.
    """
    directory_start, count, directory = _read_directory(file)
    wanted: list[tuple[str, _Member]] = []
    position = 0
    for _ in range(count):
        member, mode, position = _parse_entry(directory, position)
        if mode and not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            bad_archive(f"{shown(member.name)} is a link or a device; pack the files themselves")
        if member.name.endswith((b"/", b"\\")):
            sink.check_entry(member.name)
        elif (target := sink.claim(member.name)) is not None:
            wanted.append((target, member))
    if position != len(directory):
        bad_archive("its directory is damaged")
    last_end = 0
    for target, member in sorted(wanted, key=lambda item: item[1].offset):
        start = _data_start(file, member, directory_start)
        if member.offset < last_end or start + member.packed > directory_start:
            bad_archive("its members overlap")
        last_end = start + member.packed
        sink.expect(member.size)
        _unpack(file, start, member, target, sink)


def _read_directory(file: BinaryIO) -> tuple[int, int, bytes]:
    """Where the central directory begins, its number of entries, and its bytes."""
    size = os.fstat(file.fileno()).st_size
    tail_start = max(0, size - _END.size - 0xFFFF)
    tail = _read_at(file, tail_start, size - tail_start)
    at = len(tail)
    while True:
        at = tail.rfind(b"PK\x05\x06", 0, at)
        if at < 0:
            bad_archive("it is a zip without its directory, probably truncated")
        if len(tail) - at >= _END.size and at + _END.size + _END.unpack_from(tail, at)[7] == len(tail):
            break
    _, disk, first_disk, here, count, length, start, _ = _END.unpack_from(tail, at)
    end = tail_start + at
    if 0xFFFF in (here, count) or 0xFFFFFFFF in (length, start):
        end, here, count, length, start = _read_end64(file, end)
    if disk or first_disk or here != count:
        bad_archive("it is one part of a split zip")
    if length > _MAX_DIRECTORY:
        bad_archive(f"its directory has more than {_MAX_DIRECTORY} bytes")
    if start + length != end:
        bad_archive("its directory is damaged")
    return start, count, _read_at(file, start, length)


def _read_end64(file: BinaryIO, end: int) -> tuple[int, int, int, int, int]:
    if end < _END64_LOCATOR.size:
        bad_archive("its directory is damaged")
    locator = _read_at(file, end - _END64_LOCATOR.size, _END64_LOCATOR.size)
    magic, disk, position, disks = _END64_LOCATOR.unpack(locator)
    if magic != b"PK\x06\x07" or disk or disks > 1:
        bad_archive("its directory is damaged")
    magic, _, _, _, disk, first, here, count, length, start = _END64.unpack(
        _read_at(file, position, _END64.size)
    )
    if magic != b"PK\x06\x06" or disk or first:
        bad_archive("its directory is damaged")
    return position, here, count, length, start


def _parse_entry(directory: bytes, position: int) -> tuple[_Member, int, int]:
    """A member, its Unix file type (0: not told), and where the next entry begins."""
    if position + _CENTRAL.size > len(directory):
        bad_archive("its directory is damaged")
    fields = _CENTRAL.unpack_from(directory, position)
    (
        magic,
        made_by,
        _,
        flags,
        method,
        _,
        _,
        crc,
        packed,
        size,
        name_len,
        extra_len,
        note_len,
        disk,
        _,
        attr,
        offset,
    ) = fields
    name_at = position + _CENTRAL.size
    extra_at = name_at + name_len
    after = extra_at + extra_len + note_len
    if magic != b"PK\x01\x02" or after > len(directory) or disk not in (0, 0xFFFF):
        bad_archive("its directory is damaged")
    if flags & _ENCRYPTED:
        bad_archive("it is encrypted")
    extra = directory[extra_at : extra_at + extra_len]
    size, packed, offset = _apply_zip64(extra, size, packed, offset)
    mode = stat.S_IFMT(attr >> 16) if made_by >> 8 in _UNIX_HOSTS else 0
    return _Member(directory[name_at:extra_at], method, crc, packed, size, offset), mode, after


def _apply_zip64(extra: bytes, *fields: int) -> tuple[int, int, int]:
    """size, packed and offset, each taken from the zip64 extra field where it is marked so."""
    size, packed, offset = fields
    if 0xFFFFFFFF not in fields:
        return size, packed, offset
    position = 0
    while position + 4 <= len(extra):
        tag, length = struct.unpack_from("<2H", extra, position)
        if position + 4 + length > len(extra):
            break
        if tag == 1:
            values = struct.iter_unpack("<Q", extra[position + 4 : position + 4 + (length & ~7)])
            wide = [value for (value,) in values]
            if len(wide) >= fields.count(0xFFFFFFFF):
                size, packed, offset = (wide.pop(0) if field == 0xFFFFFFFF else field for field in fields)
                return size, packed, offset
        position += 4 + length
    bad_archive("its directory is damaged")


def _data_start(file: BinaryIO, member: _Member, directory_start: int) -> int:
    if member.offset + _LOCAL.size > directory_start:
        bad_archive("its directory is damaged")
    header = _LOCAL.unpack(_read_at(file, member.offset, _LOCAL.size))
    magic, _, flags, method, name_len, extra_len = *header[:4], *header[9:]
    start: int = member.offset + _LOCAL.size + name_len + extra_len
    if start > directory_start:
        bad_archive("its directory is damaged")
    name = _read_at(file, member.offset + _LOCAL.size, name_len)
    if magic != b"PK\x03\x04" or name != member.name or method != member.method or flags & _ENCRYPTED:
        bad_archive("its directory and its members do not agree")
    return start


def _unpack(file: BinaryIO, start: int, member: _Member, target: str, sink: MemberSink) -> None:
    if member.method == _STORED:
        pieces = _packed(file, start, member.packed)
    elif member.method == _DEFLATED:
        pieces = _inflate(_packed(file, start, member.packed))
    else:
        bad_archive(f"{target} is compressed by method {member.method}; use deflate")
    crc, left = 0, member.size
    for piece in pieces:
        left -= len(piece)
        if left < 0:
            break
        crc = zlib.crc32(piece, crc)
        sink.write(target, piece)
    if left or crc != member.crc:
        bad_archive(f"{target} in it is damaged")


def _packed(file: BinaryIO, start: int, length: int) -> Iterator[bytes]:
    for position in range(start, start + length, _CHUNK):
        yield _read_at(file, position, min(_CHUNK, start + length - position))


def _inflate(chunks: Iterator[bytes]) -> Iterator[bytes]:
    inflater = zlib.decompressobj(-zlib.MAX_WBITS)
    try:
        for chunk in chunks:
            rest = chunk
            while rest and not inflater.eof:
                yield inflater.decompress(rest, _OUT_CHUNK)
                rest = inflater.unconsumed_tail
        # All input may be taken in while output is still held back by the bound on a single call.
        while not inflater.eof and (piece := inflater.decompress(b"", _OUT_CHUNK)):
            yield piece
    except zlib.error as error:
        bad_archive(f"its data is damaged ({error})")
    if not inflater.eof:
        bad_archive("it is truncated")


def _read_at(file: BinaryIO, position: int, length: int) -> bytes:
    if position + length > os.fstat(file.fileno()).st_size:
        bad_archive("it is truncated")
    file.seek(position)
    data = bytearray(length)
    if read_into(file, memoryview(data)) < length:
        bad_archive("it is truncated")
    return bytes(data)
