"""The metadata and the places of tensors of a GGUF file, read from a file that nobody vouches for.

Every count and length is compared with what is left of the file before anything of that size is read, so that reading
takes time and memory in proportion to the file's header. The format is that of ggml's `docs/gguf.md`: version 2 or 3,
little-endian.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import resource
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quant_shape_to_byte_shape
from numpy.typing import NDArray

from loraplex.adapters.store.files import shown

_NUMBERS = ("<u1", "<i1", "<u2", "<i2", "<u4", "<i4", "<f4", "?", None, None, "<u8", "<i8", "<f8")
"""numpy's names of the value types by their numbers; None: a text, and an array."""
_TEXT, _ARRAY = 8, 9
_MOST_KEY_BYTES, _MOST_TEXT_BYTES, _MOST_ITEMS = 1 << 16, 16 << 20, 1 << 22
_LEAST_FIELD_BYTES, _LEAST_TENSOR_BYTES = 8 + 4 + 1, 8 + 4 + 8 + 4 + 8
_MOST_DIMENSIONS = 4
_MEMORY_BYTES, _SECONDS, _BYTES_A_SECOND = 8 << 30, 300, 4 << 20
"""Limits of a process that reads a file: memory beside the file's own bytes; processor time, and for how many bytes of
the file a second more."""


class GgufUnsupported(Exception):
    """The file holds a model or a tokenizer that is not converted, or is damaged; the message names it."""


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """The place of a tensor. `shape` has the inputs first, as the file has it."""

    name: str
    shape: tuple[int, ...]
    tensor_type: GGMLQuantizationType
    data_offset: int
    n_bytes: int
    file: NDArray[np.uint8]

    @property
    def data(self) -> NDArray[Any]:
        """The rows: floats, or the bytes of blocks."""
        stored = self.file[self.data_offset : self.data_offset + self.n_bytes]
        rows = tuple(reversed(self.shape))
        if self.tensor_type in _FLOATS:
            return stored.view(_FLOATS[self.tensor_type]).reshape(rows)
        return stored.reshape(quant_shape_to_byte_shape(rows, self.tensor_type))


_FLOATS = {GGMLQuantizationType.F32: "<f4", GGMLQuantizationType.F16: "<f2", GGMLQuantizationType.F64: "<f8"}


