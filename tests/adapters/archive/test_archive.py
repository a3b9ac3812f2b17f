"""Archives: the two files come out; what is damaged, ambiguous or too large is refused."""

from __future__ import annotations

import gzip
import io
import random
import struct
import subprocess
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from loraplex.adapters.admission.safetensors_header import read_header
from loraplex.adapters.archive.extract import extract_upload
from loraplex.adapters.archive.sink import MAX_CHAT_FILES, MAX_ENTRIES
from loraplex.adapters.errors import AdapterRefused
from loraplex.adapters.store.fault_points import FaultPoint
from support.adapters.archives import CONFIG, CONTENT, MAKERS, TENSORS, Box, Files, make_tar, make_zip


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Box]:
    """A folder tree in which only `dest` may change."""
    box = Box(tmp_path)
    yield box
    box.check_outside()


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


@pytest.mark.parametrize("maker", MAKERS)
def test_configs_of_other_folders_leave_room_for_the_files_of_chats(box: Box, maker: str) -> None:
    others = {f"f{number}/config.json": b"{}" for number in range(MAX_CHAT_FILES + 4)}
    mine = {"chat_template.jinja": b"{{ messages }}"}
    files = {**others, **{f"mine/{name}": content for name, content in (mine | CONTENT).items()}}
    assert box.extract(MAKERS[maker](files)) == CONTENT | mine
    (box.dest / "chat_template.jinja").unlink()


def test_a_folder_name_that_needs_a_long_header(box: Box) -> None:
    for fmt in (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT):
        files = {"f" * 120 + "/" + name: content for name, content in CONTENT.items()}
        assert box.extract(make_tar(files, fmt=fmt)) == CONTENT


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("folder", ["run/checkpoint-500/", "home/me/out/checkpoint-500/"])
def test_the_one_adapter_of_a_deeper_folder(box: Box, maker: str, folder: str) -> None:
    files = {folder + name: content for name, content in CONTENT.items()}
    beside = {"README.md": b"x", "run/args.json": b"{}", folder + "optimizer.pt": b"\x80\x02."}
    assert box.extract(MAKERS[maker](beside | files)) == CONTENT


@pytest.mark.parametrize("maker", MAKERS)
def test_a_higher_folder_goes_before_deeper_ones(box: Box, maker: str) -> None:
    """A trainer's output folder, packed as a folder: its checkpoints lie below the final adapter."""
    other = {CONFIG: b"{}", TENSORS: b"x" * 99}
    deeper = {f"run/checkpoint-{n}/{name}": content for n in (1, 2) for name, content in other.items()}
    assert (
        box.extract(MAKERS[maker](deeper | {f"run/{name}": data for name, data in CONTENT.items()}))
        == CONTENT
    )


@pytest.mark.parametrize("maker", MAKERS)
def test_several_adapters_are_listed(box: Box, maker: str) -> None:
    deep = {f"run/checkpoint-{n}/{name}": data for n in (1, 2) for name, data in CONTENT.items()}
    message = box.refusal(MAKERS[maker](deep)).message
    assert "run/checkpoint-1" in message
    assert "run/checkpoint-2" in message
    beside = {f"checkpoint-7/{name}": data for name, data in CONTENT.items()}
    message = box.refusal(MAKERS[maker](CONTENT | beside)).message
    assert "its top" in message
    assert "checkpoint-7" in message


@pytest.mark.parametrize("maker", MAKERS)
def test_the_tensors_by_the_name_that_mlx_gives_them(box: Box, maker: str) -> None:
    files = {f"adapters/{'adapters.safetensors' if n == TENSORS else n}": data for n, data in CONTENT.items()}
    numbered = {"adapters/0000100_adapters.safetensors": b"x"}
    assert box.extract(MAKERS[maker](numbered | files)) == CONTENT
    assert "pack one of them" in box.refusal(MAKERS[maker](CONTENT | {"adapters.safetensors": b"x"})).message


WHAT_IS_NO_ARCHIVE: dict[str, tuple[bytes, str]] = {
    "a pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 123\n", "git lfs pull"),
    "a page": (b"<!DOCTYPE html><html>", "HTML"),
    "safetensors": (struct.pack("<Q", 2) + b"{}", "as adapter_model.safetensors"),
    "torch's zip": (make_zip({"archive/data.pkl": b"\x80\x02.", "archive/version": b"3"}), "a pickle"),
    "NumPy's zip": (make_zip({"layers.0.lora_a.npy": b"\x93NUMPY"}), "NumPy"),
    "nothing": (b"", "empty"),
}


@pytest.mark.parametrize("case", WHAT_IS_NO_ARCHIVE)
def test_what_is_no_archive_is_named(box: Box, case: str) -> None:
    content, words = WHAT_IS_NO_ARCHIVE[case]
    assert words in box.refusal(content).message


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize(
    ("name", "words"),
    [("adapter_model.bin", "torch.load("), ("adapters.npz", "numpy.load("), ("a.gguf", "GGUF")],
)
def test_weights_of_another_format_are_named_with_what_to_do(
    box: Box, maker: str, name: str, words: str
) -> None:
    files = {"x/" + CONFIG: b"{}", "x/training_args.bin": b"\x80\x02.", "x/" + name: b"x"}
    refusal = box.refusal(MAKERS[maker](files))
    assert refusal.code == "not_safetensors"
    assert words in refusal.message


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
        ({f"a/{x}/{name}": content for x in "bc" for name, content in CONTENT.items()}, "bad_archive"),
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


NOT_SAFETENSORS: dict[str, tuple[bytes, str, str]] = {
    "zeros": (bytes(9), "not_safetensors", "nothing but zeros"),
    "text": (b"some text" * 100, "not_safetensors", "text that begins with 'some text"),
    "a pickle": (b"\x80\x02}q\x00.", "not_safetensors", "a pickle"),
    "a broken header": (struct.pack("<Q", 1 << 62) + b"{", "not_safetensors", "its header claims"),
    "no JSON": (struct.pack("<Q", 5) + b"[", "not_safetensors", "does not begin with '{'"),
    "a header of the whole file": (struct.pack("<Q", 3 << 20) + b"{", "too_large", "safetensors header"),
}


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("case", NOT_SAFETENSORS)
def test_what_is_not_safetensors_is_refused_by_its_first_bytes(box: Box, maker: str, case: str) -> None:
    """With the words of the inspection, which would read it after all of it was unpacked."""
    start, code, words = NOT_SAFETENSORS[case]
    written = 0

    def count(step: FaultPoint, path: Path | None = None, to: Path | None = None, /) -> None:
        nonlocal written
        written += step is FaultPoint.UNPACK_WRITE and path == box.dest / TENSORS

    tensors = start + bytes(4 << 20)
    box.archive.write_bytes(MAKERS[maker]({CONFIG: b"{}", TENSORS: tensors}))
    with pytest.raises(AdapterRefused, match=words) as early:
        extract_upload(box.archive, box.dest, max_bytes=16 << 20, fault=count)
    assert (early.value.code, written) == (code, 0)
    assert list(box.dest.iterdir()) == []
    box.archive.write_bytes(tensors)
    with pytest.raises(AdapterRefused) as late:
        read_header(box.archive)
    assert (late.value.code, late.value.message) == (code, early.value.message)
