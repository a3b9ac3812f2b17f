"""The routed experts of a base: how many each layer has and how wide they are, from the names and shapes of its
tensors."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loraplex.adapters.spec import ExpertShape, ExpertSite, TensorSlice

SPELLINGS = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
"""Names of an expert's linears in checkpoints: gate, up and down."""
_SITES: tuple[ExpertSite, ...] = ("gate", "up", "down")
LEAVES: Mapping[str, ExpertSite] = {
    leaf: site for names in SPELLINGS for leaf, site in zip(names, _SITES, strict=True)
}
"""The site of an expert's linear by its name."""
_EXPERTS = r"(.*layers\.(\d{1,6})\.(?:.*\.)?experts)"
_LINEAR = re.compile(rf"{_EXPERTS}\.(\d{{1,6}})\.({'|'.join(LEAVES)})")
_STACK = re.compile(rf"{_EXPERTS}\.(gate_up_proj|down_proj)(_blocks)?")
_BLOCK = 32
"""Inputs of a block of MXFP4, whose tensors have two dimensions for them."""

_MOST_EXPERTS = 1 << 12


@dataclass(frozen=True, slots=True)
class Columns:
    """The columns of a matrix [in, columns] that make a linear [out, in]: each `step`-th from `first` on, as a row."""

    first: int
    step: int

    def take(self, stored: NDArray[Any], shape: tuple[int, ...]) -> NDArray[Any]:
        """The linear of this shape, of the numbers of the whole matrix."""
        rows, inputs = shape
        return np.ascontiguousarray(stored.reshape(inputs, rows * self.step)[:, self.first :: self.step].T)


def split_stack(
    name: str, tensor: TensorSlice, linears: tuple[str, ...], *, in_turns: bool = False
) -> Iterator[tuple[str, TensorSlice, Columns | None]]:
    """A tensor of a checkpoint; where it is a stack of the weights of experts, with the linears gate, up and down of
    these names, each of these. Gate and up lie in one stack.

    A stack is [experts, out, in], gate before up. `in_turns`: it is [experts, in, out], with gate and up in turns; a
    linear is then of the columns that are told, and its slice has the bytes of the whole matrix."""
    found = _STACK.fullmatch(name.removesuffix(".weight")) if linears else None
    parts = linears[:2] if found and found[3] == "gate_up_proj" else linears[2:]
    shape = (
        tensor.shape if not in_turns or len(tensor.shape) != 3 else (tensor.shape[0], *tensor.shape[:0:-1])
    )
    if found is None or found[4] or not _is_stack(shape, len(parts)):
        yield name, tensor, None
        return
    count, rows, inputs = shape
    size = (tensor.end - tensor.start) // count
    if not in_turns:
        size //= len(parts)
    for number in range(count * len(parts)):
        expert, part = divmod(number, len(parts))
        start = tensor.start + (expert if in_turns else number) * size
        own = TensorSlice(tensor.dtype, (rows // len(parts), inputs), start, start + size)
        columns = Columns(part, len(parts)) if in_turns else None
        yield f"{found[1]}.{expert}.{parts[part]}.weight", own, columns


def _is_stack(shape: tuple[int, ...], parts: int) -> bool:
    return len(shape) == 3 and 1 <= shape[0] <= _MOST_EXPERTS and shape[1] % parts == 0


def find_experts(
    linears: Mapping[str, tuple[int, int]],
    tensors: Mapping[str, tuple[int, ...]],
    num_layers: int,
    *,
    in_turns: bool = False,
) -> dict[int, ExpertShape]:
    """The experts by layer, of the linears' [out_features, in_features] by path and of all tensors' shapes by name.

    A checkpoint has a tensor for each linear of each expert, or stacks of them: [experts, out, in], [experts, in, out]
    (gpt-oss), or blocks of MXFP4 [experts, out, in / 32, 16]. A layer whose experts have other linears than gate, up
    and down, or are not of one size, has none here. `in_turns` is that of ExpertShape.
    """
    of_linears: dict[tuple[int, str], dict[str, dict[int, tuple[int, int]]]] = {}
    for path, shape in linears.items():
        if found := _LINEAR.fullmatch(path):
            place = (int(found[2]), found[1])
            of_linears.setdefault(place, {}).setdefault(LEAVES[found[4]], {})[int(found[3])] = shape
    of_stacks: dict[tuple[int, str], dict[str, tuple[int, ...]]] = {}
    for name, sizes in tensors.items():
        if found := _STACK.fullmatch(name.removesuffix(".weight")):
            whole = (sizes[0], sizes[1], sizes[2] * _BLOCK) if found[4] and len(sizes) == 4 else sizes
            of_stacks.setdefault((int(found[2]), found[1]), {})[found[3]] = whole
    shapes = [_of_linears(place, sites) for place, sites in of_linears.items()]
    shapes += [_of_stacks(place, stacks) for place, stacks in of_stacks.items()]
    return {
        shape.layer: replace(shape, in_turns=in_turns)
        for shape in shapes
        if shape is not None and shape.layer < num_layers
    }


def _of_linears(
    place: tuple[int, str], sites: Mapping[str, Mapping[int, tuple[int, int]]]
) -> ExpertShape | None:
    if sites.keys() != {"gate", "up", "down"}:
        return None
    count = len(sites["gate"])
    if any(of.keys() != set(range(count)) for of in sites.values()):
        return None
    sizes = {site: set(of.values()) for site, of in sites.items()}
    (inner, hidden), *others = sizes["gate"]
    if others or sizes["up"] != {(inner, hidden)} or sizes["down"] != {(hidden, inner)}:
        return None
    return ExpertShape(place[0], place[1], count, hidden, inner)


def _of_stacks(place: tuple[int, str], stacks: Mapping[str, tuple[int, ...]]) -> ExpertShape | None:
    gate_up, down = stacks.get("gate_up_proj", ()), stacks.get("down_proj", ())
    if len(gate_up) != 3 or len(down) != 3 or gate_up[0] != down[0]:
        return None
    count, first, second = gate_up
    for outputs, hidden, turned in ((first, second, False), (second, first, True)):
        inner = outputs // 2
        if outputs == 2 * inner and down[1:] == ((inner, hidden) if turned else (hidden, inner)):
            return ExpertShape(place[0], place[1], count, hidden, inner)
    return None