class Metadata:
    """The key-value pairs of a GGUF file. Both methods raise GgufUnsupported for a value of another type than its key
    has, by the end of the key (`_KINDS`)."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self._fields = fields

    def __getitem__(self, key: str) -> Any:
        """Raises GgufUnsupported where the file has no such key too."""
        if key not in self._fields:
            raise GgufUnsupported(f"its metadata have no {key}")
        value = self._fields[key]
        try:
            if isinstance(value, list):
                value = [item.decode() for item in value]
            elif isinstance(value, bytes):
                value = value.decode()
        except UnicodeDecodeError as error:
            raise GgufUnsupported(f"its {key} is no UTF-8") from error
        if isinstance(value, np.ndarray):
            value = value.tolist()
        kind = next((kind for end, kind in _KINDS.items() if key.endswith(end)), None)
        if kind is not None and not _fits(value, kind):
            raise GgufUnsupported(f"its {key} is {shown(value, 60)}, not {kind}")
        return value

    def get(self, key: str, default: Any = None) -> Any:
        return self[key] if key in self._fields else default

    def __iter__(self) -> Any:
        return iter(self._fields)


_COUNT, _NUMBER, _FLAG, _ID = "a number above 0", "a finite number", "true or false", "the number of a token"
_WORD, _WORDS, _WHOLE = "a text", "a list of texts", "a list of whole numbers"
_KINDS = {
    "general.architecture": _WORD,
    "general.name": _WORD,
    ".context_length": _COUNT,
    ".embedding_length": _COUNT,
    ".block_count": _COUNT,
    ".feed_forward_length": _COUNT,
    ".attention.head_count": _COUNT,
    ".attention.head_count_kv": _COUNT,
    ".attention.layer_norm_rms_epsilon": _NUMBER,
    ".attention.key_length": _COUNT,
    ".attention.value_length": _COUNT,
    ".attention.scale": _NUMBER,
    ".attention.sliding_window": _NUMBER,
    ".vocab_size": _COUNT,
    ".rope.dimension_count": _COUNT,
    ".rope.freq_base": _NUMBER,
    "tokenizer.ggml.model": _WORD,
    "tokenizer.ggml.pre": _WORD,
    "tokenizer.ggml.tokens": _WORDS,
    "tokenizer.ggml.merges": _WORDS,
    "tokenizer.ggml.token_type": _WHOLE,
    "_token_id": _ID,
    "tokenizer.ggml.add_bos_token": _FLAG,
    "tokenizer.ggml.add_eos_token": _FLAG,
    "tokenizer.ggml.add_space_prefix": _FLAG,
    "tokenizer.chat_template": _WORD,
}
"""Types of values, by the end of their keys."""


def _fits(value: Any, kind: str) -> bool:
    match kind:
        case "a number above 0":
            return type(value) is int and 0 < value < 1 << 31
        case "the number of a token":
            return type(value) is int and 0 <= value < 1 << 31
        case "a finite number":
            return type(value) in (int, float) and math.isfinite(value)
        case "true or false":
            return type(value) is bool
        case "a text":
            return isinstance(value, str)
        case "a list of texts":
            return isinstance(value, list) and all(isinstance(item, str) for item in value)
        case _:
            return isinstance(value, list) and all(type(item) is int for item in value)


class GgufFile:
    """The `metadata` and `tensors` of a file. Raises GgufUnsupported for one that is damaged, OSError."""

    def __init__(self, path: Path) -> None:
        self._size = os.stat(path).st_size
        self._at = 0
        if self._size < 24:
            _refuse("it ends inside its first 24 bytes")
        self._data = np.memmap(path, np.uint8, "r")
        magic, version = self._unpack("4sI")
        if magic != b"GGUF" or version not in (2, 3):
            swapped = magic == b"GGUF" and version & 0xFFFF == 0
            _refuse("it is big-endian" if swapped else f"it begins with {shown(magic.hex())}, {version}")
        tensors, fields = self._unpack("QQ")
        if (
            fields * _LEAST_FIELD_BYTES > self._left
            or tensors * _LEAST_TENSOR_BYTES > self._left
            or fields + tensors > _MOST_ITEMS
        ):
            _refuse(f"{self._size} bytes do not hold {fields} fields and {tensors} tensors")
        found: dict[str, Any] = {}
        for _ in range(fields):
            key = self._name()
            if key in found:
                _refuse(f"it has {shown(key)} twice")
            found[key] = self._value(key, *self._unpack("I"))
        self.metadata = Metadata(found)
        self.tensors = self._tensors(tensors, found.get("general.alignment", 32))

    @property
    def _left(self) -> int:
        return self._size - self._at

    def _take(self, size: int, what: str) -> NDArray[np.uint8]:
        if size > self._left:
            _refuse(f"{what} has {size} bytes, and {self._left} are left")
        self._at += size
        return self._data[self._at - size : self._at]

    def _unpack(self, form: str) -> tuple[Any, ...]:
        size = struct.calcsize(f"<{form}")
        return struct.unpack(f"<{form}", self._take(size, "a number").tobytes())

    def _text(self, what: str, most: int = _MOST_TEXT_BYTES) -> bytes:
        (size,) = self._unpack("Q")
        if size > most:
            _refuse(f"{what} is a text of {size} bytes; at most {most} are read")
        return self._take(size, what).tobytes()

    def _name(self) -> str:
        return self._text("a name", _MOST_KEY_BYTES).decode("utf-8", "backslashreplace")

    def _value(self, key: str, kind: int) -> Any:
        """A number, bytes, an array of numbers, or a list of bytes."""
        if kind == _TEXT:
            return self._text(shown(key))
        if kind != _ARRAY:
            return self._numbers(key, kind, 1)[0].item()
        kind, count = self._unpack("IQ")
        if kind != _TEXT:
            return self._numbers(key, kind, count)
        if count * 8 > self._left or count > _MOST_ITEMS:
            _refuse(f"{shown(key)} has {count} texts, and {self._left} bytes are left")
        return [self._text(shown(key)) for _ in range(count)]

    def _numbers(self, key: str, kind: int, count: int) -> NDArray[Any]:
        name = _NUMBERS[kind] if kind < len(_NUMBERS) else None
        if name is None:
            _refuse(f"{shown(key)} has the unknown type {kind}")
        dtype = np.dtype(name)
        if count > _MOST_ITEMS:
            _refuse(f"{shown(key)} has {count} numbers; at most {_MOST_ITEMS} are read")
        return self._take(count * dtype.itemsize, shown(key)).view(dtype)

    def _tensors(self, count: int, alignment: Any) -> list[GgufTensor]:
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            _refuse(f"general.alignment is {shown(alignment)}, not a power of two")
        stored = [(self._name(), self._shape(), *self._unpack("IQ")) for _ in range(count)]
        if len({name for name, *_ in stored}) < count:
            _refuse("it has a tensor twice")
        first = -(-self._at // alignment) * alignment
        found = [self._tensor(name, shape, kind, first + offset) for name, shape, kind, offset in stored]
        by_place = sorted(found, key=lambda tensor: tensor.data_offset)
        for before, after in itertools.pairwise(by_place):
            if after.data_offset < before.data_offset + before.n_bytes:
                _refuse(f"the tensor {shown(after.name)} begins inside {shown(before.name)}")
        return found

    def _shape(self) -> tuple[int, ...]:
        (count,) = self._unpack("I")
        if not 1 <= count <= _MOST_DIMENSIONS:
            _refuse(f"a tensor has {count} dimensions")
        return self._unpack("Q" * count)

    def _tensor(self, name: str, shape: tuple[int, ...], kind: int, start: int) -> GgufTensor:
        try:
            tensor_type = GGMLQuantizationType(kind)
        except ValueError:
            _refuse(f"the tensor {shown(name)} has the unknown type {kind}")
        values, size = GGML_QUANT_SIZES[tensor_type]
        if 0 in shape or shape[0] % values:
            _refuse(f"the tensor {shown(name)} is {list(shape)}, which are no blocks of {values}")
        n_bytes = math.prod(shape) // values * size
        if start + n_bytes > self._size:
            _refuse(f"the tensor {shown(name)} {list(shape)} ends at byte {start + n_bytes} of {self._size}")
        return GgufTensor(name, shape, tensor_type, start, n_bytes, self._data)


def run_limited(gguf: Path, work: Callable[[], None]) -> int:
    """Do the work of a process that reads this file, with limits of memory and of processor time. Returns the exit
    status; a failure is one line on stderr."""
    size = gguf.stat().st_size
    for what, most in (
        (resource.RLIMIT_AS, size + _MEMORY_BYTES),
        (resource.RLIMIT_CPU, _SECONDS + size // _BYTES_A_SECOND),
    ):
        soft, hard = resource.getrlimit(what)
        finite = [limit for limit in (most, soft) if limit != resource.RLIM_INFINITY]
        with contextlib.suppress(ValueError, OSError):  # a system without this limit
            resource.setrlimit(what, (min(finite), hard))
    try:
        work()
    except (GgufUnsupported, OSError) as error:
        reason = str(error)
    except MemoryError:
        reason = f"more than {_MEMORY_BYTES >> 30} GiB of memory are needed"
    except Exception as error:  # a value that no check here foresees
        reason = f"it is damaged, or of a kind that is not known here ({type(error).__name__}: {error})"
    else:
        return 0
    print(" ".join(reason.split())[:600], file=sys.stderr)
    return 1


def _refuse(reason: str) -> NoReturn:
    raise GgufUnsupported(f"it is no GGUF file, or is cut short or broken ({reason})")
