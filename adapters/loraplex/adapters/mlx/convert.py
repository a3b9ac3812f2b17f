"""Turning mlx-lm's two files into PEFT's form of the same adapter, once, before they are validated and stored.

Every value keeps its bits: lora_a and lora_b are transposed, m becomes DoRA's magnitude. The result depends on the two
files alone, so equal uploads have equal digests. Memory: two tiles of `_TILE_BYTES` and the header, whatever the shapes
are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, BinaryIO

import numpy as np

from loraplex.adapters.admission.peft_config import read_raw_config
from loraplex.adapters.admission.safetensors_header import read_header
from loraplex.adapters.admission.strict_json import parse_object
from loraplex.adapters.errors import AdapterRefused, ArtifactCorrupt
from loraplex.adapters.mlx.modules import MlxModule, has_mlx_names, read_modules
from loraplex.adapters.mlx.settings import MlxSettings, is_mlx_config, read_mlx_settings
from loraplex.adapters.rewriting import alpha_of, replace_config, replace_tensors
from loraplex.adapters.spec import TensorSlice
from loraplex.adapters.store.artifact_store import Staging
from loraplex.adapters.store.files import (
    disk_failures_named,
    open_regular,
    read_into,
    shown,
    write_all,
)
from loraplex.adapters.store.tensors import NUMPY_DTYPES

_TILE_BYTES = 4 << 20
_NO_WINDOW = "mlx-lm 0.32 gives this family no sliding window: the adapter was trained for other texts longer than that"
_TRAINED_FOR_ANOTHER = {
    "gemma2": _NO_WINDOW,
    "phi3": _NO_WINDOW,
    "starcoder2": _NO_WINDOW,
    "glm": "mlx-lm 0.32 rotates whole heads of this family, the model half of each: the adapter was trained for "
    "another model; train it with PEFT",
}
"""The warning by the base's model type: mlx-lm computes something else of these than transformers does."""
_PEFT_NAMES = {"lora_a": "lora_A.weight", "lora_b": "lora_B.weight", "m": "lora_magnitude_vector"}


def convert_mlx(staging: Staging, max_rank: int, model_type: str) -> list[dict[str, Any]]:
    """Replace mlx-lm's files in `staging` by PEFT's, and return what a report says of it: entries of its `checks`, as
    `inspect_adapter` takes them. None of them where the files are not mlx-lm's, or cannot be read. `model_type` is the
    base's.

    Raises AdapterRefused for what mlx-lm saves and is not served, StoreFull, StoreFailed, OSError.
    """
    try:
        config = parse_object(read_raw_config(staging.config_path))
        is_mlx = is_mlx_config(config)
        # What cannot be read is left to the inspection, which says why.
        if not is_mlx and not has_mlx_names(read_header(staging.tensors_path)):
            return []
    except (AdapterRefused, ValueError, FileNotFoundError):
        return []
    if not is_mlx:
        raise AdapterRefused(
            "config_invalid",
            "the tensors are mlx-lm's (lora_a, lora_b), and adapter_config.json is not: upload the one that "
            "mlx_lm.lora saved beside them",
        )
    settings = read_mlx_settings(config)
    header = read_header(staging.tensors_path)
    modules = read_modules(header, settings, max_rank)
    alpha = alpha_of(settings.scale, settings.rank)
    with disk_failures_named():
        _write_tensors(staging, header)
        _write_config(staging, settings, modules, alpha)
    vectors = ", m is DoRA's magnitude" if settings.use_dora else ""
    detail = (
        f"mlx-lm's files were turned into PEFT's: lora_a and lora_b are transposed{vectors}, scale "
        f"{settings.scale:g} is lora_alpha {alpha:g} at rank {settings.rank}; digest and bytes are those of the result"
    )
    checks: list[dict[str, Any]] = [{"name": "mlx", "ok": True, "detail": detail}]
    unused = sorted((settings.keys or frozenset()) - {m.key for m in modules.values()} - modules.keys())
    if unused:
        names = ", ".join(map(shown, unused[:8]))
        warning = f"warning: lora_parameters.keys names {names}, and no tensors came for it"
        checks.append({"name": "mlx", "ok": False, "detail": warning})
    if model_type in _TRAINED_FOR_ANOTHER:
        warning = f"warning: {_TRAINED_FOR_ANOTHER[model_type]}"
        checks.append({"name": "mlx", "ok": False, "detail": warning})
    return checks


def _write_config(
    staging: Staging, settings: MlxSettings, modules: Mapping[str, MlxModule], alpha: float
) -> None:
    """The modules are those that have tensors: each named one must have them in every layer of the trained range."""
    layers = {module.layer for module in modules.values() if module.layer is not None}
    first = min(layers, default=0)
    if layers and settings.num_layers is not None:
        first = max(0, max(layers) + 1 - settings.num_layers)
    config = {
        "base_model_name_or_path": settings.base_name,
        "bias": "none",
        "inference_mode": True,
        "layers_to_transform": list(range(first, max(layers) + 1)) if layers else None,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "peft_type": "LORA",
        "r": settings.rank,
        "target_modules": sorted({module.key for module in modules.values()}),
        "task_type": "CAUSAL_LM",
        "use_dora": settings.use_dora,
    }
    replace_config(staging, config)


def _write_tensors(staging: Staging, header: Mapping[str, TensorSlice]) -> None:
    named: dict[str, TensorSlice] = {}
    for name, tensor in header.items():
        module, _, part = name.rpartition(".")
        named[f"base_model.model.{module}.{_PEFT_NAMES[part]}"] = tensor
    with open_regular(staging.tensors_path) as source:
        replace_tensors(
            staging,
            {name: (t.dtype, t.shape[::-1], t.end - t.start) for name, t in named.items()},
            lambda name, file, start: _transpose(source, named[name], file, start),
        )


def _transpose(source: BinaryIO, tensor: TensorSlice, into: BinaryIO, start: int) -> None:
    """Write [n, m] of a tensor [m, n] at `start`, tile by tile. The smaller of the two is a rank, so no tile takes more
    reads or writes than that."""
    dtype = NUMPY_DTYPES[tensor.dtype]
    rows, columns = tensor.shape if len(tensor.shape) == 2 else (1, math.prod(tensor.shape))
    height, width = rows, columns
    if rows >= columns:
        height = max(1, min(rows, _TILE_BYTES // (dtype.itemsize * max(1, columns))))
    else:
        width = max(1, min(columns, _TILE_BYTES // (dtype.itemsize * max(1, rows))))
    for top in range(0, rows, max(1, height)):
        for left in range(0, columns, max(1, width)):
            tile = np.empty((min(height, rows - top), min(width, columns - left)), dtype)
            _read_tile(source, tensor.start, tile, top, left, columns)
            _write_tile(into, start, np.ascontiguousarray(tile.T), left, top, rows)


def _read_tile(source: BinaryIO, start: int, tile: np.ndarray, top: int, left: int, columns: int) -> None:
    runs = [tile.reshape(-1)] if tile.shape[1] == columns else list(tile)
    for number, run in enumerate(runs):
        source.seek(start + ((top + number) * columns + left) * tile.itemsize)
        if read_into(source, run.view(np.uint8).data) < run.nbytes:
            raise ArtifactCorrupt("the tensor file became shorter while it was read")


def _write_tile(into: BinaryIO, start: int, tile: np.ndarray, top: int, left: int, columns: int) -> None:
    runs = [tile.reshape(-1)] if tile.shape[1] == columns else list(tile)
    for number, run in enumerate(runs):
        into.seek(start + ((top + number) * columns + left) * tile.itemsize)
        write_all(into, run.view(np.uint8).data)
