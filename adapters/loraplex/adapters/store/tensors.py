"""Reading tensors out of a safetensors file, whole or in chunks, with numpy."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from loraplex.adapters.errors import ArtifactCorrupt
from loraplex.adapters.spec import TensorSlice
from loraplex.adapters.store.files import open_regular, read_into

NUMPY_DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
}
"""The dtypes that adapters may have, by their safetensors names."""

CHUNK_ELEMENTS = 1 << 18
_SPAN_BYTES = 1 << 19
"""Bytes that `scan_tensors` reads at a time: it stays in the processor's own cache while it is hashed and used."""


def read_native(tensors_path: Path, tensor: TensorSlice) -> NDArray[Any]:
    """The tensor in its own dtype (one of NUMPY_DTYPES) and shape, as a new array.

    Read, not mapped: a file that shrinks under a mapping kills the process, here it is an exception.
    Raises ArtifactCorrupt when the file ends early, KeyError for another dtype, OSError.
    """
    array = np.empty(tensor.shape, NUMPY_DTYPES[tensor.dtype])
    if array.nbytes:
        with open_regular(tensors_path) as file:
            file.seek(tensor.start)
            if read_into(file, array.reshape(-1).view(np.uint8).data) < array.nbytes:
                raise _cut_short(tensors_path)
    return array


def read_tensor(tensors_path: Path, tensor: TensorSlice) -> NDArray[np.float32]:
    """The tensor as float32, in its shape, as a new array: exact from every accepted dtype but float64, which is
    rounded, to infinity where it is too large.

    Raises as `read_native` does.
    """
    with np.errstate(over="ignore"):
        return read_native(tensors_path, tensor).astype(np.float32, copy=False)


def iter_rows(tensors_path: Path, tensor: TensorSlice) -> Iterator[NDArray[Any]]:
    """The tensor's rows [n, …] in native dtype, at most CHUNK_ELEMENTS elements (or one row) at a time. The
    yielded array is reused by the next one. Raises as `read_native` does."""
    dtype = NUMPY_DTYPES[tensor.dtype]
    row = tensor.shape[1:]
    width = max(1, math.prod(row))
    rows = max(1, CHUNK_ELEMENTS // width)
    total = tensor.shape[0]
    chunk = np.empty((min(rows, total), *row), dtype)
    with open_regular(tensors_path) as file:
        file.seek(tensor.start)
        for first in range(0, total, rows):
            part = chunk[: min(rows, total - first)]
            if read_into(file, part.reshape(-1).view(np.uint8).data) < part.nbytes:
                raise _cut_short(tensors_path)
            yield part


def scan_tensors(
    tensors_path: Path, tensors: Iterable[TensorSlice], feed: Callable[[memoryview], object]
) -> Iterator[tuple[TensorSlice, NDArray[Any]]]:
    """Read a whole file once, from its first byte to its last: `feed` gets all of it, in order, and each of `tensors`
    is yielded in its own dtype and shape, in the order of the file. No two of them overlap.

    The yielded array is reused for the next ones. Holds the largest of the tensors. Raises as `read_native` does.
    """
    with open_regular(tensors_path) as file:
        spans = list(_spans(sorted(tensors, key=_start), os.fstat(file.fileno()).st_size))
        buffer = np.empty(max((end - start for start, end, _ in spans), default=0), np.uint8)
        for start, end, held in spans:
            span = buffer[: end - start]
            if read_into(file, span.data) < end - start:
                raise _cut_short(tensors_path)
            feed(span.data)
            for tensor in held:
                raw = span[tensor.start - start : tensor.end - start]
                yield tensor, raw.view(NUMPY_DTYPES[tensor.dtype]).reshape(tensor.shape)


def scan_file(
    path: Path, start: int, dtype: np.dtype[Any], feed: Callable[[memoryview], object]
) -> Iterator[NDArray[Any]]:
    """Read a whole file once, from its first byte to its last: `feed` gets all of it, in order, and what lies behind
    the byte `start` is yielded as elements of `dtype`, some at a time.

    The yielded array is reused for the next ones, and may be written to. Raises as `read_native` does.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        buffer = np.empty(_SPAN_BYTES, np.uint8)
        for first, end, _ in (*_gap(0, start), *_gap(start, size)):
            span = buffer[: end - first]
            if read_into(file, span.data) < end - first or (first >= start and len(span) % dtype.itemsize):
                raise _cut_short(path)
            feed(span.data)
            if first >= start:
                yield span.view(dtype)


def _spans(ordered: list[TensorSlice], size: int) -> Iterator[tuple[int, int, list[TensorSlice]]]:
    """[start, end) and the tensors in it, back to back: whole ones, as many as fit _SPAN_BYTES, but at least one. In
    spans of their own, what lies between tensors. Together all of a file of `size` bytes, and more if it is cut."""
    start = end = 0
    held: list[TensorSlice] = []
    for tensor in ordered:
        if tensor.start != end or tensor.end - start > _SPAN_BYTES:
            if held:
                yield start, end, held
            yield from _gap(end, tensor.start)
            start, held = tensor.start, []
        held.append(tensor)
        end = tensor.end
    if held:
        yield start, end, held
    yield from _gap(end, size)


def _gap(start: int, end: int) -> Iterator[tuple[int, int, list[TensorSlice]]]:
    for first in range(start, end, _SPAN_BYTES):
        yield first, min(first + _SPAN_BYTES, end), []


def _start(tensor: TensorSlice) -> int:
    return tensor.start


def _cut_short(path: Path) -> ArtifactCorrupt:
    return ArtifactCorrupt(f"{path.name} ends before the tensors that its header names")
