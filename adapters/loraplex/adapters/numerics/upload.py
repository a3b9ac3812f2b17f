"""The second reading of an upload: its two files as the reference takes them.

Nothing of `loraplex.adapters.admission` and of the loader reads for it, so that a fault there shows as a difference.
It reads what was admitted, so it checks only what it needs itself.
"""

from __future__ import annotations

import json
import math
import re
import string
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import re2
from numpy.typing import NDArray

from loraplex.adapters.admission.model_parts import parts_of
from loraplex.adapters.errors import AdapterRefused, ArtifactCorrupt, ArtifactMissing
from loraplex.adapters.numerics.probes import EMBEDDING_ROWS, HEAD_ROWS
from loraplex.adapters.numerics.uploaded_experts import StoredTensor, UploadedExperts
from loraplex.adapters.spec import BaseSpec

_PREFIX = re.compile(r"^(?:module\.)*base_model\.model\.")
_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
_DTYPES: dict[str, Any] = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
}
_WHOLE = {"model", "language_model", "text_model"}
_HEADS = {"lm_head", "output", "embed_out"}
_LETTERS = frozenset(string.ascii_letters + string.digits + "_-")
_MAX_PROGRAM_BYTES = 1 << 18
_KINDS = {
    "lora_A": "a",
    "lora_B": "b",
    "lora_embedding_A": "a",
    "lora_embedding_B": "b",
    "lora_magnitude_vector": "magnitude",
    "trainable_tokens_delta": "rows",
}


@dataclass(frozen=True, slots=True)
class _Place:
    """A tensor in the file: bytes from `start` on."""

    dtype: str
    shape: tuple[int, ...]
    start: int


@dataclass(frozen=True, slots=True)
class UploadedSite:
    """One site in float32, as uploaded: a [R, K], b [N, R], DoRA's magnitude [N] or None. `scaling` is for b.
    `expert`: whose it is, -1 outside of routed experts."""

    layer: int
    site: str
    module_path: str
    a: NDArray[np.float32]
    b: NDArray[np.float32]
    scaling: float
    magnitude: NDArray[np.float32] | None
    expert: int = -1


@dataclass(frozen=True, slots=True)
class UploadedRows:
    """Rows [n, C] in float32 that replace those of the tokens `ids` [n], ascending. `vocab_size`: rows that there are
    in all."""

    site: str
    module_path: str
    ids: NDArray[np.int64]
    rows: NDArray[np.float32]
    vocab_size: int


class _Path(NamedTuple):
    """The path of a module: as it is in the file, with the base's own names inside a layer, and within the decoder."""

    whole: str
    renamed: str
    inside: str


