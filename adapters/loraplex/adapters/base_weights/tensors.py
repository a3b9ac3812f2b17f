"""Tensors of a quantised checkpoint, read with checks: what is stored decides, and a message names what is wrong."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from loraplex.adapters.errors import BaseModelInvalid
from loraplex.adapters.spec import TensorSlice
from loraplex.adapters.store.files import open_regular, read_into, shown

_DTYPES: dict[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "I8": np.dtype("i1"),
    "U8": np.dtype("u1"),
    "I32": np.dtype("<i4"),
    "I64": np.dtype("<i8"),
}
FLOATS = ("F32", "F16", "BF16")
"""Dtypes of scales."""


class QuantisationUnsupported(BaseModelInvalid):
    """A quantised checkpoint that is not served, or is broken; the message says what and where."""


class Stored(Protocol):
    """Where a tensor lies."""

    @property
    def path(self) -> Path: ...
    @property
    def tensor(self) -> TensorSlice: ...


class QuantisedTensors:
    """The tensors of a checkpoint, by name. All methods raise QuantisationUnsupported."""

    def __init__(self, located: Mapping[str, Stored]) -> None:
        self._located = located

    def __contains__(self, name: str) -> bool:
        return name in self._located

    def __iter__(self) -> Any:
        return iter(self._located)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._find(name).tensor.shape

    def dtype(self, name: str) -> str:
        """A dtype as safetensors names it; empty where there is no such tensor."""
        found = self._located.get(name)
        return "" if found is None else found.tensor.dtype

    def check(self, name: str, dtypes: tuple[str, ...], shape: tuple[int, ...]) -> Stored:
        """A tensor that must have one of these dtypes, and this shape."""
        found = self._find(name)
        tensor = found.tensor
        if tensor.dtype not in dtypes or tensor.shape != shape:
            raise QuantisationUnsupported(
                f"{name} is {tensor.dtype} {list(tensor.shape)}, not {' or '.join(dtypes)} {list(shape)}"
            )
        return found

    def read(self, name: str, dtypes: tuple[str, ...], shape: tuple[int, ...]) -> NDArray[Any]:
        """The values of a tensor that `check` lets pass."""
        found = self.check(name, dtypes, shape)
        array = np.empty(shape, _DTYPES[found.tensor.dtype])
        self._fill(array, found, name)
        return array

    def blocks(self, name: str, count: int, size: int) -> NDArray[np.uint8]:
        """[count, size] bytes: a tensor of blocks, which must be as many."""
        found = self._find(name)
        if found.tensor.end - found.tensor.start != count * size:
            raise QuantisationUnsupported(f"{name} is not {count} blocks of {size} bytes")
        array = np.empty((count, size), np.uint8)
        self._fill(array, found, name)
        return array

    def part(self, name: str, index: int) -> NDArray[np.uint8]:
        """The bytes of one of a tensor's first dimension."""
        found = self._find(name)
        count, *shape = found.tensor.shape
        array = np.empty(shape, np.uint8)
        if found.tensor.end - found.tensor.start != count * array.nbytes or not 0 <= index < count:
            raise QuantisationUnsupported(
                f"{name} has not {count} parts of {array.nbytes} bytes, or none of {index}"
            )
        self._fill(array, found, name, index * array.nbytes)
        return array

    def scales(self, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """A tensor of finite floats."""
        found = self.read(name, FLOATS, shape).astype(np.float32)
        if not np.isfinite(found).all():
            raise QuantisationUnsupported(f"{name} has a scale that is infinite, or no number")
        return found

    def matrix(self, name: str) -> tuple[int, int]:
        """The shape of a tensor that must have two dimensions, none of them 0."""
        shape = self.shape(name)
        if len(shape) != 2 or 0 in shape:
            raise QuantisationUnsupported(f"{name} has the shape {list(shape)}, not two dimensions")
        return shape[0], shape[1]

    @staticmethod
    def _fill(array: NDArray[Any], found: Stored, name: str, offset: int = 0) -> None:
        with open_regular(found.path) as file:
            file.seek(found.tensor.start + offset)
            if array.nbytes and read_into(file, array.reshape(-1).view(np.uint8).data) < array.nbytes:
                raise QuantisationUnsupported(f"{found.path} ends inside {name}")

    def _find(self, name: str) -> Stored:
        found = self._located.get(name)
        if found is None:
            raise QuantisationUnsupported(f"the checkpoint lacks {name}")
        return found


def nibbles(packed: NDArray[np.int32], bits: int) -> NDArray[np.uint8]:
    """[…, P] int32 → […, P · 32/bits]: the numbers of `bits` bits in each, the lowest first."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    parts = (packed.view(np.uint32)[..., None] >> shifts) & np.uint32((1 << bits) - 1)
    return parts.astype(np.uint8).reshape(*packed.shape[:-1], -1)


def divide(inputs: int, groups: int, configured: int, name: str) -> int:
    """Inputs of a group. `configured`: as the config says, below 1 for a scale a row. Raises QuantisationUnsupported
    where the scales, which `name` names, are of other groups, or a group has an odd number of inputs."""
    group = inputs if configured < 1 else configured
    if group * groups != inputs or group % 2:
        raise QuantisationUnsupported(f"{name}: {inputs} inputs are not {groups} groups of {group}")
    return group


def refuse_unknown(what: str, given: Mapping[str, Any], known: frozenset[str]) -> None:
    """Raises QuantisationUnsupported where an object of a config has a field that is not known here, and is set: it may
    change what the codes stand for."""
    unknown = sorted(
        shown(name, 40).strip("'") for name, value in given.items() if name not in known and value
    )
    if unknown:
        raise QuantisationUnsupported(
            f"{what} has settings that are not known here, and may change the weights: {', '.join(unknown[:5])}"
        )


def group_size(value: object) -> int:
    """Inputs of a group by a config; -1 for a scale a row. Raises QuantisationUnsupported."""
    if value is None or (type(value) is int and value == -1):
        return -1
    if type(value) is not int or not 2 <= value <= 1 << 20:
        raise QuantisationUnsupported(f"quantization_config has the group size {shown(value, 20)}")
    return value
