"""A checkpoint whose weights stay in a GGUF file: a model directory that holds the file, or a link to it, as
"model.gguf", and the places of its tensors as "model.gguf.json", by the names that transformers gives them.

`loraplex.app.base_model.gguf_model` writes such a directory. Nothing in it names another file, so that reading one
never leaves it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loraplex.adapters.base_weights.gguf_blocks import FOUR_BITS, KINDS
from loraplex.adapters.base_weights.scheme import Scheme
from loraplex.adapters.base_weights.tensors import QuantisationUnsupported, QuantisedTensors, refuse_unknown
from loraplex.adapters.spec import TensorSlice
from loraplex.adapters.store.files import shown
from loraplex.kernels.linear.stored import GroupedWeight
from loraplex.kernels.weight_form import WeightForm

FILE = "model.gguf"
INDEX = "model.gguf.json"
PLAIN = {"F32": 4, "F16": 2, "BF16": 2}
"""Bytes of a number, by kinds that are no blocks."""
_MOST_INDEX_BYTES = 64 << 20
_PIECE_VALUES = 1 << 20
"""Weights that are decoded at a time."""
_INTERLEAVED = frozenset({"llama", "mistral"})
"""Model types whose rows of q and k a file has interleaved."""
_STACKED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Modules of a layer whose codes lie in one matrix, in the smallest of their groups."""


