"""Linears in 8-bit floats (e4m3), as DeepSeek's and llm-compressor's tools store them. A GPU may multiply
with them as they are; elsewhere they are served in the model's dtype: the products of value and scale, in float32, are
what an engine rounds.

`weight` F8_E4M3 [N, K], with `weight_scale` (one for all, [N, 1], or one for each block) or DeepSeek's
`weight_scale_inv` (for blocks of 128 × 128), which is multiplied too, whatever its name says.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loraplex.adapters.base_weights.scheme import Scheme
from loraplex.adapters.base_weights.tensors import QuantisationUnsupported, QuantisedTensors, refuse_unknown
from loraplex.adapters.store.files import shown
from loraplex.kernels.linear.stored import FloatWeight
from loraplex.kernels.weight_form import WeightForm

_SCALES = ("weight_scale_inv", "weight_scale")
_PIECE_VALUES = 1 << 20
_NO_NUMBER = "{}.weight has a value that is no number"
_KNOWN = frozenset(
    {"quant_method", "fmt", "scale_fmt", "weight_block_size", "ignored_layers", "modules_to_not_convert"}
)


@dataclass(frozen=True, slots=True)
class Fp8(Scheme):
    """A scheme of floats. `block`: rows and inputs that share a scale where there is one for each block.
    `activations` as of `FloatWeight`."""

    suffix = "weight"
    leaves = (*_SCALES, "input_scale")
    block: tuple[int, int] | None
    activations: bool
    name: str = "fp8"

    @property
    def form(self) -> WeightForm:
        group = 0 if self.block is None else self.block[1]
        return WeightForm("float8", 8, group, "float8" if self.activations else "")

    def is_module(self, module: str, tensors: QuantisedTensors) -> bool:
        has_scales = any(f"{module}.{leaf}" in tensors for leaf in _SCALES)
        return has_scales or tensors.dtype(f"{module}.weight") == "F8_E4M3"

    def shape(self, module: str, tensors: QuantisedTensors) -> tuple[int, int]:
        return tensors.matrix(f"{module}.weight")

    def examine(self, module: str, tensors: QuantisedTensors) -> None:
        """All checks of `read` that need no values. Raises QuantisationUnsupported."""
        rows, inputs = self.shape(module, tensors)
        self._scales(module, tensors, rows, inputs)
        tensors.check(f"{module}.weight", ("F8_E4M3",), (rows, inputs))

    def read(self, module: str, tensors: QuantisedTensors) -> FloatWeight | None:
        """The floats as they are stored; None where blocks of inputs do not divide them evenly. Raises
        QuantisationUnsupported."""
        rows, inputs = self.shape(module, tensors)
        scales, width = self._scales(module, tensors, rows, inputs)
        if inputs % width:
            return None
        values = tensors.read(f"{module}.weight", ("F8_E4M3",), (rows, inputs))
        if ((values.view(np.uint8) & 0x7F) == 0x7F).any():
            raise QuantisationUnsupported(_NO_NUMBER.format(module))
        return FloatWeight(values, np.ascontiguousarray(scales), self.activations)

    def dense_rows(self, module: str, tensors: QuantisedTensors) -> Iterator[NDArray[np.float32]]:
        """[n, K], some rows at a time. Raises QuantisationUnsupported."""
        rows, inputs = self.shape(module, tensors)
        scales, width = self._scales(module, tensors, rows, inputs)
        values = tensors.read(f"{module}.weight", ("F8_E4M3",), (rows, inputs))
        for first in range(0, rows, step := max(1, _PIECE_VALUES // inputs)):
            piece = values[first : first + step].astype(np.float32)
            if not np.isfinite(piece).all():
                raise QuantisationUnsupported(_NO_NUMBER.format(module))
            own = scales[first : first + step]
            yield piece * (own if width == inputs else np.repeat(own, width, axis=1)[:, :inputs])

    def _scales(
        self, module: str, tensors: QuantisedTensors, rows: int, inputs: int
    ) -> tuple[NDArray[np.float32], int]:
        """[N, G], and how many inputs have one of a row."""
        name = next((found for leaf in _SCALES if (found := f"{module}.{leaf}") in tensors), None)
        if name is None:
            raise QuantisationUnsupported(f"{module}.weight has no {' or '.join(_SCALES)}")
        shape = tensors.shape(name)
        if shape in ((), (1,), (1, 1)):
            return np.broadcast_to(tensors.scales(name, shape).reshape(1, 1), (rows, 1)), inputs
        if shape in ((rows,), (rows, 1)):
            return tensors.scales(name, shape).reshape(rows, 1), inputs
        if self.block is None:
            raise QuantisationUnsupported(
                f"{name} is {list(shape)}: neither one scale, nor one for each of {rows} rows"
            )
        high, wide = self.block
        blocks = tensors.scales(name, (-(-rows // high), -(-inputs // wide)))
        return np.repeat(blocks, high, axis=0)[:rows], wide


def stack_floats(parts: Sequence[FloatWeight]) -> FloatWeight | None:
    """Weights of as many inputs, one behind the other by rows; None where their groups have several sizes."""
    if len({part.group for part in parts}) > 1:
        return None
    values = np.concatenate([part.values.view(np.uint8) for part in parts]).view(parts[0].values.dtype)
    scales = np.concatenate([part.scales for part in parts])
    return FloatWeight(values, scales, all(part.activations for part in parts))


def read_fp8(config: Mapping[str, Any]) -> Fp8:
    """Raises QuantisationUnsupported."""
    refuse_unknown("fp8", config, _KNOWN | {"activation_scheme"})
    if config.get("fmt", "e4m3") != "e4m3":
        raise QuantisationUnsupported(f"fp8 values {shown(config['fmt'], 20)} are not served: e4m3 is")
    if config.get("activation_scheme") not in (None, "dynamic", "static"):
        raise QuantisationUnsupported(
            f"fp8's activation_scheme {shown(config['activation_scheme'], 20)} is not known here"
        )
    return Fp8(block_size(config.get("weight_block_size")), config.get("activation_scheme") == "dynamic")


def block_size(value: object) -> tuple[int, int] | None:
    """Rows and inputs of a block by a config. Raises QuantisationUnsupported."""
    if value is None:
        return None
    if (
        not isinstance(value, list)
        or len(value) != 2
        or not all(type(size) is int and 1 <= size <= 1 << 20 for size in value)
    ):
        raise QuantisationUnsupported(f"quantization_config has the block size {shown(value, 40)}")
    return value[0], value[1]
