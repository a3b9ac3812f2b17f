"""The files of an adapter: their names, the digest of its two, and how their bytes are read and written."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO

from loraplex.adapters.errors import StoreFailed, StoreFull

CONFIG_NAME = "adapter_config.json"
MAX_CONFIG_BYTES = 1 << 20
"""The most bytes of `CONFIG_NAME`."""
TENSORS_NAME = "adapter_model.safetensors"
MLX_TENSORS_NAME = "adapters.safetensors"
"""The name that mlx-lm gives the tensors. They are stored under TENSORS_NAME."""
TENSORS_NAMES = (TENSORS_NAME, MLX_TENSORS_NAME)
CHAT_FILE_BYTES: Mapping[str, int] = MappingProxyType(
    {
        "chat_template.jinja": 128 << 10,
        "tokenizer_config.json": 4 << 20,
        "special_tokens_map.json": 256 << 10,
        "generation_config.json": 64 << 10,
        "additional_chat_templates/tool_use.jinja": 128 << 10,
    }
)
"""Files that a fine-tune may bring beside its two: how its chats are written and how its answers end. By name, the most
bytes of each."""
POOLED_FILE_BYTES: Mapping[str, int] = MappingProxyType(
    {
        "config.json": 1 << 20,
        "modules.json": 64 << 10,
        "1_Pooling/config.json": 64 << 10,
        "config_sentence_transformers.json": 64 << 10,
    }
)
"""Files that say what the outputs of a classifier and the vectors of sentence-transformers mean. By name, the most
bytes of each."""
TOKENIZER_NAME, TOKENIZER_BYTES = "tokenizer.json", 16 << 20
"""A tokenizer beside an adapter: it is compared with the base's, and left out where it is larger."""
UPLOAD_FILE_BYTES: Mapping[str, int] = MappingProxyType(
    {**CHAT_FILE_BYTES, TOKENIZER_NAME: TOKENIZER_BYTES, **POOLED_FILE_BYTES}
)
"""Files that may come beside an adapter's two. By name, the most bytes of each."""

DIGEST_SALT = b"loraplex adapter 1\n"
"""The first bytes of a digest's hash."""
CHUNK_BYTES = 1 << 20
"""Bytes held in memory at a time while a file is copied or hashed."""

# EFBIG is what a process sees whose file size is limited: for an upload the same as a full disk.
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
# A disk that breaks, was taken away, or was remounted read-only after an error.
_BROKEN = frozenset({errno.EIO, errno.EROFS, errno.ENXIO, errno.ENODEV, errno.ESTALE, errno.ETIMEDOUT})
_DAMAGED = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EINVAL})


def shown(text: object, limit: int = 80) -> str:
    """An uploader's own words made safe for messages, logs and JSON: ASCII, quoted, cut to `limit`. What is no text is
    written as JSON has it (null, true, [1, 2]), without quotes."""
    if isinstance(text, str):
        return ascii(text if len(text) <= limit else text[:limit] + "...")
    try:
        raw = json.dumps(text)
    except (TypeError, ValueError, RecursionError):
        raw = ascii(str(text))
    return raw if len(raw) <= limit else raw[:limit] + "..."


def names_damage(error: OSError) -> bool:
    """Whether a file could not be read for what lies in its place (nothing, a folder, a link), rather than for what
    may pass: too many open files, or a disk that does not answer."""
    return error.errno in _DAMAGED


def has_no_room(error: OSError) -> bool:
    """Whether the disk is full, or what this process may have of it."""
    return error.errno in _NO_ROOM


def is_disk_failure(error: BaseException | None) -> bool:
    """Whether the operating system had no room, or its disk failed."""
    return isinstance(error, OSError) and error.errno in _NO_ROOM | _BROKEN


@contextmanager
def disk_failures_named() -> Iterator[None]:
    """Turn the operating system's "no room" errors into StoreFull, and those of a failing disk into StoreFailed."""
    try:
        yield
    except OSError as error:
        if error.errno in _NO_ROOM:
            raise StoreFull(
                "no room left for the upload in the artifact store; nothing of it was kept"
            ) from error
        if error.errno in _BROKEN:
            raise StoreFailed(
                f"the artifact store's disk fails ({os.strerror(error.errno)}); nothing of the upload was kept"
            ) from error
        raise


def open_regular(path: Path) -> BinaryIO:
    """Open for reading, unbuffered, refusing symbolic links, devices and pipes (OSError)."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return os.fdopen(fd, "rb", buffering=0)


def create_file(path: Path) -> BinaryIO:
    """Create a file that must not exist yet, mode 0600, unbuffered; never follows a link (OSError)."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    return os.fdopen(fd, "wb", buffering=0)


def place_in(folder: Path, name: str) -> Path:
    """The path of a file of that name, with the folder within `folder` that it lies in (OSError)."""
    path = folder / name
    if path.parent != folder:
        path.parent.mkdir(mode=0o700, exist_ok=True)
    return path


def make_private(path: Path) -> None:
    """Have a file of mode 0600, empty where there was none, whatever the umask and the folder are. One that is there
    is not opened: closing it would drop the locks that this process has on it (OSError)."""
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    except FileExistsError:
        if stat.S_IMODE(path.stat().st_mode) & 0o077:
            path.chmod(0o600)


def write_all(file: BinaryIO, data: bytes | memoryview) -> None:
    """Write every byte: an unbuffered file may take fewer than asked when the disk runs full. Raises OSError with the
    file's name."""
    view = memoryview(data)
    try:
        while view:
            view = view[file.write(view) :]
    except OSError as error:
        error.filename = error.filename or os.readlink(f"/proc/self/fd/{file.fileno()}")
        raise


def read_into(file: BinaryIO, buffer: memoryview) -> int:
    """Fill `buffer`; the number of bytes read is smaller than its size only at the end of the file."""
    done = 0
    while done < len(buffer):
        got = os.readv(file.fileno(), [buffer[done:]])
        if not got:
            break
        done += got
    return done


def _hash_file(path: Path, into: hashlib._Hash) -> None:
    """Feed one file to a running hash, led by its length, in bounded memory.

    Raises OSError when the file cannot be read or changes its length meanwhile.
    """
    buffer = memoryview(bytearray(CHUNK_BYTES))
    with open_regular(path) as file:
        left = os.fstat(file.fileno()).st_size
        into.update(length_bytes(left))
        while got := read_into(file, buffer):
            into.update(buffer[:got])
            left -= got
    if left:
        raise OSError(errno.EIO, "the file changed while it was read", str(path))


def digest_upload(config_path: Path, tensors_path: Path) -> str:
    """The identity of an adapter: 64 hex characters of SHA-256 over both files, each led by its length, so
    that no byte can move from one file to the other unseen. Streams. Raises OSError."""
    sha = _begin_digest(config_path)
    _hash_file(tensors_path, sha)
    return sha.hexdigest()


def begin_digest(config_path: Path, tensors_path: Path) -> hashlib._Hash:
    """An unfinished hash of `digest_upload`: it lacks only the bytes of the tensor file, for a caller that reads those
    anyway. A file that has another length by then gives another digest. Raises OSError."""
    sha = _begin_digest(config_path)
    sha.update(length_bytes(tensors_path.lstat().st_size))
    return sha


def _begin_digest(config_path: Path) -> hashlib._Hash:
    sha = hashlib.sha256(DIGEST_SALT)
    _hash_file(config_path, sha)
    return sha


def length_bytes(length: int) -> bytes:
    """A file's length, as it leads the file's bytes in a digest."""
    return length.to_bytes(8, "little")
