"""How the weights of linears are kept and multiplied, decided before one is read, and the memory that they take.

It needs neither torch nor a GPU: a plan for another machine has the same answers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

ACTIVATION_GROUP = 32
"""Inputs that share a scale where activations are rounded to 8 bits."""
PLANES = 4
"""Codes of 4 bits in a word of 16 bits: of inputs that lie a quarter of a block apart."""
_BLOCKS = (128, 64)
"""Inputs of a block: a tensor core takes a plane of 16 inputs or more."""
_LEAST_GROUP, _FLOATS_BLOCK = 16, 64


@dataclass(frozen=True, slots=True)
class WeightForm:
    """The form of a linear's weight: as a checkpoint stores it (a scheme of `adapters.base_weights` says so), or as a
    backend multiplies with it (`served_form`)."""

    codes: Literal["floats", "groups", "float8"] = "floats"
    """Floats of the model's dtype, whole numbers in groups (`GroupedWeight`), or e4m3 (`FloatWeight`)."""
    bits: int = 0
    """Bits of a code: 4 or 8; 0: the numbers are of the model's dtype. With int8 activations the most bits: x keeps
    its dtype where the codes of a weight need more."""
    group: int = 0
    """Inputs that share a scale; 0: all of a row."""
    activations: Literal["", "int8", "float8"] = ""
    """The numbers that x is rounded to for a product, with scales for each row; empty: x stays in the model's dtype. As
    stored: what the checkpoint is made for."""
    zeros: Literal["", "whole", "floats"] = ""
    """Numbers that a group has beside its scale: none, a code that stands for 0, or a float that is added."""
    scale_bytes: int = 2
    """Bytes of a scale: 4 where 16 bits do not hold it."""

    def fits(self, group: int, inputs: int) -> bool:
        """Whether kernels multiply weights of this form in groups of that many inputs."""
        return self.codes != "float8" or fits_tiles(group, inputs)

    def row_bytes(self, inputs: int, itemsize: int, backend: str) -> int:
        """Memory of one output's weights, scales and offsets in this form, which `backend` serves. `itemsize`: of the
        model's dtype."""
        group = self.group or inputs
        count, has_zeros = inputs // group, self.zeros != ""
        if self.codes == "floats" or not self.fits(group, inputs):
            return inputs * itemsize
        if self.codes == "float8":
            return inputs + 4 * count
        if self.activations == "int8":
            # Codes of 4 bits are counted from the least of a group on, which gives each an offset.
            numbers = 1 if self.bits == 8 and not has_zeros else 2
            # 16 bits do not hold the product of a scale and a zero.
            return inputs * self.bits // 8 + count * numbers * (
                4 if self.zeros == "whole" else self.scale_bytes
            )
        if self.bits == 4 and backend == "triton" and block_of_4_bits(inputs, group) is not None:
            beside = {"": 0, "whole": 1, "floats": self.scale_bytes}[self.zeros]
            return inputs // 2 + count * (self.scale_bytes + beside)
        # Zeros of 4 bits are taken off the codes.
        has_offsets = self.zeros == "floats" or (has_zeros and self.bits == 8)
        return inputs + count * (8 if has_offsets else 4)


FLOATS = WeightForm()
"""Linears in the model's dtype."""


def served_form(stored: WeightForm, backend: str, *, round_activations: bool) -> WeightForm:
    """The form in which `backend` ("torch", "numba", "triton") multiplies with what a checkpoint stores.
    `round_activations`: x may be rounded to 8 bits where that is faster: all codes of 4 bits, and those of 8 bits of a
    checkpoint that is made for it."""
    if stored.codes == "float8":
        return stored if backend == "triton" else FLOATS
    if stored.codes == "floats":
        return stored
    rounds = (
        backend == "numba"
        and round_activations
        and (stored.bits == 4 or stored.activations == "int8")
        and stored.group % ACTIVATION_GROUP == 0
    )
    return replace(stored, activations="int8" if rounds else "")


def block_of_4_bits(inputs: int, group: int) -> int | None:
    """Inputs of a block of words of 4-bit codes, for a weight of `inputs` in groups of `group`; None where a plane
    of no block is part of a group."""
    fits = (block for block in _BLOCKS if inputs % block == 0 and group % (block // PLANES) == 0)
    return next(fits, None)


def fits_tiles(group: int, inputs: int) -> bool:
    """Whether each row of a GPU's tile of 8-bit floats has one scale: groups of inputs are whole rows, or whole blocks
    of K."""
    return group == inputs or (
        inputs % group == 0
        and group >= _LEAST_GROUP
        and (group % _FLOATS_BLOCK == 0 or (group < _FLOATS_BLOCK and group & (group - 1) == 0))
    )
