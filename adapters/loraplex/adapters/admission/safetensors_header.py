"""A strict parser for the header of a safetensors file, the only tensor format that is read.

Format (as huggingface/safetensors documents it): 8 bytes little-endian header length N; N bytes of a JSON
object that begins with "{" and may be padded with spaces; then the data. Each key names a tensor with `dtype`,
`shape` and `data_offsets` relative to the data; "__metadata__" maps strings to strings. Tensors lie back to
back: no hole, no overlap, nothing after the last.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, NoReturn

from loraplex.adapters.admission.strict_json import parse_object
from loraplex.adapters.contents.kinds import START_BYTES, identify
from loraplex.adapters.errors import AdapterRefused
from loraplex.adapters.spec import BaseSpec, TensorSlice
from loraplex.adapters.store.files import open_regular, read_into, shown

DTYPE_BITS = {
    "F64": 64,
    "I64": 64,
    "U64": 64,
    "C64": 64,
    "F32": 32,
    "I32": 32,
    "U32": 32,
    "F16": 16,
    "BF16": 16,
    "I16": 16,
    "U16": 16,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "I8": 8,
    "U8": 8,
    "BOOL": 8,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "F4": 4,
}
"""Bits of one element, by the format's own names."""

LENGTH_BYTES = 8
"""Bytes before the header: its length."""
_MAX_DIMS = 8
_MAX_NAME = 512


@dataclass(frozen=True, slots=True)
class HeaderLimits:
    """Limits on a header before it is parsed: bytes of JSON and number of tensors."""

    max_bytes: int
    max_tensors: int


ADAPTER_LIMITS = HeaderLimits(max_bytes=2 << 20, max_tensors=8192)
"""Limits of uploads: 126 layers with seven sites, two matrices and a saved base weight each are 2646 tensors."""

CHECKPOINT_LIMITS = HeaderLimits(max_bytes=100_000_000, max_tensors=1_000_000)
"""Limits of the operator's own base model: the format's own bound."""


_TENSORS_OF_EXPERT = 6
"""lora_A and lora_B of its three linears."""
_BYTES_OF_TENSOR = 256
_LEAST_UPLOAD = 1 << 30


