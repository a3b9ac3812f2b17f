"""Laid-out adapters on the disk: a cache beside the store, which can be rebuilt from it at any time.

    ROOT/<key>/<digest>       a header, the tables of the image, its pages, as they lie in host memory

To lay out an upload takes a hash of all its bytes, a conversion and a transposition of each matrix. An image is read
into its pages as it is, and hashed on the way: a third of the processor's time for an upload in float32.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import struct
import tempfile
import threading
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import BinaryIO

import numpy as np

from loraplex.adapters.device.host_image import HostImage
from loraplex.adapters.device.host_slab import HostPages
from loraplex.adapters.device.layout import ArenaLayout
from loraplex.adapters.errors import LoadAbandoned
from loraplex.adapters.store.files import open_regular, read_into, write_all

_log = logging.getLogger(__name__)

MIN_FREE_BYTES = 1 << 30
"""Nothing is written that would leave less of the disk than this."""
_SPAN_BYTES = 1 << 19
"""Bytes that are read and hashed at a time: they stay in the processor's own cache."""
_STALE_S = 3600.0
_SUM_BYTES = hashlib.sha256().digest_size
_HEAD = struct.Struct("<64s9I")
"""Digest, rank, pages, bytes of a page, rows of `sites`, `vectors`, `rows`, `tokens`, `experts` and `heights`."""
_WIDTHS = (5, 3, 3, 2, 6, 3)
"""Columns of these tables."""


class ImageFiles:
    """Images under `root`, at most `max_bytes` of them, the least recently used removed first. `key` names the layout
    and the base that they were made for: see `image_key`.

    Any thread may call everything here, and several processes may share a `root`. An image on a disk that fails counts
    as absent. `ImageWriter` decides what is written, and when.
    """

    def __init__(self, root: Path, key: str, max_bytes: int) -> None:
        self._root = root
        self._folder = root / key
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._used: int | None = None  # unknown until the first write

    def read_image(
        self, digest: str, memory: Callable[[int], HostPages], wanted: Callable[[], bool]
    ) -> HostImage | None:
        """The image of an adapter, in pages from `memory`; None where there is none. One that is damaged is removed.
        Raises LoadAbandoned once `wanted` returns False, and what `memory` raises."""
        path = self._folder / digest
        try:
            with open_regular(path) as file:
                image = _read(file, digest, memory, wanted)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            _log.warning("the laid-out adapter %s cannot be used and is removed: %s", digest[:12], error)
            with contextlib.suppress(OSError):
                path.unlink()
            return None
        with contextlib.suppress(OSError):  # another process removed it meanwhile, or owns it
            os.utime(path)
        return image

    def write(self, image: HostImage, goes_on: Callable[[], bool]) -> bool:
        """Whether the image was written. Not one that is too large, where the disk is nearly full, whose memory is
        given back meanwhile, or once `goes_on`, which is called before each half MiB, returns False. Raises OSError."""
        runs = image.memory.runs
        num_bytes = sum(run.numel() for run in runs)
        if not runs or num_bytes > self._max_bytes:
            return False
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        disk = os.statvfs(self._folder)
        if disk.f_bavail * disk.f_frsize < num_bytes + MIN_FREE_BYTES:
            return False
        listed = (image.sites, image.vectors, image.rows, image.tokens, image.experts, image.heights)
        tables = b"".join(table.tobytes() for table in listed)
        num_pages = sum(run.shape[0] for run in runs)
        head = _HEAD.pack(
            image.digest.encode(),
            image.rank,
            num_pages,
            num_bytes // num_pages,
            *map(len, listed),
        )
        sha = hashlib.sha256(head + tables)
        descriptor, scratch = tempfile.mkstemp(prefix=".", dir=self._folder)
        try:
            with open(descriptor, "wb", buffering=0) as file:
                file.seek(_SUM_BYTES)
                write_all(file, head + tables)
                for run in runs:
                    whole = run.numpy().reshape(-1)
                    for start in range(0, len(whole), _SPAN_BYTES):
                        # Copied first: its memory must not wait for the disk to be given back.
                        copied = (
                            image.memory.copy_out(whole[start : start + _SPAN_BYTES]) if goes_on() else None
                        )
                        if copied is None:
                            return False
                        sha.update(copied)
                        write_all(file, copied)
                file.seek(0)
                write_all(file, sha.digest())
            os.replace(scratch, self._folder / image.digest)
            scratch = ""
        finally:
            if scratch:
                with contextlib.suppress(OSError):
                    os.unlink(scratch)
        with self._lock:
            self._used = None if self._used is None else self._used + num_bytes
            if self._used is None or self._used > self._max_bytes:
                self._used = self._trim()
        return True

    def remove(self, digest: str) -> None:
        """Delete an image, if it is there. Raises OSError."""
        (self._folder / digest).unlink(missing_ok=True)

    def _trim(self) -> int:
        """Remove the least recently used files until the rest is within nine tenths of the limit, if it is not within
        the limit; and what a crash left unfinished. Returns the bytes that are left."""
        found: list[tuple[float, int, Path]] = []
        for folder in self._root.iterdir():
            for path in folder.iterdir() if folder.is_dir() else ():
                with contextlib.suppress(OSError):  # another process was first
                    status = path.lstat()
                    if path.name.startswith(".") and time.time() - status.st_mtime > _STALE_S:
                        path.unlink()
                    else:
                        found.append((status.st_mtime, status.st_size, path))
        used = sum(size for _, size, _ in found)
        if used > self._max_bytes:
            for _, size, path in sorted(found):
                if used <= self._max_bytes * 9 // 10:
                    break
                with contextlib.suppress(OSError):
                    path.unlink()
                used -= size
        return used


