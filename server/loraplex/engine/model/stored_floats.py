"""Linears in 8-bit floats, kept as the checkpoint stores them: for kernels that multiply with them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from loraplex.engine.model.base import ModelUnsupported
from loraplex.engine.model.stored_codes import CodeReader, PackedReader
from loraplex.engine.model.weights import Checkpoint
from loraplex.kernels.linear.packed import FloatWeight, PackedLinear
from loraplex.kernels.ops import Ops
from loraplex.kernels.weight_form import WeightForm, fits_tiles


class FloatReader:
    """A `PackedReader` of 8-bit floats. Linears that are computed as one are read as floats of the model's dtype where
    one of them is stored so, or their scales have groups of several sizes, or of one that kernels do not multiply."""

    def __init__(self, tensors: Checkpoint, ops: Ops, dtype: torch.dtype, form: WeightForm) -> None:
        """`dtype`: of the model's rows."""
        self._tensors = tensors
        self._pack = ops.pack
        self._dtype = dtype
        self._form = form

    def stores(self, module: str) -> bool:
        return self._tensors.is_floats(module)

    def read(self, modules: Mapping[str, tuple[int, int]]) -> PackedLinear | None:
        if not all(self.stores(module) for module in modules):
            return None
        parts = []
        for module, shape in modules.items():
            part = self._tensors.floats(module)
            if part is None:
                return None
            if part.values.shape != shape:
                raise ModelUnsupported(
                    f"{module}.weight has the shape {list(part.values.shape)}, not {list(shape)}"
                )
            parts.append(part)
        if len({part.scales.shape[1] for part in parts}) > 1:
            return None
        values = np.concatenate([part.values.view(np.uint8) for part in parts])
        scales = np.concatenate([part.scales for part in parts])
        weight = FloatWeight(
            torch.from_numpy(values).view(torch.float8_e4m3fn),
            torch.from_numpy(scales),
            all(part.activations for part in parts),
        )
        if not fits_tiles(weight.group, values.shape[1]):
            return None
        return self._pack(weight, self._form, self._dtype)


def packed_reader(
    checkpoint: Checkpoint, ops: Ops, dtype: torch.dtype, form: WeightForm, *, quantise: bool
) -> PackedReader | None:
    """The reader of linears in a `form`; None where all are floats of the model's dtype. `quantise`: those that the
    checkpoint stores as floats become codes."""
    if form.codes == "groups":
        return CodeReader(checkpoint, ops, dtype, form, quantise=quantise)
    if form.codes == "float8":
        return FloatReader(checkpoint, ops, dtype, form)
    return None
