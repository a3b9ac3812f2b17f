"""Archives byte by byte: what no honest program writes."""

from __future__ import annotations

import struct
import tarfile

from support.adapters.archives import TENSORS

BLOCK = 512
"""Of a tar archive."""
ZIP_FIELDS = (
    (b"PK\x03\x04", 8, 2),
    (b"PK\x03\x04", 18, 4),
    (b"PK\x03\x04", 22, 4),
    (b"PK\x03\x04", 26, 2),
    (b"PK\x01\x02", 10, 2),
    (b"PK\x01\x02", 20, 4),
    (b"PK\x01\x02", 24, 4),
    (b"PK\x01\x02", 30, 2),
    (b"PK\x01\x02", 42, 4),
    (b"PK\x05\x06", 8, 2),
    (b"PK\x05\x06", 10, 2),
    (b"PK\x05\x06", 12, 4),
    (b"PK\x05\x06", 16, 4),
    (b"PK\x05\x06", 20, 2),
)
"""Methods, sizes, lengths, counts and offsets of a zip: magic of the record, offset in it, bytes."""


def tar_member(name: str, size: int) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.size = size
    return member


def pax_record(key: str, value: str) -> bytes:
    text = f" {key}={value}\n".encode()
    size = len(text) + 1
    while len(str(size)) + len(text) != size:
        size = len(str(size)) + len(text)
    return str(size).encode() + text


def raw_member(
    name: str, data: bytes, kind: bytes, *, size: int | None = None, field: bytes | None = None
) -> bytes:
    """A tar member whose header says what we like, with a checksum that is right."""
    told = len(data) if size is None else size
    number = (
        field
        if field is not None
        else (b"%011o\0" % told if told < 8**11 else b"\x80" + told.to_bytes(11, "big"))
    )
    head = bytearray(BLOCK)
    head[: len(name)] = name.encode()
    head[100:124] = b"0000644\0" + b"0000000\0" * 2
    head[124:136] = number
    head[136:148] = b"00000000000\0"
    head[148:156] = b" " * 8
    head[156:157] = kind
    head[257:265] = b"ustar\x0000"
    head[148:156] = b"%06o\0 " % sum(head)
    return bytes(head) + data + bytes(-len(data) % BLOCK)


def zip64(size: int, cut: int = 0) -> bytes:
    """A zip of one member whose zip64 field says `size`; `cut` bytes of the field are missing."""
    name = TENSORS.encode()
    field = struct.pack("<QQ", size, size)
    extra = struct.pack("<HH", 1, len(field)) + field[: len(field) - cut]
    local = struct.pack(
        "<4s5H3I2H", b"PK\x03\x04", 45, 0, 0, 0, 0, 0, 0xFFFFFFFF, 0xFFFFFFFF, len(name), len(extra)
    )
    middle = struct.pack("<6H3I", 45, 45, 0, 0, 0, 0, 0, 0xFFFFFFFF, 0xFFFFFFFF)
    entry = b"PK\x01\x02" + middle + struct.pack("<5H2I", len(name), len(extra), 0, 0, 0, 0, 0)
    body = local + name + extra + b"data"
    directory = entry + name + extra
    return body + directory + struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, 1, 1, len(directory), len(body), 0)
