"""Linears as codes in groups, made at the load or as the checkpoint stores them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch

from loraplex.adapters.base_weights.grouped import Grouped, NotFinite, quantise_int8, stack
from loraplex.engine.model.base import ModelUnsupported
from loraplex.kernels.linear.groups import GroupedWeight
from loraplex.kernels.linear.humming import LibraryFailed
from loraplex.kernels.linear.packed import PackedLinear
from loraplex.kernels.ops import Ops
from loraplex.kernels.weight_form import WeightForm


class StoredTensors(Protocol):
    """A checkpoint's tensors as they are stored."""

    def read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The tensor, in its own dtype, on the CPU. Raises ModelUnsupported where none has this name and shape."""
        ...

    def is_codes(self, module: str) -> bool: ...

    def codes(self, module: str) -> Grouped | None:
        """The codes of a module's weight; None where it is stored as floats. Raises ModelUnsupported."""
        ...


class PackedReader(Protocol):
    """A reader of linears that are more than floats, such as a `CodeReader`."""

    def stores(self, module: str) -> bool:
        """Whether the checkpoint has codes of a module."""
        ...

    def read(self, modules: Mapping[str, tuple[int, int]]) -> PackedLinear | None:
        """The weights of these modules, by their shapes [rows, K], one behind the other; None where they are floats
        that stay floats. Raises ModelUnsupported."""
        ...


class CodeReader:
    """Reads linears as codes. `quantise`: those that are stored as floats too. Memory beside the codes is that of a
    site group's linears."""

    def __init__(
        self, tensors: StoredTensors, ops: Ops, dtype: torch.dtype, form: WeightForm, *, quantise: bool
    ) -> None:
        """`dtype`: of the model's rows."""
        self._tensors = tensors
        self._pack = ops.pack
        self._dtype = dtype
        self._form = form
        self._quantise = quantise

    def stores(self, module: str) -> bool:
        return self._tensors.is_codes(module)

    def read(self, modules: Mapping[str, tuple[int, int]]) -> PackedLinear | None:
        if not self._quantise and not all(map(self._tensors.is_codes, modules)):
            # A module that a quantising tool has left out makes floats of those that are multiplied with it.
            return None
        found = {module: self._codes(module, shape) for module, shape in modules.items()}
        whole = stack(list(found.values()))
        offsets = None if whole.offsets is None else torch.from_numpy(whole.offsets)
        weight = GroupedWeight(
            torch.from_numpy(whole.codes), torch.from_numpy(whole.scales), offsets, whole.group
        )
        try:
            return self._pack(weight, self._form, self._dtype)
        except LibraryFailed as error:
            raise ModelUnsupported(f"{', '.join(found)}: {error}") from error

    def _codes(self, module: str, shape: tuple[int, int]) -> Grouped:
        found = self._tensors.codes(module)
        if found is not None:
            if found.codes.shape != shape:
                raise ModelUnsupported(
                    f"{module}.weight has the shape {list(found.codes.shape)}, not {list(shape)}"
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
