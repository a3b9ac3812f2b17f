"""Linears that are not floats of the model's dtype: as the checkpoint stores them, or as codes made at the load."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import torch

from loraplex.adapters.base_weights.fp8 import stack_floats
from loraplex.adapters.base_weights.grouped import NotFinite, quantise_int8, stack
from loraplex.engine.model.base import ModelUnsupported
from loraplex.engine.model.weights import Checkpoint
from loraplex.kernels.linear.humming import LibraryFailed
from loraplex.kernels.linear.packed import PackedLinear
from loraplex.kernels.linear.stored import FloatWeight, GroupedWeight
from loraplex.kernels.ops import Ops
from loraplex.kernels.weight_form import WeightForm


class PackedReader(Protocol):
    """A reader of linears that are more than floats, such as a `LinearReader`."""

    def stores(self, module: str) -> bool:
        """Whether the checkpoint has codes of a module."""
        ...

    def read(self, modules: Mapping[str, tuple[int, int]]) -> PackedLinear | None:
        """The weights of these modules, by their shapes [rows, K], one behind the other; None where they are floats
        that stay floats. Raises ModelUnsupported."""
        ...


class LinearReader:
    """A `PackedReader` of a form. `quantise`: what is stored as floats becomes codes too. Memory beside the weights is
    that of a site group's linears. 8-bit floats that are computed as one become floats of the model's dtype where one
    of them is stored so, or their scales have groups of several sizes, or of one that kernels do not multiply."""

    def __init__(
        self, tensors: Checkpoint, ops: Ops, dtype: torch.dtype, form: WeightForm, *, quantise: bool
    ) -> None:
        """`dtype`: of the model's rows."""
        self._tensors = tensors
        self._pack = ops.pack
        self._dtype = dtype
        self._form = form
        self._quantise = quantise

    def stores(self, module: str) -> bool:
        return self._tensors.stores(module, self._form.codes)

    def read(self, modules: Mapping[str, tuple[int, int]]) -> PackedLinear | None:
        if not self._quantise and not all(map(self.stores, modules)):
            # A module that a quantising tool has left out makes floats of those that are multiplied with it.
            return None
        parts: list[Any] = [self._part(module, shape) for module, shape in modules.items()]
        if any(part is None for part in parts):
            return None
        whole = stack_floats(parts) if self._form.codes == "float8" else stack(parts)
        if whole is None or not self._form.fits(whole.group, whole.shape[1]):
            return None
        try:
            return self._pack(whole.map(_as_tensor), self._form, self._dtype)
        except LibraryFailed as error:
            raise ModelUnsupported(f"{', '.join(modules)}: {error}") from error

    def _part(self, module: str, shape: tuple[int, int]) -> GroupedWeight | FloatWeight | None:
        if self.stores(module):
            found = self._tensors.stored(module)
            if found is not None and found.shape != shape:
                raise ModelUnsupported(
                    f"{module}.weight has the shape {list(found.shape)}, not {list(shape)}"
                )
            return found
        try:
            return quantise_int8(_as_numpy(self._tensors.read(f"{module}.weight", shape)))
        except NotFinite as error:
            raise ModelUnsupported(f"{module}.weight: {error}") from error


def _as_numpy(tensor: torch.Tensor) -> Any:
    if tensor.dtype is torch.bfloat16:
        import ml_dtypes

        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def _as_tensor(array: Any) -> torch.Tensor:
    if array.dtype.itemsize == 1 and array.dtype != np.int8:
        return torch.from_numpy(array.view(np.uint8)).view(torch.float8_e4m3fn)
    return torch.from_numpy(array)
