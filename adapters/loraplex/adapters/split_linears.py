"""LoRA on the parts of a linear that is one in the base, turned into LoRA on that linear.

A gated delta net's `in_proj_qkv` gives queries, keys and values. Trainers that take it apart save LoRA on in_proj_q,
in_proj_k and in_proj_v. Their matrices A, one below the other, and their matrices B, in blocks along the diagonal, are
the same change of the whole; where all parts have one A, it stays one, and the matrices B lie one below the other.
Every value keeps its bits. The result depends on the two files and the base's sizes alone, so equal uploads have equal
digests.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import numpy as np

from loraplex.adapters.admission.experts.checks import read_upload
from loraplex.adapters.admission.faults import Faults
from loraplex.adapters.admission.module_names import PREFIX, ModuleNames, names_of
from loraplex.adapters.admission.peft_config import LoraSettings, read_raw_config, read_settings
from loraplex.adapters.admission.strict_json import parse_object
from loraplex.adapters.admission.tensor_names import AdapterTensors, sort_tensors, unwrap, weight_names
from loraplex.adapters.admission.values import check_dtype
from loraplex.adapters.errors import AdapterRefused, RefusalCode
from loraplex.adapters.rewriting import alpha_of, copy_tensor, replace_config, replace_tensors
from loraplex.adapters.spec import BaseSpec, SiteShape, TensorSlice
from loraplex.adapters.store.artifact_store import Staging
from loraplex.adapters.store.files import disk_failures_named, write_all
from loraplex.adapters.store.tensors import NUMPY_DTYPES, iter_rows

WHOLE = "in_proj_qkv"
PARTS = ("in_proj_q", "in_proj_k", "in_proj_v")
"""In the order of the whole's rows."""
_VALUES_LIKE = "in_proj_z"
"""A linear of the layer that gives as many numbers as there are values."""


@dataclass(frozen=True, slots=True)
class _Part:
    """Matrices of one part, and the first of its rows and rank in the whole."""

    a: TensorSlice
    b: TensorSlice
    magnitude: TensorSlice | None
    row: int
    column: int


@dataclass(frozen=True, slots=True)
class _Whole:
    """The parts that came of a linear, in the order of its rows. `rank` and `alpha` are of the whole."""

    path: str
    out_features: int
    parts: tuple[_Part, ...]
    rank: int
    alpha: float
    shares_a: bool

    @property
    def tensors(self) -> dict[str, tuple[str, tuple[int, ...], int]]:
        dtype = self.parts[0].a.dtype
        shapes: dict[str, tuple[int, ...]] = {
            "lora_A.weight": (self.rank, self.parts[0].a.shape[1]),
            "lora_B.weight": (self.out_features, self.rank),
        }
        if self.parts[0].magnitude is not None:
            shapes["lora_magnitude_vector"] = (self.out_features,)
        size = NUMPY_DTYPES[dtype].itemsize
        return {
            f"{PREFIX}{self.path}.{end}": (dtype, shape, math.prod(shape) * size)
            for end, shape in shapes.items()
        }


def join_split_linears(staging: Staging, base: BaseSpec, max_rank: int) -> list[dict[str, Any]]:
    """Replace the files in `staging` where they have LoRA on parts of a linear of the base, and return what a report
    says of it: entries of its `checks`. None of them where the files have no such parts, or cannot be read: the
    inspection says why.

    Raises AdapterRefused for parts that do not make one linear, StoreFull, StoreFailed, OSError.
    """
    try:
        header = unwrap(read_upload(staging.tensors_path, base))
        if not any(f".{part}." in name for name in header for part in PARTS):
            return []
        names = names_of(weight_names(header), base)
        tensors = sort_tensors(header)
        paths = _part_paths(base, names)
        if paths.keys().isdisjoint(tensors.a):
            return []
        config = parse_object(read_raw_config(staging.config_path))
        settings = read_settings(staging.config_path, paths, Faults(), header)
    except (AdapterRefused, ValueError, FileNotFoundError):
        return []
    if settings is None:
        return []
    settings = settings.with_names(names)
    _check_selected(settings, tensors, paths)
    joiner = _Joiner(base, names, tensors, settings, staging.tensors_path, max_rank)
    wholes = joiner.wholes()
    with disk_failures_named():
        _write_tensors(staging, header, wholes)
        replace_config(staging, _joined_config(config, wholes))
    ranks = sorted({whole.rank for whole in wholes})
    shared = " (all parts of a linear have one A)" if all(whole.shares_a for whole in wholes) else ""
    detail = (
        f"LoRA on {', '.join(PARTS)} of {len(wholes)} layers was joined to LoRA on {WHOLE}, exactly{shared}: the rank "
        f"is {' or '.join(map(str, ranks))} there; digest and bytes are those of the result"
    )
    return [{"name": "split_linears", "ok": True, "detail": detail}]


