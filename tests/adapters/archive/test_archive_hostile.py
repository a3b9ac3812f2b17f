"""Archives made to harm: links, lies, bombs and damage are refused at bounded cost, and nothing is written
elsewhere."""

from __future__ import annotations

import gzip
import io
import json
import os
import struct
import subprocess
import sys
import tarfile
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loraplex.adapters.archive.extract import extract_upload
from loraplex.adapters.errors import AdapterRefused, StoreFull
from support.adapters.archives import (
    CONFIG,
    CONTENT,
    LIMIT,
    MAKERS,
    START,
    TENSORS,
    Box,
    make_tar,
    make_zip,
    tar_of,
)
from support.adapters.drafts import attempt


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Box]:
    """A folder tree in which only `dest` may change."""
    box = Box(tmp_path)
    yield box
    box.check_outside()


LINKS = {
    "symbolic link": (tarfile.SYMTYPE, "/etc/passwd"),
    "hard link": (tarfile.LNKTYPE, "../../outer/" + CONFIG),
    "device": (tarfile.CHRTYPE, ""),
    "block device": (tarfile.BLKTYPE, ""),
    "pipe": (tarfile.FIFOTYPE, ""),
    "sparse file": (tarfile.GNUTYPE_SPARSE, ""),
    "unknown": (b"Z", ""),
}


@pytest.mark.parametrize("kind", LINKS)
@pytest.mark.parametrize("name", [CONFIG, "extra"])
def test_tar_links_and_devices(box: Box, kind: str, name: str) -> None:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = LINKS[kind]
    files = [(tarfile.TarInfo(n), c) for n, c in CONTENT.items() if n != name]
    for member, content in files:
        member.size = len(content)
    assert box.refusal(tar_of((info, b""), *files)).code == "bad_archive"


def test_a_link_that_waits_in_the_destination_is_not_followed(box: Box) -> None:
    outside = box.root / "outer" / CONFIG
    box.archive.write_bytes(make_tar(CONTENT))
    (box.dest / CONFIG).symlink_to(outside)
    with pytest.raises(OSError, match="exists"):
        extract_upload(box.archive, box.dest, max_bytes=LIMIT)
    assert outside.read_bytes() == b"canary"
    (box.dest / CONFIG).unlink()


def _pax(records: bytes, kind: bytes = b"x") -> bytes:
    info = tarfile.TarInfo("header")
    info.type, info.size = kind, len(records)
    return info.tobuf(tarfile.USTAR_FORMAT) + records + bytes(-len(records) % 512)


def _record(key: str, value: str) -> bytes:
    body = f" {key}={value}\n".encode()
    length = len(body)
    while len(str(length)) + len(body) != length:
        length = len(str(length)) + len(body)
    return str(length).encode() + body


@pytest.mark.parametrize(
    "extra",
    [
        _pax(b"x" * 100),
        _pax(b"5 a=b"),
        _pax(b"0 a=b\n"),
        _pax(b"99999 a=b\n"),
        _pax(_record("size", "-5")),
        _pax(_record("size", "9" * 30)),
        _pax(_record("path", "../" + CONFIG)),
        _pax(_record("path", "")),
        _pax(_record("GNU.sparse.major", "1")),
        _pax(_record("path", "x"), b"g"),
        _pax(b"a" * (300 << 10)),
        _pax(b"a" * (300 << 10), b"L"),
    ],
)
def test_hostile_extended_headers(box: Box, extra: bytes) -> None:
    assert box.refusal(extra + make_tar(CONTENT)).code == "bad_archive"


def test_harmless_extended_headers(box: Box) -> None:
    extra = _pax(_record("comment", "from git"), b"g") + _pax(_record("LIBARCHIVE.xattr.x", "y"))
    assert box.extract(extra + make_tar(CONTENT)) == CONTENT


def test_data_behind_the_end_of_a_tar(box: Box) -> None:
    assert box.refusal(make_tar(CONTENT) + make_tar({CONFIG: b"other"})).code == "bad_archive"


def _patch_zip(content: bytes, magic: bytes, at: int, fmt: str, value: int, skip: int = 0) -> bytes:
    patched = bytearray(content)
    position = -1
    for _ in range(skip + 1):
        position = patched.index(magic, position + 1)
    struct.pack_into(fmt, patched, position + at, value)
    return bytes(patched)