def image_key(layout: ArenaLayout, base: str) -> str:
    """Whatever the bytes of an image depend on beside the upload: the layout, the base (for DoRA), the sources of this
    package, and the libraries that round."""
    sha = hashlib.sha256(f"numpy {version('numpy')} ml_dtypes {version('ml_dtypes')}\n".encode())
    package = Path(__file__).parent.parent
    for source in sorted(package.rglob("*.py")):
        sha.update(hashlib.sha256(source.read_bytes()).digest())
    size = (layout.num_layers, layout.dtype, layout.page_bytes, layout.hidden_size)
    # An image on experts has pages for its table, whose size is of the layout's largest rank.
    experts = None if layout.experts is None else (layout.experts.groups, layout.expert_pages)
    shape = (layout.groups, size, layout.head, layout.embedding, experts)
    sha.update(f"{shape} {base}".encode())
    return sha.hexdigest()[:32]


def _read(
    file: BinaryIO, digest: str, memory: Callable[[int], HostPages], wanted: Callable[[], bool]
) -> HostImage:
    """Raises ValueError where it is not an image of this adapter, to the bit."""
    start = bytearray(_SUM_BYTES + _HEAD.size)
    if read_into(file, memoryview(start)) < len(start):
        raise ValueError("it is cut short")
    head = bytes(start[_SUM_BYTES:])
    name, rank, num_pages, page_bytes, *lengths = _HEAD.unpack(head)
    sizes = [length * width for length, width in zip(lengths, _WIDTHS, strict=True)]
    table_bytes = 4 * sum(sizes)
    size = len(start) + table_bytes + num_pages * page_bytes
    if name != digest.encode() or os.fstat(file.fileno()).st_size != size or not num_pages:
        raise ValueError("it is another adapter's, or has another length")
    tables = bytearray(table_bytes)
    read_into(file, memoryview(tables))
    sha = hashlib.sha256(head + tables)
    pages = memory(num_pages)
    try:
        if pages.num_bytes != num_pages * page_bytes:
            raise ValueError("it has pages of another size")
        for run in pages.runs:
            view = run.numpy().reshape(-1).data
            for first in range(0, len(view), _SPAN_BYTES):
                if not wanted():
                    raise LoadAbandoned("no request waits for this adapter any more")
                span = view[first : first + _SPAN_BYTES]
                read_into(file, span)
                sha.update(span)
        if sha.digest() != bytes(start[:_SUM_BYTES]):
            raise ValueError("its bytes are damaged")
    except BaseException:
        pages.release()
        raise
    numbers = np.frombuffer(bytes(tables), np.int32)
    parts = np.split(numbers, np.cumsum(sizes)[:-1])
    found = [part.reshape(-1, width) for part, width in zip(parts, _WIDTHS, strict=True)]
    return HostImage(digest, rank, pages, *found)