def _part_paths(base: BaseSpec, names: ModuleNames) -> dict[str, str]:
    """The paths in the file of all parts that the base could have, each with that of its whole."""
    return {
        whole.removesuffix(WHOLE) + part: whole
        for (_, site), shape in base.sites.items()
        if site == WHOLE
        for whole in (names.in_file(shape.module_path),)
        for part in PARTS
    }


def _check_selected(settings: LoraSettings, tensors: AdapterTensors, paths: Mapping[str, str]) -> None:
    """The rules of `check_coverage` for parts. Where none came, the whole is found missing later."""
    begun = {paths[path] for path in tensors.a if path in paths}
    for path, whole in paths.items():
        selected = settings.selection.selects(path)
        if path in tensors.a and not selected:
            _refuse("unexpected_tensor", f"tensors came for {path}, which the config does not name")
        if path not in tensors.a and whole in begun and selected and settings.selection.exact:
            _refuse("missing_tensor", f"the config names {path}, but no tensors came for it")


@dataclass(frozen=True, slots=True)
class _Joiner:
    """Finds what is joined. Its methods raise AdapterRefused."""

    base: BaseSpec
    names: ModuleNames
    tensors: AdapterTensors
    settings: LoraSettings
    path: Path
    max_rank: int

    def wholes(self) -> list[_Whole]:
        found = [self._whole(shape) for shape in self.base.sites.values() if shape.site == WHOLE]
        return [whole for whole in found if whole is not None]

    def _whole(self, shape: SiteShape) -> _Whole | None:
        """None where no part came."""
        path = self.names.in_file(shape.module_path)
        values = self.base.sites[shape.layer, _VALUES_LIKE].out_features
        rows = dict(zip(PARTS, [(shape.out_features - values) // 2] * 2 + [values], strict=True))
        scalings: dict[str, float] = {}
        parts: list[_Part] = []
        row = rank = 0
        for name in PARTS:
            module = path.removesuffix(WHOLE) + name
            if module in self.tensors.a:
                part = self._part(module, shape.in_features, rows[name], row, rank)
                scalings[module] = self._scaling(module, part.a.shape[0])
                parts.append(part)
                rank += part.a.shape[0]
            row += rows[name]
        if not parts:
            return None
        told = ", ".join(scalings)
        if path in self.tensors.a:
            _refuse("unexpected_tensor", f"tensors came for {path}, and for parts of it: {told}")
        self._check_together(parts, set(scalings.values()), told)
        shares = len(parts) > 1 and all(_is_same(self.path, parts[0].a, part.a) for part in parts[1:])
        rank = parts[0].a.shape[0] if shares else rank
        if rank > self.max_rank:
            _refuse(
                "rank_exceeds_max",
                f"{told} together are LoRA of rank {rank} on {WHOLE}; this server accepts at most {self.max_rank}",
            )
        scaling = next(iter(scalings.values()))
        alpha = alpha_of(scaling, math.sqrt(rank) if self.settings.use_rslora else rank)
        return _Whole(path, shape.out_features, tuple(parts), rank, alpha, shares)

    def _part(self, module: str, inputs: int, rows: int, row: int, column: int) -> _Part:
        a, b = self.tensors.a[module], self.tensors.b[module]
        magnitude = self.tensors.magnitudes.get(module)
        check_dtype(module, "lora_A", a)
        check_dtype(module, "lora_B", b)
        fits = len(a.shape) == len(b.shape) == 2 and a.shape[0] > 0
        if not fits or a.shape != (b.shape[1], inputs) or b.shape[0] != rows:
            _refuse(
                "shape_mismatch",
                f"{module}: lora_A {list(a.shape)} and lora_B {list(b.shape)} are not [rank, {inputs}] and "
                f"[{rows}, rank], as the base's {WHOLE} has them",
            )
        if magnitude is not None and magnitude.shape != (rows,):
            _refuse(
                "shape_mismatch",
                f"{module}: lora_magnitude_vector is {list(magnitude.shape)}, not one for each of the {rows} outputs",
            )
        return _Part(a, b, magnitude, row, column)

    def _scaling(self, module: str, rank: int) -> float:
        declared, scaling = self.settings.rank_and_scaling(module, rank)
        if declared != rank:
            _refuse("shape_mismatch", f"{module} has rank {rank} in the tensors and {declared} in the config")
        return scaling

    def _check_together(self, parts: Sequence[_Part], scalings: set[float], told: str) -> None:
        magnitudes = [part.magnitude for part in parts if part.magnitude is not None]
        stored = [*(part.a for part in parts), *(part.b for part in parts), *magnitudes]
        if len({tensor.dtype for tensor in stored}) > 1:
            _refuse("shape_mismatch", f"the tensors of {told} are of several dtypes: save them in one")
        if len(scalings) > 1:
            _refuse(
                "unsupported_feature",
                f"{told} have several scalings, and the base has one linear in their place: give them one rank and "
                "one alpha",
                feature="alpha_pattern",
            )
        if magnitudes and len(magnitudes) < len(PARTS):
            _refuse(
                "missing_tensor",
                f"DoRA on {told} needs a lora_magnitude_vector of each of {', '.join(PARTS)}",
            )


def _is_same(path: Path, one: TensorSlice, other: TensorSlice) -> bool:
    return one.shape == other.shape and all(
        first.tobytes() == second.tobytes()
        for first, second in zip(iter_rows(path, one), iter_rows(path, other), strict=True)
    )


def _write_tensors(staging: Staging, header: Mapping[str, TensorSlice], wholes: Sequence[_Whole]) -> None:
    joined = {
        tensor for whole in wholes for part in whole.parts for tensor in (part.a, part.b, part.magnitude)
    }
    kept = {name: tensor for name, tensor in header.items() if tensor not in joined}
    made = {name: whole for whole in wholes for name in whole.tensors}
    source = staging.tensors_path

    def fill(name: str, file: BinaryIO, start: int) -> None:
        file.seek(start)
        if name in kept:
            copy_tensor(source, kept[name], file)
            return
        parts = made[name].parts
        if name.endswith("lora_B.weight"):
            _write_blocks(source, made[name], file)
        elif name.endswith("lora_A.weight"):
            _write_below(source, [part.a for part in parts[: 1 if made[name].shares_a else None]], file)
        else:
            _write_below(source, [part.magnitude for part in parts if part.magnitude is not None], file)

    shapes = {name: (t.dtype, t.shape, t.end - t.start) for name, t in kept.items()}
    for whole in wholes:
        shapes |= whole.tensors
    replace_tensors(staging, shapes, fill)


def _write_below(source: Path, tensors: Sequence[TensorSlice], into: BinaryIO) -> None:
    for tensor in tensors:
        for rows in iter_rows(source, tensor):
            write_all(into, rows.reshape(-1).view(np.uint8).data)


def _write_blocks(source: Path, whole: _Whole, into: BinaryIO) -> None:
    """Each part's B in its rows and columns, and zeros around it."""
    done, first = 0, into.tell()
    for part in whole.parts:
        row_bytes = whole.rank * NUMPY_DTYPES[part.b.dtype].itemsize
        into.seek(first + part.row * row_bytes)
        left = 0 if whole.shares_a else part.column
        for rows in iter_rows(source, part.b):
            block = np.zeros((len(rows), whole.rank), rows.dtype)
            block[:, left : left + rows.shape[1]] = rows
            write_all(into, block.reshape(-1).view(np.uint8).data)
        done = part.row + part.b.shape[0]
    # What was passed over is zero; behind the last part the file must be made longer.
    if done < whole.out_features:
        into.truncate(first + whole.out_features * row_bytes)


def _joined_config(config: dict[str, Any], wholes: Sequence[_Whole]) -> dict[str, Any]:
    """The config with the whole's name in place of its parts', and its ranks and alphas before all others."""
    found = dict(config)
    targets = config.get("target_modules")
    if isinstance(targets, list):
        found["target_modules"] = list(dict.fromkeys(map(_whole_name, targets)))
    elif isinstance(targets, str):
        found["target_modules"] = _whole_name(targets)
    if isinstance(excluded := config.get("exclude_modules"), list):
        found["exclude_modules"] = [name for name in excluded if _whole_name(name) == name] or None
    alike = len({(whole.rank, whole.alpha) for whole in wholes}) == 1
    keys = {WHOLE if alike else whole.path: whole for whole in wholes}
    for field, new in (
        ("rank_pattern", {key: whole.rank for key, whole in keys.items()}),
        ("alpha_pattern", {key: whole.alpha for key, whole in keys.items()}),
    ):
        found[field] = new | {
            key: value for key, value in (config.get(field) or {}).items() if key not in new
        }
    return found


def _whole_name(name: str) -> str:
    before, dot, leaf = name.rpartition(".")
    return f"{before}{dot}{WHOLE}" if leaf in PARTS else name


def _refuse(code: RefusalCode, message: str, *, feature: str | None = None) -> NoReturn:
    raise AdapterRefused(code, message, feature=feature)
