"""Writing an upload's two files again in another form, before they are validated and stored."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from loraplex.adapters.errors import ArtifactCorrupt
from loraplex.adapters.spec import TensorSlice
from loraplex.adapters.store.artifact_store import Staging
from loraplex.adapters.store.fault_points import FaultPoint
from loraplex.adapters.store.files import create_file, open_regular, read_into, write_all

_COPIED = 1 << 20
"""Bytes that are copied at a time."""


def replace_config(staging: Staging, config: Mapping[str, Any]) -> None:
    """Raises OSError."""
    path = staging.directory / "converted-config"
    with _create(staging, path) as file:
        _write(staging, path, file, json.dumps(config, indent=2).encode() + b"\n")
    path.replace(staging.config_path)


def replace_tensors(
    staging: Staging,
    tensors: Mapping[str, tuple[str, tuple[int, ...], int]],
    fill: Callable[[str, BinaryIO, int], None],
) -> None:
    """Replace the tensors' file by one of `tensors`: dtype, shape and bytes by name. `fill` writes a named tensor,
    which begins at a place of the file. Raises OSError, and what `fill` raises."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    starts: dict[str, int] = {}
    at = 0
    for name, (dtype, shape, size) in tensors.items():
        starts[name] = at
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path = staging.directory / "converted-tensors"
    with _create(staging, path) as file:
        _write(staging, path, file, len(text).to_bytes(8, "little") + text)
        for name, start in starts.items():
            staging.fault(FaultPoint.UNPACK_WRITE, path)
            fill(name, file, 8 + len(text) + start)
    path.replace(staging.tensors_path)


def alpha_of(scale: float, divisor: float) -> float:
    """The lora_alpha whose quotient by `divisor`, a rank or its root, is `scale` in float64: at once for a power of
    two, among the neighbours of scale · divisor for most others. For the rest the quotient differs by one unit of
    float64 and is the same float32, in which the engine multiplies."""
    first = scale * divisor
    near = [first]
    for away in (math.inf, -math.inf):
        value = first
        for _ in range(2):
            value = math.nextafter(value, away)
            near.append(value)
    exact = (alpha for alpha in near if alpha / divisor == scale)
    alike = (alpha for alpha in near if np.float32(alpha / divisor) == np.float32(scale))
    return next(exact, next(alike, first))


def copy_tensor(source: Path, tensor: TensorSlice, into: BinaryIO) -> None:
    """The bytes of a tensor, a MiB at a time. Raises ArtifactCorrupt, OSError."""
    left = tensor.end - tensor.start
    buffer = memoryview(bytearray(min(left, _COPIED)))
    with open_regular(source) as file:
        file.seek(tensor.start)
        while left:
            part = buffer[: min(left, _COPIED)]
            if read_into(file, part) < len(part):
                raise ArtifactCorrupt("the tensor file became shorter while it was read")
            write_all(into, part)
            left -= len(part)


def _create(staging: Staging, path: Path) -> BinaryIO:
    staging.fault(FaultPoint.UNPACK_CREATE, path)
    return create_file(path)


def _write(staging: Staging, path: Path, file: BinaryIO, data: bytes) -> None:
    staging.fault(FaultPoint.UNPACK_WRITE, path)
    write_all(file, data)