def adapter_limits(base: BaseSpec) -> HeaderLimits:
    """Limits of uploads for a base: an adapter with a pair for each of its experts is within them."""
    experts = sum(shape.count for shape in base.experts.values())
    tensors = max(ADAPTER_LIMITS.max_tensors, _TENSORS_OF_EXPERT * experts + ADAPTER_LIMITS.max_tensors // 2)
    return HeaderLimits(max(ADAPTER_LIMITS.max_bytes, _BYTES_OF_TENSOR * tensors), tensors)


def largest_upload(setting: int | Literal["auto"], base: BaseSpec | None) -> int:
    """Bytes of the files of an upload; `auto`: by the base, or the least where it is not known (None). Four times an
    adapter of rank 8 in 16 bits on every linear is one of rank 16 in float32, in which PEFT saves an adapter over a
    base in 16 bits."""
    if setting != "auto":
        return setting
    if base is None:
        return _LEAST_UPLOAD
    sizes = sum(shape.in_features + shape.out_features for shape in base.sites.values())
    sizes += sum(3 * of.count * (of.hidden_size + of.inner_size) for of in base.experts.values())
    return max(_LEAST_UPLOAD, 4 * 8 * 2 * sizes)


def read_header(path: Path, limits: HeaderLimits = ADAPTER_LIMITS) -> dict[str, TensorSlice]:
    """Every tensor of the file by name, in the order of their bytes.

    Raises AdapterRefused("not_safetensors") for anything that the format does not allow, AdapterRefused
    ("too_large") for a header beyond `limits`, OSError when the file cannot be read.
    """
    raw, size = read_raw_header(path, limits)
    try:
        header = parse_object(raw)
    except ValueError as error:
        _refuse(f"its header is not valid JSON: {error}")
    _check_metadata(header.pop("__metadata__", {}))
    check_count(len(header), limits)
    data_start = LENGTH_BYTES + len(raw)
    slices = {name: _parse_tensor(name, value, data_start) for name, value in header.items()}
    ordered = sorted(slices.items(), key=lambda item: (item[1].start, item[1].end))
    _check_layout(ordered, data_start, size)
    return dict(ordered)


def check_count(tensors: int, limits: HeaderLimits) -> None:
    """Raises AdapterRefused("too_large")."""
    if tensors > limits.max_tensors:
        raise AdapterRefused(
            "too_large", f"the file names {tensors} tensors; at most {limits.max_tensors} are accepted"
        )


def check_length(length: int, limits: HeaderLimits) -> None:
    """Raises AdapterRefused("too_large")."""
    if length > limits.max_bytes:
        raise AdapterRefused(
            "too_large", f"the safetensors header has {length} bytes; at most {limits.max_bytes} are accepted"
        )


def read_raw_header(path: Path, limits: HeaderLimits = ADAPTER_LIMITS) -> tuple[bytes, int]:
    """The header's JSON as it is, and the length of the file. Raises as `read_header` does for what is not read."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        return _read_raw(file, size, limits), size


def check_start(start: bytes, size: int, limits: HeaderLimits = ADAPTER_LIMITS) -> int:
    """The bytes of the header's JSON, by the first START_BYTES bytes of a file of `size` bytes (all of a shorter file).
    Raises AdapterRefused as `read_header` does for what these bytes tell: it names what they are, if they are of a
    known kind."""
    kind = identify(start, size)
    if kind is not None:
        _refuse(f"it is {kind}")
    if len(start) < 8:
        _refuse("it is shorter than the 8 bytes of a header length")
    length = int.from_bytes(start[:8], "little")
    if length > size - 8:
        _refuse(f"its header claims {length} bytes, the file holds {size - 8} after the length")
    check_length(length, limits)
    if not length or start[8:9] != b"{":
        _refuse("its header does not begin with '{'")
    return length


def _read_raw(file: BinaryIO, size: int, limits: HeaderLimits) -> bytes:
    start = bytearray(START_BYTES)
    count = read_into(file, memoryview(start))
    raw = bytearray(check_start(bytes(start[:count]), size, limits))
    known = start[8 : min(count, 8 + len(raw))]
    raw[: len(known)] = known
    if len(known) + read_into(file, memoryview(raw)[len(known) :]) < len(raw):
        _refuse("it ends inside its header")
    return bytes(raw)


def _parse_tensor(name: str, value: Any, data_start: int) -> TensorSlice:
    if not name or len(name) > _MAX_NAME:
        _refuse_tensor(name, f": names have 1 to {_MAX_NAME} characters")
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        _refuse_tensor(name, " must have exactly dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        _refuse_tensor(name, f" has the unknown dtype {shown(dtype)}")
    if not isinstance(shape, list) or len(shape) > _MAX_DIMS or not _are_sizes(shape):
        _refuse_tensor(name, " has a bad shape")
    if not isinstance(offsets, list) or len(offsets) != 2 or not _are_sizes(offsets):
        _refuse_tensor(name, " has bad data_offsets")
    start, end = offsets
    bits = math.prod(shape) * DTYPE_BITS[dtype]
    if end < start or (end - start) * 8 != bits:
        _refuse_tensor(name, f": its data_offsets do not span what dtype {dtype} and its shape need")
    return TensorSlice(dtype, tuple(shape), data_start + start, data_start + end)


def _check_layout(ordered: list[tuple[str, TensorSlice]], data_start: int, size: int) -> None:
    position = data_start
    for name, tensor in ordered:
        if tensor.start != position:
            kind = "overlaps the one before it" if tensor.start < position else "leaves a hole before it"
            _refuse(f"tensor {shown(name)} {kind}")
        position = tensor.end
    if position > size:
        _refuse(f"it is truncated: its tensors end at byte {position}, the file at {size}")
    if position < size:
        _refuse(f"{size - position} bytes follow the last tensor")


def _check_metadata(metadata: Any) -> None:
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        _refuse("its __metadata__ must map strings to strings")


def _are_sizes(values: list[Any]) -> bool:
    # Without a generator, which would take longer than the rest of a tensor's parsing.
    return {*map(type, values)} <= {int} and min(values, default=0) >= 0


def _refuse_tensor(name: str, what: str) -> NoReturn:
    _refuse(f"tensor {shown(name)}{what}")


def _refuse(what: str) -> NoReturn:
    raise AdapterRefused("not_safetensors", f"the tensor file is not valid safetensors: {what}")
