"""Kinds of files by their first bytes, for files that are not what was expected.

One function for every way by which an adapter comes: `identify` looks at signatures alone. It decodes nothing that it
does not show, and opens nothing. Signatures: Git LFS specification v1, PKWARE APPNOTE 6.3.10, RFC 1952 (gzip), POSIX
ustar, NumPy's format.py, Python's pickle.py and torch.serialization, ggml's gguf.md.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from loraplex.adapters.store.files import shown

START_BYTES = 512
"""Bytes that `identify` wants of a longer file: a tar has its signature in the first block."""
_SHOWN_CHARS = 60
_LFS = re.compile(rb"version https://(?:git-lfs\.github\.com|hawser\.github\.com)/spec/")
_LFS_SIZE = re.compile(rb"\nsize ([0-9]{1,15})\n")

CONVERT_PICKLE = (
    'python -c "import torch; from safetensors.torch import save_file; '
    "save_file({k: v.contiguous() for k, v in torch.load('adapter_model.bin', map_location='cpu', "
    "weights_only=True).items()}, 'adapter_model.safetensors')\""
)
CONVERT_NPZ = (
    'python -c "import numpy; from safetensors.numpy import save_file; '
    "save_file(dict(numpy.load('adapters.npz')), 'adapters.safetensors')\""
)
_AGAIN = "download the file again, and look at its first line before the upload"


@dataclass(frozen=True, slots=True)
class Kind:
    """`what` the bytes are, with an article, and the `remedy` in the imperative. Both are ASCII and printable."""

    what: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.what}; {self.remedy}"


PICKLE = Kind(
    "a pickle, as torch.save writes it (.bin, .pt, .pth), which may run code when it is read and is never opened here",
    f"convert it to safetensors where it was made: {CONVERT_PICKLE}",
)
NPZ = Kind("a NumPy archive (.npz)", f"convert it to safetensors: {CONVERT_NPZ}")
GGUF = Kind(
    "a GGUF or GGML file of llama.cpp",
    "upload the adapter that it was converted from: adapter_config.json and adapter_model.safetensors of PEFT",
)
INDEX = Kind(
    "the JSON index of a checkpoint in several files, without any weights",
    "PEFT saves an adapter as one file: upload that adapter_model.safetensors",
)
_EMPTY = Kind("empty", "its copy or download has failed: copy it again")
_NPY = Kind("one NumPy array (.npy)", "upload adapter_model.safetensors as PEFT's save_pretrained writes it")
_ZIP = Kind("a zip archive where one file belongs", "unpack it, or upload it whole as the archive")
TAR = Kind("a tar archive where one file belongs", "unpack it, or upload it whole as the archive")
_GZIP = Kind("compressed by gzip", "decompress it (gunzip), or upload a .tar.gz whole as the archive")
_HTML = Kind("an HTML or XML page, such as a login or error page that was saved under this name", _AGAIN)
_CONFIG = Kind(
    "the JSON of a config, without any weights",
    "the weights belong here: upload adapter_config.json under its own name",
)
_JSON = Kind(
    "JSON, without any weights", "upload adapter_model.safetensors as PEFT's save_pretrained writes it"
)
_ZEROS = Kind("nothing but zeros at its beginning", "its copy or download has broken off: copy it again")
SAFETENSORS = Kind("a safetensors file", "the two files are exchanged: upload each under its own name")
_SWAPPED_PARTS = (b'"peft_type"', b'"lora_parameters"', b'"fine_tune_type"', b'"target_modules"')


def _compressed(by: str) -> Kind:
    return Kind(f"compressed ({by})", "decompress it first")


_MAGIC: tuple[tuple[bytes, Kind], ...] = (
    (b"\x1f\x8b", _GZIP),
    (b"\x93NUMPY", _NPY),
    (b"GGUF", GGUF),
    (b"algg", GGUF),  # "ggla", "ggjt", "ggmf" and "ggml" in little-endian order
    (b"tjgg", GGUF),
    (b"fmgg", GGUF),
    (b"lmgg", GGUF),
    (b"\x28\xb5\x2f\xfd", _compressed("Zstandard")),
    (b"\xfd7zXZ\0", _compressed("xz")),
    (b"BZh", _compressed("bzip2")),
    (b"7z\xbc\xaf\x27\x1c", _compressed("7-Zip")),
    (b"Rar!\x1a\x07", _compressed("RAR")),
    (b"\x89HDF\r\n\x1a\n", Kind("an HDF5 file", "upload adapter_model.safetensors of PEFT")),
)


def identify(start: bytes, size: int) -> Kind | None:
    """The kind of a file of `size` bytes by its first START_BYTES bytes (all of a shorter file); None for what has no
    known signature, and for a well-formed beginning of safetensors. Never raises."""
    if not size:
        return _EMPTY
    if _begins_safetensors(start, size):
        return None
    if start[257:262] == b"ustar":  # before it is the name of a file, which may look like anything
        return TAR
    for magic, kind in _MAGIC:
        if start.startswith(magic):
            return kind
    for look in _LOOKS:
        if (found := look(start)) is not None:
            return found
    return None


def identify_config(start: bytes, size: int) -> Kind | None:
    """The kind of a file that should be a JSON object, as `identify`; None for JSON."""
    if _begins_safetensors(start, size):
        return SAFETENSORS
    kind = identify(start, size)
    return None if kind in (_JSON, _CONFIG) else kind


def _begins_safetensors(start: bytes, size: int) -> bool:
    return start[8:9] == b"{" and 0 < int.from_bytes(start[:8], "little") <= size - 8


def _pointer(start: bytes) -> Kind | None:
    if _LFS.match(start):
        size = _LFS_SIZE.search(start)
        of = f" to a file of {int(size[1])} bytes" if size else ""
        return Kind(
            f"a Git LFS pointer{of}, not the file itself",
            "run `git lfs install` and `git lfs pull` in the clone that it lies in, and upload the files again",
        )
    if start.startswith((b"/annex/objects/", b"../.git/annex/objects/", b".git/annex/objects/")):
        return Kind(
            "a git-annex pointer, not the file itself", "run `git annex get` in the clone that it lies in"
        )
    return None


def _pickle(start: bytes) -> Kind | None:
    return PICKLE if start[:1] == b"\x80" and start[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05") else None


def _zip(start: bytes) -> Kind | None:
    """The kind of a zip archive, by the name of its first member."""
    if not start.startswith((b"PK\x03\x04", b"PK\x05\x06", b"PK\x07\x08")):
        return None
    name = start[30 : 30 + int.from_bytes(start[26:28], "little")]
    if name.endswith(
        (b"data.pkl", b"/version", b"/byteorder", b"/.format_version", b"/.data/serialization_id")
    ):
        return PICKLE
    return NPZ if name.endswith(b".npy") else _ZIP


def _json(start: bytes) -> Kind | None:
    text = _text_of(start)
    if not text.startswith((b"{", b"[")):
        return None
    if b'"weight_map"' in text:
        return INDEX
    return _CONFIG if any(part in text for part in _SWAPPED_PARTS) else _JSON


def _markup(start: bytes) -> Kind | None:
    text = _text_of(start).lower()
    return (
        _HTML if text.startswith((b"<!doctype", b"<html", b"<head", b"<body", b"<?xml", b"<error")) else None
    )


def _zeros(start: bytes) -> Kind | None:
    return None if start.strip(b"\0") else _ZEROS


def _plain_text(start: bytes) -> Kind | None:
    try:
        text = start.decode("utf-8")
    except UnicodeDecodeError as error:
        if error.reason != "unexpected end of data":
            return None
        text = start[: error.start].decode("utf-8")
    if not text.isprintable() and not all(char.isprintable() or char in "\t\r\n" for char in text):
        return None
    return Kind(f"text that begins with {shown(' '.join(text[:400].split()), _SHOWN_CHARS)}", _AGAIN)


_LOOKS: tuple[Callable[[bytes], Kind | None], ...] = (
    _pointer,
    _pickle,
    _zip,
    _json,
    _markup,
    _zeros,
    _plain_text,
)


def _text_of(start: bytes) -> bytes:
    return start.removeprefix(b"\xef\xbb\xbf").lstrip()
