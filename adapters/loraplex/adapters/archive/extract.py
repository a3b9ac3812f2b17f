"""Unpacking an uploaded archive (.tar, .tar.gz, .zip) into an adapter's two files and those of its chats.

No name from an archive is ever used as a path: what matches one of the known names goes into a fixed file,
everything else is skipped or refused. The tar reader is our own, because the standard library's holds whole extended
headers in memory; zips are read by the standard library's after the checks that it does not make.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from loraplex.adapters.admission.safetensors_header import ADAPTER_LIMITS, HeaderLimits
from loraplex.adapters.archive.sink import MemberSink, bad_archive
from loraplex.adapters.archive.tar_reader import ByteStream, read_tar
from loraplex.adapters.archive.zip_reader import read_zip
from loraplex.adapters.contents.kinds import (
    NPZ,
    PICKLE,
    SAFETENSORS,
    START_BYTES,
    TAR,
    identify,
    identify_config,
)
from loraplex.adapters.contents.places import Folder
from loraplex.adapters.errors import AdapterRefused
from loraplex.adapters.store.fault_points import Fault, no_fault
from loraplex.adapters.store.files import CONFIG_NAME, TENSORS_NAME, disk_failures_named, open_regular

_ZIP_MAGIC = (b"PK\x03\x04", b"PK\x05\x06")
_GZIP_MAGIC = b"\x1f\x8b"
_MAX_GZIP_MEMBERS = 1 << 16
_CHUNK = 64 << 10
_OUT_CHUNK = 1 << 20
_TAR_OVERHEAD = 16 << 20
"""Bytes of headers and padding that a tar may have beyond its files: MAX_ENTRIES of them with long names."""


def extract_upload(
    archive: Path,
    dest: Path,
    *,
    max_bytes: int,
    fault: Fault = no_fault,
    reserve: Callable[[int], None] = lambda num_bytes: None,
    limits: HeaderLimits = ADAPTER_LIMITS,
) -> None:
    """Write adapter_config.json and adapter_model.safetensors from `archive` into the existing folder `dest`, and the
    files of `CHAT_FILE_BYTES` that lie beside them.

    The kind is detected from the content. Both files lie at the top or in one folder of it; where there are none, in
    the one folder below that holds both (the archive is read again then). mlx-lm's adapters.safetensors stands for the
    tensors too. Other files are skipped (in a tar they count for `max_bytes`, which bounds what is unpacked). Streams
    in bounded memory, in time proportional to the bytes read and written. `reserve` hears of each file's size before it
    is written, and may raise. `limits` are those of the tensor file's header. On failure nothing is left in `dest`.

    Raises AdapterRefused: bad_archive (damaged, encrypted, ambiguous, links, devices, absolute or ".." names,
    a file missing), not_safetensors (weights of another format instead, or a file of more than 1 MiB that does not
    begin as one; it is unpacked no further), too_large. StoreFull, StoreFailed, OSError.
    """
    with disk_failures_named(), open_regular(archive) as file:
        with MemberSink(dest, max_bytes, fault, reserve, limits=limits) as sink:
            deeper = _read(file, sink, max_bytes)
        if deeper is not None:
            with MemberSink(dest, max_bytes, fault, reserve, deeper, limits) as sink:
                _read(file, sink, max_bytes)


def _read(file: BinaryIO, sink: MemberSink, max_bytes: int) -> Folder | None:
    """Read the archive into `sink`, and return what `MemberSink.finish` returns."""
    size = os.fstat(file.fileno()).st_size
    file.seek(0)
    start = file.read(START_BYTES)
    file.seek(0)
    kind = identify(start, size)
    if start.startswith(_ZIP_MAGIC):
        read_zip(file, sink)
        if sink.found_nothing and kind in (PICKLE, NPZ):
            raise AdapterRefused("not_safetensors", f"the archive is {kind}")
    elif start.startswith(_GZIP_MAGIC):
        read_tar(ByteStream(_gunzip(file), max_bytes + _TAR_OVERHEAD, sink.too_large), sink)
    else:
        # A tar of before POSIX has no signature; its first bytes are the name of a file.
        if identify_config(start, size) is SAFETENSORS:
            bad_archive(f"it is a safetensors file; upload it as {TENSORS_NAME}, beside {CONFIG_NAME}")
        if kind is not None and kind is not TAR:
            bad_archive(f"it is {kind}")
        read_tar(ByteStream(_chunks(file), max_bytes + _TAR_OVERHEAD, sink.too_large), sink)
    return sink.finish()


def _chunks(file: BinaryIO) -> Iterator[bytes]:
    while chunk := file.read(_CHUNK):
        yield chunk


def _gunzip(file: BinaryIO) -> Iterator[bytes]:
    """The content of a gzip file of one or more members, at most 1 MiB at a time."""
    rest = file.read(_CHUNK)
    try:
        for _ in range(_MAX_GZIP_MEMBERS):
            inflater = zlib.decompressobj(zlib.MAX_WBITS | 16)
            while not inflater.eof:
                rest = rest or file.read(_CHUNK)
                if not rest:
                    bad_archive("it is truncated")
                yield inflater.decompress(rest, _OUT_CHUNK)
                rest = inflater.unconsumed_tail
            rest = inflater.unused_data.lstrip(b"\0")
            while not rest:  # some writers pad with zeros
                chunk = file.read(_CHUNK)
                if not chunk:
                    return
                rest = chunk.lstrip(b"\0")
    except zlib.error as error:
        bad_archive(f"its data is damaged ({error})")
    bad_archive(f"it has more than {_MAX_GZIP_MEMBERS} gzip members")
