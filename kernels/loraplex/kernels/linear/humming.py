"""A base linear over 4-bit codes by humming-kernels, on a GPU where it is installed (`pip install loraplex[humming]`).

The library takes what a checkpoint stores: codes from 0 to 15, where 8 stands for 0, eight to a word of 32 bits, the
first input in the lowest bits; and a scale for each output and group in the dtype of x. It lays them out for the GPU
itself, and compiles its kernels for a linear's shape when the first such weight is packed. It chooses them by the
number of rows, so a row's bits depend on how many lie beside it (docs/lab/README.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from loraplex.kernels.failures import describe_failure
from loraplex.kernels.linear.packed import PackedLinear
from loraplex.kernels.linear.stored import GroupedWeight

PACKAGE = "humming-kernels"
VERSION = "0.1.19"
"""The version that was tried. Private: layers and their tensors, which any release may change."""
NAME = f"{PACKAGE} {VERSION}"
_INSTALL = "pip install 'loraplex[humming]'"
_GROUPS = (32, 64, 128)
_ZERO, _MOST_CODE = 8, 7
_MULTIPLE = 64
"""Inputs and outputs are multiples of it."""


class LibraryFailed(RuntimeError):
    """The library is not there, or could not make a linear."""


@dataclass(frozen=True, slots=True)
class LibraryWeight(PackedLinear):
    """A weight as the library's `layer`, whose memory is `tensors`."""

    layer: Any
    tensors: tuple[torch.Tensor, ...]

    @property
    def library(self) -> str:
        return NAME

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """A bias is added to the rounded sums."""
        columns, inputs = self.shape
        if x.shape[-1] != inputs or x.dtype is not self.dtype or not x.is_contiguous():
            raise ValueError(
                f"no product of {list(x.shape)} {x.dtype} with codes {list(self.shape)} for {self.dtype}"
            )
        rows = x.view(-1, inputs)
        if not rows.shape[0]:
            return torch.empty(*x.shape[:-1], columns, dtype=x.dtype, device=x.device)
        y: torch.Tensor = self.layer(rows)
        if bias is not None:
            y += bias
        return y.view(*x.shape[:-1], columns)


def obstacle_to(device: torch.device, *, batch_invariant: bool) -> str | None:
    """Why the library does not multiply on `device`; None where it does. It is not imported."""
    if batch_invariant:
        return f"{PACKAGE} does not keep a row's bits"
    if device.type != "cuda":
        return f"{PACKAGE} is for GPUs"
    try:
        found = version(PACKAGE)
    except PackageNotFoundError:
        return f"{PACKAGE} is not installed"
    return None if found == VERSION else f"{PACKAGE} {found} is not {VERSION}, which was tried: {_INSTALL}"


def obstacle_to_group(group: int, dtype: torch.dtype) -> str | None:
    """Why the library does not multiply x of `dtype` with codes in groups of `group` inputs; None where it does."""
    if dtype not in (torch.bfloat16, torch.float16):
        return f"{PACKAGE} is for 16 bits, and the model's dtype is {str(dtype).removeprefix('torch.')}"
    if group not in _GROUPS:
        return f"{PACKAGE} is used for groups of {', '.join(map(str, _GROUPS))} inputs"
    return None


def pack_codes(weight: GroupedWeight, dtype: torch.dtype, *, device: torch.device) -> LibraryWeight | None:
    """The weight on `device`; None where the library does not have its form: offsets, codes outside of −8 … 7, scales
    that `dtype` does not hold, other groups, other shapes. Raises LibraryFailed."""
    columns, inputs = weight.shape
    is_shaped = weight.offsets is None and not columns % _MULTIPLE and not inputs % _MULTIPLE
    if not is_shaped or obstacle_to_group(weight.group, dtype) is not None:
        return None
    codes, scales = weight.codes.to(device), weight.scales.to(device)
    if int(codes.min()) < -_ZERO or int(codes.max()) > _MOST_CODE:
        return None
    narrow = scales.to(dtype)
    if not torch.equal(narrow.float(), scales):
        return None
    make = _layer_type()
    try:
        config = {"dtype": "int4", "group_size": weight.group}
        layer = make(columns, inputs, weight_config=config, torch_dtype=dtype).to(device)
        layer.load_from_tensors({"weight": _words(codes), "weight_scale": narrow})
        layer.transform()
        # Compiled here, where a failure has words, and not in the first step or recording.
        layer(torch.zeros(1, inputs, dtype=dtype, device=device))
    except Exception as error:  # of any kind: a compiler, a driver and a GPU that may not fit together
        raise LibraryFailed(
            f"{describe_failure(PACKAGE, error)} (a linear of {inputs} inputs and {columns} outputs in groups of "
            f"{weight.group}); without the package Triton's kernels serve it: pip uninstall {PACKAGE}"
        ) from error
    return LibraryWeight(weight.shape, dtype, layer, tuple(layer.parameters()))


def _words(codes: torch.Tensor) -> torch.Tensor:
    """[N, K] int8 of −8 … 7 → [N, K / 8] int32."""
    nibbles = (codes + _ZERO).view(*codes.shape[:-1], -1, 2)
    return (nibbles[..., 0] | nibbles[..., 1] << 4).view(torch.int32)


def _layer_type() -> Any:
    """The library's type of linears. Raises LibraryFailed."""
    try:
        from humming.layer import HummingLayer
    except ModuleNotFoundError as error:
        if error.name != "humming":
            raise LibraryFailed(f"{describe_failure(PACKAGE, error)}: {_INSTALL}") from error
        raise LibraryFailed(f"{PACKAGE} is not installed: {_INSTALL}") from error
    except Exception as error:  # of any kind: what is installed does not fit together
        raise LibraryFailed(f"{describe_failure(PACKAGE, error)}: {_INSTALL}") from error
    return HummingLayer
