"""The tensors of mlx-lm's adapters.safetensors by module, checked against its config.

    y = W·x + scale · (x·A)·B      `<module>.lora_a` [in, r], `<module>.lora_b` [r, out]
    y = m / ‖W + scale·Bᵀ·Aᵀ‖ · (…)     DoRA: `<module>.m` [out] too

Source: mlx-lm, `mlx_lm/tuner/lora.py` and `dora.py`. Its LoRA on embeddings also changes a tied head, and its LoRA on
experts has a third dimension: neither is PEFT's LoRA of a linear, and both are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

from loraplex.adapters.errors import AdapterRefused, RefusalCode
from loraplex.adapters.mlx.settings import MlxSettings
from loraplex.adapters.spec import TensorSlice
from loraplex.adapters.store.files import shown
from loraplex.adapters.store.tensors import NUMPY_DTYPES
from loraplex.kernels.lora.site_groups import EMBEDDING_NAMES

PARTS = ("lora_a", "lora_b", "m")
_QUANTISED = frozenset({"scales", "biases"})
_EMBEDDINGS = EMBEDDING_NAMES | {"wte", "wpe", "word_embeddings", "tok_embeddings", "embedding"}
_EXPERTS = frozenset({"switch_mlp", "switch_glu", "experts"})


@dataclass(frozen=True, slots=True)
class MlxModule:
    """`layer` is the index in the module's path (None outside of the layers), `key` what follows it (else the path)."""

    path: str
    layer: int | None
    key: str
    tensors: Mapping[str, TensorSlice]


def has_mlx_names(header: Mapping[str, TensorSlice]) -> bool:
    return any(name.endswith((".lora_a", ".lora_b")) for name in header)


def read_modules(
    header: Mapping[str, TensorSlice], settings: MlxSettings, max_rank: int
) -> dict[str, MlxModule]:
    """The modules by path, in the order of the file. Raises AdapterRefused (unsupported_feature, unexpected_tensor,
    missing_tensor, shape_mismatch, rank_exceeds_max)."""
    found: dict[str, dict[str, TensorSlice]] = {}
    for name, tensor in header.items():
        path, _, part = name.rpartition(".")
        if part in _QUANTISED or tensor.dtype == "U32":
            _unsupported(
                "mlx_quantised",
                f"tensor {shown(name, 160)} belongs to a quantised weight of MLX; an adapter on a quantised model has "
                "lora_a and lora_b alone: upload the adapters.safetensors that mlx_lm.lora saves, not a fused model",
            )
        if part not in PARTS or not path:
            _refuse(
                "unexpected_tensor",
                f"unexpected tensor {shown(name, 160)}: beside mlx-lm's config only lora_a, lora_b and m are expected. "
                "Weights of PEFT come with PEFT's adapter_config.json",
            )
        _check_kind(name, path, tensor)
        found.setdefault(path, {})[part] = tensor
    if not found:
        _refuse("missing_tensor", "the file holds no lora_a and lora_b tensors")
    if settings.rank > max_rank:
        _refuse(
            "rank_exceeds_max",
            f"the adapter has rank {settings.rank}; this server accepts at most {max_rank}",
        )
    for path, tensors in found.items():
        _check_shapes(path, tensors, settings)
    modules = {path: MlxModule(path, *_split(path), tensors) for path, tensors in found.items()}
    _check_config(modules, settings)
    return modules


def _check_kind(name: str, path: str, tensor: TensorSlice) -> None:
    parts = path.split(".")
    if len(tensor.shape) == 3 or not _EXPERTS.isdisjoint(parts):
        _unsupported(
            "mlx_experts",
            f"tensor {shown(name, 160)} is LoRA on the experts of a mixture (LoRASwitchLinear), which is not served; "
            "train without those modules in lora_parameters.keys",
        )
    if parts[-1] in _EMBEDDINGS:
        _unsupported(
            "mlx_embedding",
            f"tensor {shown(name, 160)} is mlx-lm's LoRA on an embedding, which is not served: it changes a head that "
            "is tied to it too; train without that module in lora_parameters.keys",
        )
    if tensor.dtype not in NUMPY_DTYPES:
        _unsupported(
            f"dtype_{tensor.dtype}",
            f"tensor {shown(name, 160)} is stored as {tensor.dtype}; accepted are {', '.join(NUMPY_DTYPES)}",
        )


def _check_shapes(path: str, tensors: Mapping[str, TensorSlice], settings: MlxSettings) -> None:
    module, rank = shown(path, 160), settings.rank
    for part in ("lora_a", "lora_b", *(("m",) if settings.use_dora else ())):
        if part not in tensors:
            _refuse("missing_tensor", f"{module} has no {part}")
    if "m" in tensors and not settings.use_dora:
        _refuse("unexpected_tensor", f"{module} has DoRA's m, but fine_tune_type is not dora")
    a, b = tensors["lora_a"].shape, tensors["lora_b"].shape
    if len(a) != 2 or len(b) != 2 or a[1] != rank or b[0] != rank:
        _refuse(
            "shape_mismatch",
            f"{module}: lora_a {a} and lora_b {b} are not mlx-lm's [in, rank] and [rank, out] with the rank {rank} of "
            "lora_parameters",
        )
    if "m" in tensors and tensors["m"].shape != (b[1],):
        _refuse(
            "shape_mismatch", f"{module}: m is {list(tensors['m'].shape)}, not one for each of {b[1]} outputs"
        )


def _check_config(modules: Mapping[str, MlxModule], settings: MlxSettings) -> None:
    """mlx-lm does not load what its config does not name."""
    if settings.keys is not None:
        for module in modules.values():
            if settings.keys.isdisjoint((module.key, module.path)):
                _refuse(
                    "unexpected_tensor",
                    f"tensors came for {shown(module.path, 160)}, which lora_parameters.keys does not name",
                )
    layers = {module.layer for module in modules.values() if module.layer is not None}
    if settings.num_layers is not None and layers and max(layers) - min(layers) >= settings.num_layers:
        _refuse(
            "unexpected_tensor",
            f"tensors came for layers {min(layers)} to {max(layers)}; num_layers names {settings.num_layers}",
        )


def _split(path: str) -> tuple[int | None, str]:
    parts = path.split(".")
    for at in range(1, len(parts) - 1):
        if parts[at].isdecimal() and parts[at].isascii() and len(parts[at]) <= 4:
            return int(parts[at]), ".".join(parts[at + 1 :])
    return None, path


def _unsupported(feature: str, message: str) -> NoReturn:
    raise AdapterRefused("unsupported_feature", message, feature=feature)


def _refuse(code: RefusalCode, message: str) -> NoReturn:
    raise AdapterRefused(code, message)
