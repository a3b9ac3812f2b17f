"""Zip archives, read by the standard library's `zipfile` after the checks that it does not make.

Layout: PKWARE APPNOTE.TXT 6.3.10. `zipfile` holds the whole central directory in memory and believes it, so the end
record and the size of the directory are checked before it sees the file, each wanted member's header before it is
opened. An archive that two readers could understand differently is refused.
"""

from __future__ import annotations

import os
import stat
import struct
import zipfile
import zlib
from typing import BinaryIO

from loraplex.adapters.archive.sink import MAX_ENTRIES, MemberSink, bad_archive
from loraplex.adapters.store.files import shown

_MAX_DIRECTORY = 4 << 20
_OUT_CHUNK = 1 << 20
_ENCRYPTED = 0x0001 | 0x0040 | 0x2000
_UTF8_NAME = 0x0800
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_UNIX_HOSTS = (3, 19)
_END_MAGIC = b"PK\x05\x06"
_END = struct.Struct("<4s4H2LH")
_END64_LOCATOR = struct.Struct("<4sLQL")
_END64 = struct.Struct("<4sQ2H2L4Q")
_ENTRY_LENGTHS = struct.Struct("<28x3H12x")
_LOCAL = struct.Struct("<4s5H3L2H")
_DAMAGED = (zipfile.BadZipFile, NotImplementedError, UnicodeDecodeError, EOFError, struct.error, zlib.error)
"""The exceptions of `zipfile` for an archive that it cannot read."""


def read_zip(file: BinaryIO, sink: MemberSink) -> None:
    """Feed the wanted files of a zip to `sink`.

    Raises AdapterRefused("bad_archive") for anything damaged, encrypted, overlapping or a link.
    """
    directory_start = _check_directory(file)
    try:
        archive = zipfile.ZipFile(file)
    except _DAMAGED:
        bad_archive("its directory is damaged")
    with archive:
        claimed = [(_claim(entry, sink), entry) for entry in archive.infolist()]
        wanted = [(target, entry) for target, entry in claimed if target is not None]
        last_end = 0
        for target, entry in sorted(wanted, key=lambda item: item[1].header_offset):
            start = _data_start(file, entry, directory_start)
            if entry.header_offset < last_end or start + entry.compress_size > directory_start:
                bad_archive("its members overlap")
            last_end = start + entry.compress_size
            if entry.compress_type not in _METHODS:
                bad_archive(f"{target} is compressed by method {entry.compress_type}; use deflate")
            if not sink.expect(target, entry.file_size):
                continue
            try:
                _unpack(archive, entry, target, sink)
            except _DAMAGED:
                bad_archive(f"{target} in it is damaged")


def _check_directory(file: BinaryIO) -> int:
    """Where the central directory begins: at most MAX_ENTRIES entries in at most `_MAX_DIRECTORY` bytes.

    The end record is searched as `zipfile` searches it; one that could be found elsewhere is refused."""
    size = os.fstat(file.fileno()).st_size
    tail_start = max(0, size - _END.size - 0xFFFF)
    tail = _read_at(file, tail_start, size - tail_start)
    at = len(tail) - _END.size
    if not (tail[at:].startswith(_END_MAGIC) and tail.endswith(b"\0\0")):
        at = tail.rfind(_END_MAGIC)
    if at < 0 or len(tail) - at < _END.size:
        bad_archive("it is a zip without its directory, probably truncated")
    _, disk, first_disk, here, count, length, start, comment = _END.unpack_from(tail, at)
    if at + _END.size + comment != len(tail):
        bad_archive("its end is damaged, or data follows it")
    end = tail_start + at
    narrow = (here, count, length, start)
    if (wide := _read_end64(file, end)) is not None:
        # A field that does not point to the wide record must agree with it.
        marks = (0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF)
        if any(a not in (mark, b) for a, b, mark in zip(narrow, wide, marks, strict=True)):
            bad_archive("its directory is damaged")
        end -= _END64.size + _END64_LOCATOR.size
        here, count, length, start = wide
    if disk or first_disk or here != count:
        bad_archive("it is one part of a split zip")
    if length > _MAX_DIRECTORY:
        bad_archive(f"its directory has more than {_MAX_DIRECTORY} bytes")
    if start + length != end:
        bad_archive("its directory is damaged")
    _check_entries(_read_at(file, start, length), count)
    return int(start)