def _zip64_cut() -> bytes:
    """The directory's zip64 field ends before it should."""
    info = zipfile.ZipInfo(CONFIG)
    info.extra = struct.pack("<2H5s", 1, 8, b"short")
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr(info, CONTENT[CONFIG])
    return _patch_zip(out.getvalue(), b"PK\x01\x02", 24, "<L", 0xFFFFFFFF)


CENTRAL, LOCAL, END = b"PK\x01\x02", b"PK\x03\x04", b"PK\x05\x06"
STORED = make_zip(CONTENT, zipfile.ZIP_STORED)
ZIPS: dict[str, bytes] = {
    "encrypted": _patch_zip(STORED, CENTRAL, 8, "<H", 1),
    "encrypted in the local header only": _patch_zip(STORED, LOCAL, 6, "<H", 1),
    "a symbolic link": _patch_zip(
        _patch_zip(STORED, CENTRAL, 38, "<L", 0xA1FF0000), CENTRAL, 4, "<H", 3 << 8
    ),
    "an unknown method": _patch_zip(_patch_zip(STORED, CENTRAL, 10, "<H", 99), LOCAL, 8, "<H", 99),
    "methods that differ": _patch_zip(STORED, CENTRAL, 10, "<H", 8),
    "names that differ": _patch_zip(STORED, LOCAL, 30, "<B", ord("b")),
    "a wrong checksum": _patch_zip(STORED, CENTRAL, 16, "<L", 1),
    "a size too small": _patch_zip(STORED, CENTRAL, 24, "<L", 3),
    "a size too large": _patch_zip(STORED, CENTRAL, 24, "<L", 300),
    "packed into the next member": _patch_zip(STORED, CENTRAL, 20, "<L", 300),
    "two members on the same data": _patch_zip(STORED, CENTRAL, 42, "<L", 0, skip=1),
    "an offset outside": _patch_zip(STORED, CENTRAL, 42, "<L", 0x7FFFFFFF),
    "marked zip64 without the field": _patch_zip(STORED, CENTRAL, 42, "<L", 0xFFFFFFFF),
    "marked zip64 with a field that is cut short": _zip64_cut(),
    "a directory elsewhere": _patch_zip(STORED, END, 16, "<L", 5),
    "a directory too long": _patch_zip(STORED, END, 12, "<L", 0x7FFFFFF0),
    "more entries than there are": _patch_zip(_patch_zip(STORED, END, 10, "<H", 3), END, 8, "<H", 3),
    "fewer entries than there are": _patch_zip(_patch_zip(STORED, END, 10, "<H", 1), END, 8, "<H", 1),
    "a part of several": _patch_zip(STORED, END, 4, "<H", 1),
    "marked zip64 without a locator": _patch_zip(STORED, END, 16, "<L", 0xFFFFFFFF),
    "bytes before it": b"PK\x03\x04" + STORED,
    "bytes behind it": STORED + b"x",
}


@pytest.mark.parametrize("case", ZIPS)
def test_hostile_zips(box: Box, case: str) -> None:
    assert box.extract(STORED) == CONTENT
    assert box.refusal(ZIPS[case]).code == "bad_archive"


