"""Archives: the two files come out, everything hostile is refused, nothing is written elsewhere."""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import stat
import struct
import subprocess
import sys
import tarfile
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loraplex.adapters.archive import extract_upload
from loraplex.adapters.archive_sink import MAX_ENTRIES
from loraplex.adapters.errors import AdapterRefused, StoreFull
from support.adapters import attempt

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
CONTENT = {CONFIG: b'{"peft_type": "LORA"}', TENSORS: random.Random(0).randbytes(3000) + bytes(100_000)}
LIMIT = 1_000_000
Files = dict[str, bytes]


def make_tar(files: Files, mode: str = "w", fmt: int = tarfile.PAX_FORMAT) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode=mode, format=fmt) as tar:  # type: ignore[call-overload]
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return out.getvalue()


def tar_of(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for info, content in members:
            tar.addfile(info, io.BytesIO(content))
    return out.getvalue()


def make_zip(files: Files, method: int = zipfile.ZIP_DEFLATED, **options: Any) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method, **options) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return out.getvalue()


MAKERS: dict[str, Callable[[Files], bytes]] = {
    "tar (pax)": make_tar,
    "tar (gnu)": lambda files: make_tar(files, fmt=tarfile.GNU_FORMAT),
    "tar (ustar)": lambda files: make_tar(files, fmt=tarfile.USTAR_FORMAT),
    "tar.gz": lambda files: make_tar(files, "w:gz"),
    "zip": make_zip,
    "zip (stored)": lambda files: make_zip(files, zipfile.ZIP_STORED),
}


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Box]:
    """A folder tree in which only `dest` may change."""
    box = Box(tmp_path)
    yield box
    box.check_outside()


class Box:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.dest = root / "outer" / "dest"
        self.dest.mkdir(parents=True)
        self.archive = root / "upload"
        self.canary = root / "outer" / CONFIG
        self.canary.write_bytes(b"canary")

    def check_outside(self) -> None:
        assert self.canary.read_bytes() == b"canary"
        assert {p.name for p in self.root.iterdir()} == {"outer", "upload"}
        assert {p.name for p in self.dest.parent.iterdir()} == {"dest", CONFIG}
        assert {p.name for p in self.dest.iterdir()} <= {CONFIG, TENSORS}
        assert all(stat.S_ISREG(p.lstat().st_mode) for p in self.dest.iterdir())

    def extract(self, content: bytes, limit: int = LIMIT) -> Files:
        self.archive.write_bytes(content)
        for leftover in self.dest.iterdir():
            leftover.unlink()
        extract_upload(self.archive, self.dest, max_bytes=limit)
        return {path.name: path.read_bytes() for path in self.dest.iterdir()}

    def refusal(self, content: bytes, limit: int = LIMIT) -> AdapterRefused:
        with pytest.raises(AdapterRefused) as caught:
            self.extract(content, limit)
        assert caught.value.message.isascii()
        assert list(self.dest.iterdir()) == []
        return caught.value


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("folder", ["", "./", "my-adapter/", "./my-adapter/"])
def test_the_two_files_come_out(box: Box, maker: str, folder: str) -> None:
    files = {folder + name: content for name, content in CONTENT.items()}
    files |= {
        folder + "README.md": b"# hi",
        folder + "runs/checkpoint-5/" + CONFIG: b"other",
        "__MACOSX/._x": b"x",
    }
    assert box.extract(MAKERS[maker](files)) == CONTENT
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in box.dest.iterdir())


def test_the_programs_people_pack_with(box: Box) -> None:
    source = box.dest / "x"
    source.mkdir()
    for name, content in CONTENT.items():
        (source / name).write_bytes(content)
    made = subprocess.run(
        ["tar", "-C", str(box.dest), "-czf", "-", "x"], check=True, capture_output=True
    ).stdout
    for path in source.iterdir():
        path.unlink()
    source.rmdir()
    assert box.extract(made) == CONTENT