@dataclass(frozen=True, slots=True)
class Gguf(Scheme):
    """A `Scheme`. `query_heads` and `kv_heads`: of a model whose rows of q and k are interleaved by heads
    (`as_halves`), else None. `bits`: of a code; 4 where some codes have 4 (`module_form` has the form of each
    module)."""

    suffix = "weight"
    leaves = ()
    name: str
    query_heads: int | None
    kv_heads: int | None
    bits: int = 8

    @property
    def form(self) -> WeightForm:
        return WeightForm("groups", self.bits, 32)

    def is_module(self, module: str, tensors: QuantisedTensors) -> bool:
        return tensors.dtype(f"{module}.weight") in KINDS

    def shape(self, module: str, tensors: QuantisedTensors) -> tuple[int, int]:
        return tensors.matrix(f"{module}.weight")

    def examine(self, module: str, tensors: QuantisedTensors) -> None:
        rows, _ = self.shape(module, tensors)
        if (heads := self._heads(module)) is not None and rows % (2 * heads):
            raise QuantisationUnsupported(f"{module}.weight has {rows} rows, which are not {heads} heads")

    def _heads(self, module: str) -> int | None:
        """The heads of a module whose rows are interleaved."""
        return {"q_proj": self.query_heads, "k_proj": self.kv_heads}.get(module.rpartition(".")[2])

    def read(self, module: str, tensors: QuantisedTensors) -> GroupedWeight:
        self.examine(module, tensors)
        rows, inputs = self.shape(module, tensors)
        kind = KINDS[tensors.dtype(f"{module}.weight")]
        stored = tensors.blocks(f"{module}.weight", rows * inputs // kind.values, kind.size)
        if (heads := self._heads(module)) is not None:
            stored = as_halves(stored.reshape(rows, -1), heads).reshape(stored.shape)
        codes = np.empty((len(stored), kind.values), np.int8)
        scales = np.empty((len(stored), kind.values // kind.group), np.float32)
        offsets = np.empty_like(scales) if kind.has_offsets else None
        step = _PIECE_VALUES // kind.values
        for first in range(0, len(stored), step):
            piece = slice(first, first + step)
            codes[piece], scales[piece], found = kind.decode(stored[piece])
            if offsets is not None:
                offsets[piece] = found
        if not np.isfinite(scales).all() or (offsets is not None and not np.isfinite(offsets).all()):
            raise QuantisationUnsupported(f"{module}.weight has a scale that is infinite, or no number")
        each = (rows, inputs // kind.group)
        return GroupedWeight(
            codes.reshape(rows, inputs),
            scales.reshape(each),
            None if offsets is None else offsets.reshape(each),
            kind.group,
        )


def read_gguf(given: Mapping[str, Any], config: Mapping[str, Any]) -> Gguf:
    """Raises QuantisationUnsupported. `config`: config.json, `given`: its quantization_config."""
    refuse_unknown("a GGUF file's quantization_config", given, frozenset({"quant_method", "kinds"}))
    kinds = given.get("kinds")
    if (
        not isinstance(kinds, list)
        or not kinds
        or not all(isinstance(kind, str) and kind in KINDS for kind in kinds)
    ):
        raise QuantisationUnsupported(
            f"a GGUF file with weights of {shown(kinds, 80)} is not served: {', '.join(KINDS)} are"
        )
    query = config.get("num_attention_heads")
    kv = config.get("num_key_value_heads", query)
    if type(query) is not int or type(kv) is not int or query < 1 or kv < 1:
        raise QuantisationUnsupported("config.json of a GGUF file has no num_attention_heads")
    if config.get("model_type") not in _INTERLEAVED:
        query = kv = None
    return Gguf(f"gguf {' '.join(kinds)}", query, kv, 8 if FOUR_BITS.isdisjoint(kinds) else 4)


def as_halves(rows: NDArray[Any], heads: int) -> NDArray[Any]:
    """Rows that llama.cpp has interleaved, as transformers has them: llama.cpp rotates neighbouring pairs, transformers
    the two halves of a head."""
    paired = rows.reshape(heads, len(rows) // heads // 2, 2, *rows.shape[1:])
    return paired.swapaxes(1, 2).reshape(rows.shape)


def is_indexed(model_dir: Path) -> bool:
    """Whether the weights of a directory are those of a GGUF file."""
    return (model_dir / FILE).is_file() and (model_dir / INDEX).is_file()


def read_index(model_dir: Path) -> dict[str, TensorSlice]:
    """Where the tensors lie in the file, by name. Raises QuantisationUnsupported where the index is broken, or names
    bytes that the file does not have; OSError."""
    path, size = model_dir / INDEX, (model_dir / FILE).stat().st_size
    if path.stat().st_size > _MOST_INDEX_BYTES:
        raise QuantisationUnsupported(f"{path} is larger than {_MOST_INDEX_BYTES} bytes")
    try:
        stored = json.loads(path.read_bytes())
        return {name: _slice(name, entry, size) for name, entry in stored.items()}
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        raise QuantisationUnsupported(
            f"{path} is broken: {error}; remove the directory {model_dir}"
        ) from error


def _slice(name: str, entry: Mapping[str, Any], size: int) -> TensorSlice:
    kind, shape, start = entry["kind"], tuple(entry["shape"]), entry["start"]
    if not all(type(number) is int and number > 0 for number in (*shape, start)) or not 1 <= len(shape) <= 2:
        raise ValueError(f"{name[:80]!a} has no shape, or no place")
    length = tensor_bytes(kind, shape)
    if start + length > size:
        raise ValueError(f"{name[:80]!a} lies beyond the end of the file")
    return TensorSlice(kind, shape, start, start + length)


def tensor_bytes(kind: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor. Raises ValueError for a kind that is not served, and for rows that are no whole blocks."""
    count = math.prod(shape)
    if kind in PLAIN:
        return count * PLAIN[kind]
    if kind not in KINDS or len(shape) != 2 or shape[1] % KINDS[kind].values:
        raise ValueError(f"{kind[:20]} {list(shape)} is not served")
    return count // KINDS[kind].values * KINDS[kind].size


def module_form(tensors: Mapping[str, TensorSlice], module: str) -> WeightForm | None:
    """The form of a module, and of those that are multiplied with it; None where they are floats."""
    names = _together(tensors, module)
    if not names:
        return None
    kinds = [KINDS[name] for name in names]
    return WeightForm(
        "groups",
        bits=4 if FOUR_BITS.issuperset(names) else 8,
        group=min(kind.group for kind in kinds),
        zeros="floats" if any(kind.has_offsets for kind in kinds) else "",
        # Those of Q4_K are products, which no 16 bits hold.
        scale_bytes=4 if "Q4_K" in names else 2,
    )


def _together(tensors: Mapping[str, TensorSlice], module: str) -> list[str]:
    """The kinds of a module's tensor and of those that are multiplied with it."""
    leaf = module.rpartition(".")[2]
    together = next((leaves for leaves in _STACKED if leaf in leaves), (leaf,))
    stem = module.removesuffix(leaf)
    found = [tensors[name].dtype for part in together if (name := f"{stem}{part}.weight") in tensors]
    return [name for name in found if name in KINDS]