class Upload:
    """The sites of an upload, and the rows that it replaces. Raises ArtifactMissing, ArtifactCorrupt, AdapterRefused,
    OSError."""

    def __init__(self, config_path: Path, tensors_path: Path, base: BaseSpec) -> None:
        try:
            self._config = _object(config_path.read_bytes(), config_path)
            places = _places(tensors_path)
        except FileNotFoundError as error:
            raise ArtifactMissing(f"{error.filename} is not there") from error
        self._path = tensors_path
        outside = {word for shape in base.sites.values() for word in _outside(shape.module_path)}
        self._outside = outside | _WHOLE
        self._names = parts_of(base.model_type).inside
        pattern = self._config.get("alpha_pattern") or {}
        self._alphas = [(self._test(key), alpha) for key, alpha in pattern.items()]
        self._parameters = frozenset(map(self._inside, self._config.get("target_parameters") or ()))
        modules = {self._inside(shape.module_path): key for key, shape in base.sites.items()}
        self._found: dict[tuple[int, str], tuple[str, dict[str, _Place]]] = {}
        self._rows: dict[tuple[int, str], tuple[str, _Place, list[int], int]] = {}
        self.experts = UploadedExperts(base.experts, self._config, base.model_type)
        for name, place in places.items():
            module, kind = _purpose(name)
            if kind is None:
                continue
            if kind == "rows":
                self._add_rows(module.removesuffix(".token_adapter"), place, base)
                continue
            inside = self._inside(module)
            if self.experts.take(
                inside, module, kind, StoredTensor(place.shape, partial(self._rows_of, place))
            ):
                continue
            key = modules.get(inside)
            if key is None and base.multimodal and self._is_beside_text(module):
                continue
            if key is None:
                raise AdapterRefused("unexpected_tensor", f"the base has no linear {module[:160]!a}")
            _, parts = self._found.setdefault(key, (module, {}))
            if kind in parts:
                raise AdapterRefused("unexpected_tensor", f"a second {kind} came for {module[:160]!a}")
            parts[kind] = place

    @property
    def sites(self) -> dict[tuple[int, str], str]:
        """The path of the module by (layer, site), in the order of the file, and of the rows by their names."""
        rows = {key: entry[0] for key, entry in self._rows.items()}
        return {key: module for key, (module, _) in self._found.items()} | rows

    def _add_rows(self, module: str, place: _Place, base: BaseSpec) -> None:
        given = self._config.get("trainable_token_indices")
        table = base.sites.get((0, "embed_tokens"))
        embedding = "embed_tokens" if table is None else self._inside(table.module_path)
        by_name = given if isinstance(given, dict) else {embedding: given}
        own, head = self._inside(module), self._inside("lm_head")
        tokens = {self._inside(_unwrapped(name)): ids for name, ids in by_name.items()}
        ids = tokens.get(own)
        if ids is None and own == head and base.tied_head:
            # PEFT saves the embedding's rows a second time with the embedding itself.
            ids = tokens.get(embedding)
        if ids is None:
            raise AdapterRefused("unexpected_tensor", f"no tokens are named for {module[:160]!a}")
        vocab_size = next(
            shape.in_features if site == "embed_tokens" else shape.out_features
            for (_, site), shape in base.sites.items()
            if site in ("embed_tokens", "lm_head")
        )
        entry = (module, place, ids, vocab_size)
        if own == head:
            self._rows[0, HEAD_ROWS] = entry
            return
        self._rows[0, EMBEDDING_ROWS] = entry
        # A tied head has them too, unless others were given to it.
        if base.tied_head and tokens.get(head, ids) == ids:
            self._rows.setdefault((0, HEAD_ROWS), entry)

    def read(self, layer: int, site: str) -> UploadedSite | UploadedRows:
        """Raises as the constructor does."""
        if (layer, site) in self._rows:
            module, place, ids, vocab_size = self._rows[layer, site]
            order = np.argsort(np.array(ids, np.int64))
            rows = self._tensor(place)[order]
            return UploadedRows(site, module, np.array(ids, np.int64)[order], rows, vocab_size)
        module, places = self._found[layer, site]
        if "a" not in places or "b" not in places:
            raise AdapterRefused("missing_tensor", f"{module} lacks lora_A or lora_B")
        a, b = self._tensor(places["a"]), self._tensor(places["b"])
        magnitude = self._tensor(places["magnitude"]) if "magnitude" in places else None
        return UploadedSite(layer, site, module, a, b, self._scaling(module, len(a)), magnitude)

    def read_expert(self, layer: int, site: str, expert: int) -> UploadedSite:
        """Raises as the constructor does."""
        found = self.experts.read(layer, site, expert)
        scaling = self._scaling(found.path, len(found.a))
        path = f"{self.experts.path(layer, site)} of expert {expert}"
        return UploadedSite(layer, site, path, found.a, found.b, scaling, None, expert)

    def _scaling(self, module: str, rank: int) -> float:
        default = self._config.get("lora_alpha", 8)
        if not self._parameters.isdisjoint(_ends(f"{self._inside(module)}.weight")):
            module += ".weight"
        # Once a module, not once a key: there may be thousands of each.
        path = _Path(module, self._renamed(module), self._inside(module))
        alpha = next((alpha for names, alpha in self._alphas if names(path)), default)
        return float(alpha) / (math.sqrt(rank) if self._config.get("use_rslora") else rank)

    def _test(self, key: str) -> Callable[[_Path], bool]:
        """Whether the key stands for a module: for its whole path, under any of its names, or, without "^", for its end
        behind a dot. Raises AdapterRefused."""
        name, whole = _unwrapped(key.removeprefix("^").removesuffix("$")), key.startswith("^")
        if _LETTERS.issuperset(name.replace("\\.", "")):
            name = self._renamed(name.replace("\\.", "."))
            at_end = _end_test(name, whole, lambda wanted, found: wanted == found)
        elif _LETTERS.issuperset(name.replace(".", "")):
            name = self._renamed(name)
            at_end = _end_test(name, whole, _equal_but_for_dots)
        else:
            return _expression_test(_unwrapped(key))
        inside = self._inside(name)
        return lambda path: path.inside == inside or at_end(path.renamed)

    def _inside(self, module: str) -> str:
        """The part of a path inside the decoder, if only words that name whole models stand before it: the same under
        all names of a module."""
        module = self._renamed(module)
        before = _outside(module)
        if len(set(before)) < len(before) or not self._outside.issuperset(before):
            return module
        rest = module.split(".")[len(before) :]
        return "lm_head" if len(rest) == 1 and rest[0] in _HEADS else ".".join(rest)

    def _renamed(self, module: str) -> str:
        """A path, or the end of one, with the base's own names inside a layer."""
        for other, own in self._names:
            module = f".{module}.".replace(other, own)[1:-1]
        return module

    def _is_beside_text(self, module: str) -> bool:
        """Whether a module of a multimodal model lies beside its language model, where no text goes through it."""
        first = next((word for word in module.split(".") if word not in self._outside), "")
        return first not in {"layers", "embed_tokens", *_HEADS}

    def _tensor(self, place: _Place) -> NDArray[np.float32]:
        return self._rows_of(place, 0, place.shape[0])

    def _rows_of(self, place: _Place, first: int, last: int) -> NDArray[np.float32]:
        """Rows [first, last) of a tensor."""
        shape, dtype = (last - first, *place.shape[1:]), np.dtype(_DTYPES[place.dtype])
        start = place.start + first * math.prod(place.shape[1:]) * dtype.itemsize
        values = np.fromfile(self._path, dtype, math.prod(shape), offset=start)
        if len(values) < math.prod(shape):
            raise ArtifactCorrupt(f"{self._path.name} ends before the tensors that its header names")
        with np.errstate(over="ignore"):
            return values.reshape(shape).astype(np.float32)


