"""The base in one form: a checkpoint's tensors, its linears changed as that form changes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from loraplex.adapters.admission.base_model import BaseTensor, BaseWeights, locate_tensors
from loraplex.adapters.admission.trained_base import INT8_ROWS, NF4
from loraplex.adapters.base_weights.grouped import NotFinite, quantise_int8
from loraplex.adapters.base_weights.nf4 import quantise_nf4
from loraplex.adapters.errors import BaseModelInvalid
from loraplex.adapters.spec import BaseSpec
from loraplex.adapters.store.tensors import NUMPY_DTYPES, iter_rows
from loraplex.engine.model.base import ModelUnsupported
from loraplex.kernels.linear.packed import PackedLinear
from loraplex.kernels.lora.site_groups import EMBEDDING, HEAD

_FLOAT32 = np.dtype(np.float32)


def _int8_rows(weight: NDArray[np.float32]) -> NDArray[np.float32]:
    """bitsandbytes' int8: a scale a row. What it rounds of the inputs is no property of the base."""
    dense: NDArray[np.float32] = quantise_int8(weight, group=weight.shape[1]).dense()
    return dense


_MADE: dict[str, Callable[[NDArray[np.float32]], NDArray[np.float32]]] = {
    NF4: quantise_nf4,
    INT8_ROWS: _int8_rows,
}
"""The forms that bitsandbytes makes of the linears of layers as it loads a checkpoint. It leaves the head."""


@dataclass(frozen=True, slots=True)
class StreamedWeight(PackedLinear):
    """A weight [N, K] that is read whenever it is multiplied: that of these sites, one behind the other."""

    weights: BaseWeights
    sites: list[tuple[int, str]]

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Holds one module's weight at most. Raises ModelUnsupported where N is another."""
        columns = self.shape[0]
        y = torch.empty(len(x), columns, dtype=x.dtype)
        first = 0
        for layer, site in self.sites:
            for rows in self.weights.rows(layer, site, _FLOAT32):
                last = first + len(rows)
                if last > columns:
                    raise ModelUnsupported(f"{site} of layer {layer} has more outputs than the config says")
                torch.mm(x, torch.from_numpy(rows).T, out=y[:, first:last])
                first = last
        if first < columns:
            raise ModelUnsupported(f"{site} of layer {layer} has fewer outputs than the config says")
        return y if bias is None else y.add_(bias)


class _MadeWeights(BaseWeights):
    """The base's linears as a tool of `_MADE` has them."""

    def __init__(self, base: BaseSpec, form: str) -> None:
        super().__init__(base)
        self._make = _MADE[form]

    def rows(self, layer: int, site: str, served: np.dtype[Any]) -> Iterator[NDArray[np.float32]]:
        pieces = super().rows(layer, site, served)
        if site in (HEAD, EMBEDDING):
            yield from pieces
            return
        try:
            yield self._make(np.concatenate(list(pieces)))
        except NotFinite as error:
            raise BaseModelInvalid(f"{site} of layer {layer}: {error}") from error


class BaseInForm:
    """The tensors of a base in float32, for a `DecoderReader`: a `TensorSource` of those that it holds, and a
    `PackedReader` of the linears and the head, which are read as they are multiplied. `weights` are these too, for what
    else is computed from them."""

    def __init__(self, base: BaseSpec, form: str = "") -> None:
        """`form`: one that bitsandbytes makes of the checkpoint; any other stands for what the engine serves of `base`.
        Raises BaseModelInvalid."""
        self.weights = _MadeWeights(base, form) if form in _MADE else BaseWeights(base)
        self._tensors: dict[str, BaseTensor] = locate_tensors(Path(base.model_dir))
        self._sites = {shape.module_path: key for key, shape in base.sites.items()}

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def read_into(self, name: str, out: torch.Tensor) -> None:
        found = self._tensors.get(name)
        if found is None or found.tensor.dtype not in NUMPY_DTYPES or found.tensor.shape != tuple(out.shape):
            raise ModelUnsupported(f"the checkpoint has no floats {name} of the shape {list(out.shape)}")
        with np.errstate(over="ignore"):
            out.copy_(torch.from_numpy(found.read().astype(_FLOAT32)))

    def stores(self, module: str) -> bool:
        return False  # as codes of a module's own

    def read(self, modules: Mapping[str, tuple[int, int]]) -> StreamedWeight:
        """The weight of these modules, one behind the other. Raises ModelUnsupported where the base lacks one."""
        sites = []
        for module in modules:
            if module not in self._sites:
                raise ModelUnsupported(f"the checkpoint has no linear {module}")
            sites.append(self._sites[module])
        rows, inputs = zip(*modules.values(), strict=True)
        return StreamedWeight((sum(rows), inputs[0]), torch.float32, self.weights, sites)

    def embeddings(self, token_ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """[n, C] of token ids [n], ascending. Raises ModelUnsupported for one beyond the vocabulary."""
        return _rows_of(self.weights.rows(0, EMBEDDING, _FLOAT32), token_ids)

    def table_rows(self, name: str, token_ids: NDArray[np.int64]) -> torch.Tensor:
        """The same of another table by token, which the checkpoint has as floats."""
        found = self._tensors.get(name)
        if found is None or found.tensor.dtype not in NUMPY_DTYPES or len(found.tensor.shape) != 2:
            raise ModelUnsupported(f"the checkpoint has no table {name} of floats")
        rows = (part.astype(_FLOAT32) for part in iter_rows(found.path, found.tensor))
        return torch.from_numpy(_rows_of(rows, token_ids))


def _rows_of(parts: Iterator[NDArray[np.float32]], token_ids: NDArray[np.int64]) -> NDArray[np.float32]:
    found = []
    first = 0
    for rows in parts:
        last = first + len(rows)
        found.append(rows[token_ids[(token_ids >= first) & (token_ids < last)] - first])
        first = last
    if len(token_ids) and not 0 <= token_ids[0] <= token_ids[-1] < first:
        raise ModelUnsupported(f"the tokenizer has a token beyond the {first} of the base")
    return np.concatenate(found)