def _with_end64(content: bytes, count: int = 2) -> bytes:
    """With zip64 records that tell of `count` entries, before the end record."""
    end = content.rfind(END)
    length, start = struct.unpack_from("<LL", content, end + 12)
    end64 = struct.pack("<4sQ2H2L4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, length, start)
    return content[:end] + end64 + struct.pack("<4sLQL", b"PK\x06\x07", 0, end, 1) + content[end:]


def _with_comment(content: bytes, comment: bytes) -> bytes:
    return content[:-2] + struct.pack("<H", len(comment)) + comment


AMBIGUOUS: dict[str, bytes] = {
    "an end record in the comment": _with_comment(STORED, STORED[-22:] + b"x"),
    "a comment longer than the file": _patch_zip(STORED, END, 20, "<H", 7),
    "a wide record that the end record does not point to": _with_end64(
        _patch_zip(STORED, END, 8, "<L", 1 << 16 | 1)
    ),
    "a wide record elsewhere": _patch_zip(_with_end64(STORED), b"PK\x06\x07", 8, "<Q", 5),
    "a wide record without its magic": _patch_zip(_with_end64(STORED), b"PK\x06\x06", 0, "<B", 0),
    "a last entry that reaches beyond the directory": _patch_zip(STORED, CENTRAL, 32, "<H", 9, skip=1),
    "a member that is longer than it says": _patch_zip(
        _patch_zip(make_zip(CONTENT), CENTRAL, 24, "<L", 2),
        CENTRAL,
        16,
        "<L",
        zlib.crc32(CONTENT[CONFIG][:2]),
    ),
    "a name that is no UTF-8": _patch_zip(
        _patch_zip(make_zip(CONTENT | {"\N{SNOWMAN}": b""}), CENTRAL, 46, "<B", 0xFF, skip=2),
        LOCAL,
        30,
        "<B",
        0xFF,
        skip=2,
    ),
    "a patch": _patch_zip(STORED, CENTRAL, 8, "<H", 0x20),
    "a version of the far future": _patch_zip(STORED, CENTRAL, 6, "<B", 200),
}


@pytest.mark.parametrize("case", AMBIGUOUS)
def test_zips_that_readers_understand_differently(box: Box, case: str) -> None:
    assert box.refusal(AMBIGUOUS[case]).code == "bad_archive"


def test_zips_with_a_comment_or_an_unneeded_wide_record(box: Box) -> None:
    assert box.extract(_with_comment(STORED, b"9fceb02d0ae598e95dc970b74767f19372d61af8")) == CONTENT
    assert box.extract(_with_end64(STORED)) == CONTENT


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_zip_methods_that_only_the_standard_library_reads(box: Box, method: int) -> None:
    assert "use deflate" in box.refusal(make_zip(CONTENT, method)).message


def test_a_directory_of_more_entries_than_it_says(box: Box) -> None:
    entry = struct.pack("<4s6H3L5H2L", CENTRAL, *[0] * 16)
    for stated in (1, 90_000 & 0xFFFF):
        end = struct.pack("<4s4H2LH", END, 0, 0, stated, stated, 90_000 * len(entry), 4, 0)
        assert box.refusal(LOCAL + entry * 90_000 + end).code == "bad_archive"


def test_a_deflate_stream_longer_than_it_says(box: Box) -> None:
    honest = make_zip({CONFIG: b"{}" + bytes(50_000), TENSORS: b"x"})
    assert box.refusal(_patch_zip(honest, CENTRAL, 24, "<L", 2)).code == "bad_archive"


def test_members_that_overlap_though_each_is_right_by_itself(box: Box) -> None:
    data = STORED.index(CONTENT[CONFIG])
    spanning = STORED[
        data : data + 300
    ]  # the first member's data, the second one's header and some of its data
    patched = _patch_zip(STORED, CENTRAL, 16, "<L", zlib.crc32(spanning))
    patched = _patch_zip(_patch_zip(patched, CENTRAL, 20, "<L", 300), CENTRAL, 24, "<L", 300)
    assert "overlap" in box.refusal(patched).message


def _zip_with_a_giant_directory() -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for i in range(1000):
            info = zipfile.ZipInfo(f"f{i}")
            info.comment = bytes(65_000)
            archive.writestr(info, b"")
    return out.getvalue()


BOMBS: dict[str, Callable[[], bytes]] = {
    "zip": lambda: make_zip({CONFIG: b"{}", TENSORS: bytes(300 << 20)}),
    "zip that lies": lambda: _patch_zip(
        make_zip({TENSORS: bytes(300 << 20), CONFIG: b"{}"}), CENTRAL, 24, "<L", 900_000
    ),
    "tar.gz": lambda: gzip.compress(make_tar({CONFIG: b"{}", TENSORS: bytes(300 << 20)}), 9),
    "tar.gz with a skipped giant": lambda: gzip.compress(make_tar({"x": bytes(300 << 20)} | CONTENT), 9),
    "tar.gz with zeros behind its end": lambda: gzip.compress(make_tar(CONTENT) + bytes(300 << 20), 9),
    "tar.gz with a giant extended header": lambda: gzip.compress(_pax(bytes(300 << 20)), 9),
    "tar with a lying size": lambda: (
        make_tar({CONFIG: b"{}"})[:1024] + _pax(_record("size", str(1 << 50))) + make_tar({TENSORS: b"x"})
    ),
    "gzip with a giant name": lambda: b"\x1f\x8b\x08\x08" + bytes(6) + b"n" * (64 << 20),
    "zip with many more entries than it says": lambda: (
        b"PK\x03\x04"
        + (entry := struct.pack("<4s6H3L5H2L", CENTRAL, *[0] * 16)) * 90_000
        + struct.pack("<4s4H2LH", END, 0, 0, 1, 1, 90_000 * len(entry), 4, 0)
    ),
    "zip with a giant directory": _zip_with_a_giant_directory,
}

_EXTRACT = """
import json, sys
from pathlib import Path
from loraplex.adapters.archive.extract import extract_upload
from loraplex.adapters.errors import AdapterRefused
def peak_kib():
    return int(Path('/proc/self/status').read_text().partition('VmHWM:')[2].split()[0])

before = peak_kib()
code = None
try:
    extract_upload(Path(sys.argv[1]), Path(sys.argv[2]), max_bytes=1_000_000)
except AdapterRefused as refusal:
    code = refusal.code
print(json.dumps([code, peak_kib() - before]))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("bomb", BOMBS)
def test_bombs_cost_bounded_memory_and_time(box: Box, bomb: str) -> None:
    box.archive.write_bytes(BOMBS[bomb]())
    command = [sys.executable, "-c", _EXTRACT, str(box.archive), str(box.dest)]
    begin = time.perf_counter()
    code, grown_kib = json.loads(subprocess.run(command, check=True, capture_output=True, timeout=60).stdout)
    assert code in ("too_large", "bad_archive")
    assert grown_kib < 32 * 1024
    assert time.perf_counter() - begin < 30
    assert list(box.dest.iterdir()) == []


def test_a_small_bomb_stops_at_the_limit(box: Box) -> None:
    for content in (
        make_zip({CONFIG: b"{}", TENSORS: bytes(20 << 20)}),
        make_tar({CONFIG: b"{}", TENSORS: bytes(20 << 20)}, "w:gz"),
        make_tar({"other": bytes(20 << 20)} | CONTENT, "w:gz"),
    ):
        assert box.refusal(content).code == "too_large"


def test_a_full_disk_leaves_nothing(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    import resource

    box.archive.write_bytes(make_tar(CONTENT))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
    try:
        with pytest.raises(StoreFull):
            extract_upload(box.archive, box.dest, max_bytes=LIMIT)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(box.dest.iterdir()) == []


SMALL = {CONFIG: b'{"peft_type": "LORA"}', TENSORS: bytes(range(256)) * 3, "README.md": b"hello"}
SEEDS = {name: maker(SMALL) for name, maker in MAKERS.items()}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_fuzz_changed_bytes_are_refused_or_harmless(box: Box, data: st.DataObject) -> None:
    content = bytearray(SEEDS[data.draw(st.sampled_from(sorted(SEEDS)))])
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, max(0, len(content) - 1)))
        action = data.draw(st.sampled_from(["set", "cut", "copy"]))
        if action == "set":
            content[at : at + 1] = data.draw(st.binary(min_size=1, max_size=4))
        elif action == "cut":
            del content[at : at + data.draw(st.integers(1, 600))]
        else:
            content[at:at] = content[: data.draw(st.integers(1, 600))]
    outcome = attempt(box.extract, bytes(content), LIMIT)
    if isinstance(outcome, AdapterRefused):
        assert outcome.code in ("bad_archive", "too_large", "not_safetensors")
        assert list(box.dest.iterdir()) == []
    else:
        assert outcome.keys() == {CONFIG, TENSORS}
    box.check_outside()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    head=st.sampled_from([b"", b"PK\x03\x04", b"PK\x05\x06", b"\x1f\x8b\x08\x00"]),
    body=st.binary(max_size=2000),
    packed=st.booleans(),
)
def test_fuzz_any_bytes_are_refused(box: Box, head: bytes, body: bytes, packed: bool) -> None:
    content = gzip.compress(body) if packed else head + body
    assert box.refusal(content).code in ("bad_archive", "too_large")


def test_deflate_output_held_back_by_the_bound_is_not_lost(box: Box) -> None:
    """The last input bytes of a raw deflate stream can stand for more than one bounded call gives out."""
    for size in (*range(1 << 20, (1 << 20) + 4096, 97), 5 << 20):
        raw = START + bytes(size)
        files = {CONFIG: b"{}", TENSORS: raw}
        assert box.extract(make_zip(files), limit=10 << 20)[TENSORS] == raw
        assert box.extract(make_tar(files, "w:gz"), limit=10 << 20)[TENSORS] == raw
    assert zlib.crc32(raw) == zlib.crc32((box.dest / TENSORS).read_bytes())
    assert os.listdir(box.dest)
