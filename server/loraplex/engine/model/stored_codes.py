"""Linears read from a checkpoint as codes of 8 bits in groups."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch

from loraplex.adapters.base_weights.grouped import NotFinite, quantise_int8
from loraplex.engine.model.base import ModelUnsupported
from loraplex.kernels.linear.groups import GroupedWeight
from loraplex.kernels.ops import Ops


class StoredTensors(Protocol):
    """A checkpoint's tensors as they are stored."""

    def read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The tensor, in its own dtype, on the CPU. Raises ModelUnsupported where none has this name and shape."""
        ...


class CodeReader:
    """Quantises linears of 16 or 32 bits while they are read: memory beside the codes is that of one tensor."""

    def __init__(self, tensors: StoredTensors, ops: Ops, dtype: torch.dtype) -> None:
        """`dtype`: of the model's rows. `ops` must have `pack_groups`."""
        assert ops.pack_groups is not None
        self._tensors = tensors
        self._pack = ops.pack_groups
        self._dtype = dtype

    def read(self, modules: Mapping[str, tuple[int, int]]) -> Any:
        """The weights of these modules, by their shapes [rows, K], one behind the other, packed for `Ops.linear`.
        Raises ModelUnsupported."""
        inputs = {shape[1] for shape in modules.values()}
        rows = sum(shape[0] for shape in modules.values())
        (width,) = inputs
        codes = torch.empty(rows, width, dtype=torch.int8)
        scales: list[torch.Tensor] = []
        first = group = 0
        for module, shape in modules.items():
            stored = self._tensors.read(f"{module}.weight", shape)
            try:
                found = quantise_int8(_as_numpy(stored))
            except NotFinite as error:
                raise ModelUnsupported(f"{module}.weight: {error}") from error
            codes[first : first + shape[0]] = torch.from_numpy(found.codes)
            scales.append(torch.from_numpy(found.scales))
            first, group = first + shape[0], found.group
        return self._pack(GroupedWeight(codes, torch.cat(scales), None, group), self._dtype)


def _as_numpy(tensor: torch.Tensor) -> Any:
    if tensor.dtype is torch.bfloat16:
        import ml_dtypes

        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()