@pytest.mark.parametrize("fmt", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
def test_long_names_of_other_files_do_not_disturb(box: Box, fmt: int) -> None:
    files = {"x" * 300 + "/" + "y" * 300: b"z"} | CONTENT | {"é" * 80: b"w"}
    assert box.extract(make_tar(files, fmt=fmt)) == CONTENT


def test_a_folder_name_that_needs_a_long_header(box: Box) -> None:
    for fmt in (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT):
        files = {"f" * 120 + "/" + name: content for name, content in CONTENT.items()}
        assert box.extract(make_tar(files, fmt=fmt)) == CONTENT


def test_zip64_and_streamed_zips(box: Box) -> None:
    out = io.BytesIO()

    class Unseekable(io.RawIOBase):
        def writable(self) -> bool:
            return True

        def write(self, data: Any) -> int:
            return out.write(data)

    with zipfile.ZipFile(Unseekable(), "w", zipfile.ZIP_DEFLATED) as archive:  # type: ignore[arg-type]
        for name, content in CONTENT.items():
            with archive.open(name, "w", force_zip64=True) as member:
                member.write(content)
    assert box.extract(out.getvalue()) == CONTENT


def test_a_zip64_directory(box: Box) -> None:
    plain = make_zip(CONTENT)
    end = plain.rfind(b"PK\x05\x06")
    count, length, start = struct.unpack_from("<HLL", plain, end + 10)
    end64 = struct.pack("<4sQ2H2L4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, length, start)
    locator = struct.pack("<4sLQL", b"PK\x06\x07", 0, end, 1)
    tail = struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0)
    assert box.extract(plain[:end] + end64 + locator + tail) == CONTENT
    lying = struct.pack("<4sLQL", b"PK\x06\x07", 0, 2**63, 1)
    assert box.refusal(plain[:end] + end64 + lying + tail).code == "bad_archive"


def test_many_gzip_members_and_zero_padding(box: Box) -> None:
    tar = make_tar(CONTENT)
    parts = [gzip.compress(tar[i : i + 9999]) for i in range(0, len(tar), 9999)]
    assert box.extract(b"".join(parts) + bytes(70_000)) == CONTENT
    assert box.refusal(b"".join(parts) + b"garbage").code == "bad_archive"
    assert "members" in box.refusal(gzip.compress(b"") * 70_000).message


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize(
    ("files", "code"),
    [
        ({}, "bad_archive"),
        ({"README.md": b"x"}, "bad_archive"),
        ({CONFIG: b"{}"}, "bad_archive"),
        ({TENSORS: b"x"}, "bad_archive"),
        ({CONFIG: b"", TENSORS: b"x"}, "bad_archive"),
        ({CONFIG: b"{}", "adapter_model.bin": b"\x80\x04"}, "not_safetensors"),
        ({"x/" + CONFIG: b"{}", "x/adapter_model.pt": b"\x80\x04"}, "not_safetensors"),
        ({"a/b/" + name: content for name, content in CONTENT.items()}, "bad_archive"),
        ({"a/" + CONFIG: b"{}", "b/" + TENSORS: b"x"}, "bad_archive"),
        ({CONFIG: b"{}", "b/" + TENSORS: b"x"}, "bad_archive"),
        (CONTENT | {"b/" + CONFIG: b"{}"}, "bad_archive"),
        (CONTENT | {"./" + CONFIG: b"{}"}, "bad_archive"),
        (CONTENT | {"README": b"1", "./README": b"2"}, "bad_archive"),
        ({"/" + name: content for name, content in CONTENT.items()}, "bad_archive"),
        ({"../" + name: content for name, content in CONTENT.items()}, "bad_archive"),
        ({"a/../" + name: content for name, content in CONTENT.items()}, "bad_archive"),
        (CONTENT | {"../../etc/passwd": b"x"}, "bad_archive"),
        (CONTENT | {"..\\..\\evil": b"x"}, "bad_archive"),
        (CONTENT | {"C:\\evil": b"x"}, "bad_archive"),
        (CONTENT | {f"f{i}": b"" for i in range(MAX_ENTRIES)}, "bad_archive"),
    ],
)
def test_refused_whatever_the_kind(box: Box, maker: str, files: Files, code: str) -> None:
    assert box.refusal(MAKERS[maker](files)).code == code


@pytest.mark.parametrize("maker", MAKERS)
def test_more_bytes_than_allowed(box: Box, maker: str) -> None:
    total = sum(map(len, CONTENT.values()))
    assert box.extract(MAKERS[maker](CONTENT), limit=total) == CONTENT
    assert box.refusal(MAKERS[maker](CONTENT), limit=total - 1).code == "too_large"


@pytest.mark.parametrize("maker", MAKERS)
def test_cut_anywhere_it_is_refused(box: Box, maker: str) -> None:
    whole = MAKERS[maker](CONTENT)
    rng = random.Random(1)
    for cut in {
        0,
        1,
        3,
        4,
        100,
        511,
        512,
        513,
        len(whole) - 1,
        *(rng.randrange(len(whole)) for _ in range(20)),
    }:
        if maker.startswith("tar (") and not any(whole[cut:]) and whole[cut - 512 : cut] == bytes(512):
            continue  # a tar ends with its first empty block; what follows is padding
        box.refusal(whole[:cut])


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
    "zip with a giant directory": _zip_with_a_giant_directory,
}

_EXTRACT = """
import json, sys
from pathlib import Path
from loraplex.adapters.archive import extract_upload
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
    assert time.perf_counter() - begin < 10
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


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
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


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
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
        raw = bytes(size)
        files = {CONFIG: b"{}", TENSORS: raw}
        assert box.extract(make_zip(files), limit=10 << 20)[TENSORS] == raw
        assert box.extract(make_tar(files, "w:gz"), limit=10 << 20)[TENSORS] == raw
    assert zlib.crc32(raw) == zlib.crc32((box.dest / TENSORS).read_bytes())
    assert os.listdir(box.dest)