def _places(path: Path) -> dict[str, _Place]:
    """The header: its length in 8 bytes, then JSON whose offsets count from behind it."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > path.stat().st_size:
            raise ArtifactCorrupt(f"{path.name} ends inside its header")
        header = _object(file.read(length), path)
    header.pop("__metadata__", None)
    try:
        return {
            name: _Place(entry["dtype"], tuple(entry["shape"]), 8 + length + entry["data_offsets"][0])
            for name, entry in header.items()
        }
    except (KeyError, TypeError, IndexError) as error:
        raise ArtifactCorrupt(f"the header of {path.name} cannot be read") from error


def _object(raw: bytes, path: Path) -> dict[str, Any]:
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ArtifactCorrupt(f"{path.name} is not JSON") from error
    if not isinstance(found, dict):
        raise ArtifactCorrupt(f"{path.name} is not a JSON object")
    return found


def _purpose(name: str) -> tuple[str, str | None]:
    """ "base_model.model.<module>.lora_A[.<adapter>].weight" → module and "a". None for a copy of a weight of the
    base."""
    parts = _PREFIX.sub("", _unwrapped(name)).split(".")
    for at in range(len(parts) - 1, max(-1, len(parts) - 4), -1):
        if parts[at] in _KINDS:
            return ".".join(parts[:at]), _KINDS[parts[at]]
    return name, None


def _unwrapped(path: str) -> str:
    """A path, or an expression for paths, without the words that compiled and sharded models put into it."""
    for word in _WRAPPERS:
        path = path.replace(f"{word}\\.", "").replace(f"{word}.", "")
    return path


def _outside(module: str) -> list[str]:
    """The words of a path before the list of layers, or before the head."""
    words = module.split(".")
    return words[: words.index("layers")] if "layers" in words else words[:-1]


def _ends(path: str) -> Iterator[str]:
    """ "a.b.c" itself, then "b.c", then "c"."""
    while path:
        yield path
        path = path.partition(".")[2]


def _expression_test(key: str) -> Callable[[_Path], bool]:
    options = re2.Options()
    options.max_mem, options.log_errors = _MAX_PROGRAM_BYTES, False
    try:
        program = re2.compile(rf"(?:.*\.)?(?:{key})", options)
    except re2.error as error:
        raise AdapterRefused(
            "unsupported_feature",
            f"the key {key[:80]!a} of alpha_pattern is not served",
            feature="alpha_pattern",
        ) from error
    return lambda path: program.fullmatch(path.whole) is not None


def _end_test(name: str, whole: bool, equal: Callable[[str, str], bool]) -> Callable[[str], bool]:
    def test(module: str) -> bool:
        before = len(module) - len(name)
        if before < 0 or (before and (whole or module[before - 1] != ".")):
            return False
        return equal(name, module[before:])

    return test


def _equal_but_for_dots(name: str, text: str) -> bool:
    """A dot that is not escaped stands for any character."""
    return all(wanted in {found, "."} for wanted, found in zip(name, text, strict=True))