def _check_entries(directory: bytes, count: int) -> None:
    """Follow the lengths of the entries: `zipfile` ignores their number, and accepts a last entry that is cut."""
    if count > MAX_ENTRIES:
        bad_archive(f"it has more than {MAX_ENTRIES} entries")
    position = 0
    for _ in range(count):
        if position + _ENTRY_LENGTHS.size > len(directory):
            bad_archive("its directory is damaged")
        position += _ENTRY_LENGTHS.size + sum(_ENTRY_LENGTHS.unpack_from(directory, position))
    if position != len(directory):
        bad_archive("its directory is damaged")


def _read_end64(file: BinaryIO, end: int) -> tuple[int, int, int, int] | None:
    """The entries on this disk and in all, the length and the start of the directory, from the zip64 records before
    the end record; None where there are none."""
    if end < _END64_LOCATOR.size:
        return None
    position = end - _END64_LOCATOR.size
    magic, disk, stated, disks = _END64_LOCATOR.unpack(_read_at(file, position, _END64_LOCATOR.size))
    if magic != b"PK\x06\x07":
        return None
    position -= _END64.size
    if disk or disks > 1 or stated != position or position < 0:
        bad_archive("its directory is damaged")
    magic, _, _, _, disk, first, here, count, length, start = _END64.unpack(
        _read_at(file, position, _END64.size)
    )
    if magic != b"PK\x06\x06" or disk or first:
        bad_archive("its directory is damaged")
    return here, count, length, start


def _claim(entry: zipfile.ZipInfo, sink: MemberSink) -> str | None:
    """The fixed name that the entry is to be written under, or None to skip it."""
    raw_name = entry.orig_filename.encode("utf-8" if entry.flag_bits & _UTF8_NAME else "cp437")
    if entry.flag_bits & _ENCRYPTED:
        bad_archive("it is encrypted")
    if entry.volume not in (0, 0xFFFF):
        bad_archive("it is one part of a split zip")
    mode = stat.S_IFMT(entry.external_attr >> 16) if entry.create_system in _UNIX_HOSTS else 0
    if mode and not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        bad_archive(f"{shown(raw_name)} is a link or a device; pack the files themselves")
    if raw_name.endswith((b"/", b"\\")):
        sink.check_entry(raw_name)
        return None
    return sink.claim(raw_name)


def _data_start(file: BinaryIO, entry: zipfile.ZipInfo, directory_start: int) -> int:
    """Where the member's data begins. `zipfile` compares the names in directory and header; here is the rest."""
    if entry.header_offset + _LOCAL.size > directory_start:
        bad_archive("its directory is damaged")
    _, _, flags, method, *_, name_len, extra_len = _LOCAL.unpack(
        _read_at(file, entry.header_offset, _LOCAL.size)
    )
    if method != entry.compress_type or flags & _ENCRYPTED:
        bad_archive("its directory and its members do not agree")
    return entry.header_offset + _LOCAL.size + int(name_len) + int(extra_len)


def _unpack(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, target: str, sink: MemberSink) -> None:
    left = entry.file_size
    entry.file_size += 1  # else `zipfile` cuts a member that is longer than it says
    with archive.open(entry) as member:
        while piece := member.read(_OUT_CHUNK):
            left -= len(piece)
            if left < 0:
                break
            sink.write(target, piece)
    if left:
        bad_archive(f"{target} in it is damaged")


def _read_at(file: BinaryIO, position: int, length: int) -> bytes:
    file.seek(position)
    data = file.read(length)
    if len(data) < length:
        bad_archive("it is truncated")
    return data
