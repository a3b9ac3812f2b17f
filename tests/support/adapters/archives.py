"""Makes archives of adapters, and a box to unpack them in that tells when anything else was touched."""

from __future__ import annotations

import io
import random
import stat
import struct
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from loraplex.adapters.archive.extract import extract_upload
from loraplex.adapters.errors import AdapterRefused

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
CONTENT = {CONFIG: b'{"peft_type": "LORA"}', TENSORS: random.Random(0).randbytes(3000) + bytes(100_000)}
LIMIT = 1_000_000
START = struct.pack("<Q", 2) + b"{}"
"""The beginning of a safetensors file: an archive's large tensor file is refused without one."""
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


class Box:
    """A folder tree in which only `dest` may change."""

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
