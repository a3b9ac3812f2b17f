"""mlx-lm's adapter_config.json: the options of a training. A few of them change what an adapter computes.

Read after mlx-lm's `mlx_lm/lora.py` (its defaults are saved as a whole) and `tuner/utils.py` (what it reads again):
`fine_tune_type`, `num_layers` and `lora_parameters` with `rank`, `scale` and `keys`. Before October 2024 `num_layers`
was `lora_layers`, and `use_dora` stood for `fine_tune_type`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from loraplex.adapters.errors import AdapterRefused
from loraplex.adapters.store.files import CONFIG_NAME, shown

_SIGNS = frozenset({"lora_parameters", "fine_tune_type", "lora_layers"})
_MAX_KEYS = 4096
_MAX_ALPHA = 1e6
_MAX_RANK = 1 << 20


@dataclass(frozen=True, slots=True)
class MlxSettings:
    """`scale` is the factor of x·A·B. `keys` are paths of modules, within a layer or of the whole model; None: every
    linear. `num_layers` counts from the last layer; None: all."""

    rank: int
    scale: float
    use_dora: bool
    keys: frozenset[str] | None
    num_layers: int | None
    base_name: str | None


def is_mlx_config(config: Mapping[str, Any]) -> bool:
    """Whether it is mlx-lm's and not PEFT's."""
    return "peft_type" not in config and not _SIGNS.isdisjoint(config)


def read_mlx_settings(config: Mapping[str, Any]) -> MlxSettings:
    """Raises AdapterRefused (config_invalid, unsupported_feature)."""
    use_dora = _read_type(config)
    given = config.get("lora_parameters")
    if not isinstance(given, dict):
        _invalid("lora_parameters is missing; mlx-lm saves rank and scale there")
    rank, scale = given.get("rank"), given.get("scale")
    if type(rank) is not int or not 1 <= rank <= _MAX_RANK:
        _invalid(f"lora_parameters.rank must be a positive integer, not {shown(rank)}")
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not math.isfinite(scale):
        _invalid(f"lora_parameters.scale must be a number, not {shown(scale)}")
    if abs(scale) * rank > _MAX_ALPHA:
        _invalid(f"lora_parameters.scale times rank must be at most {_MAX_ALPHA:g} in size")
    if "num_layers" not in config:
        _check_old_alpha(config, given, rank)
    base_name = config.get("model")
    return MlxSettings(
        rank,
        float(scale),
        use_dora,
        _read_keys(given.get("keys")),
        _read_layers(config),
        base_name if isinstance(base_name, str) else None,
    )


def _read_type(config: Mapping[str, Any]) -> bool:
    """Whether it is DoRA."""
    kind = config.get("fine_tune_type", config.get("train_type"))
    if kind is None:
        kind = "dora" if config.get("use_dora") is True else "lora"
    if kind == "full":
        _unsupported(
            "mlx_full",
            "fine_tune_type full trains whole weights, which are no adapter; train with fine_tune_type lora or dora",
        )
    if kind not in ("lora", "dora"):
        _unsupported("mlx_fine_tune_type", f"fine_tune_type {shown(kind)} is not served; lora and dora are")
    return bool(kind == "dora")


def _check_old_alpha(config: Mapping[str, Any], given: Mapping[str, Any], rank: int) -> None:
    """Until June 2024 the factor was scale · alpha / rank; from then on alpha was saved and had no effect. Since
    `num_layers` took the place of `lora_layers`, in October 2024, there is no doubt."""
    if "lora_layers" in config and given.get("alpha", rank) != rank:
        _invalid(
            "it was saved by mlx-lm from before October 2024, where lora_parameters.alpha counted or not by the month: "
            "set scale to the factor of the training (scale * alpha / rank until June 2024, scale from then on), and "
            "rename lora_layers to num_layers"
        )


def _read_keys(keys: Any) -> frozenset[str] | None:
    if keys is None:
        return None
    if not isinstance(keys, list) or not all(isinstance(key, str) and key for key in keys):
        _invalid("lora_parameters.keys must be a list of module names")
    if len(keys) > _MAX_KEYS:
        _invalid(f"lora_parameters.keys has {len(keys)} entries; at most {_MAX_KEYS} are accepted")
    return frozenset(keys)


def _read_layers(config: Mapping[str, Any]) -> int | None:
    layers = config.get("num_layers", config.get("lora_layers"))
    if layers is None:
        return None
    if type(layers) is not int:
        _invalid(f"num_layers must be an integer, not {shown(layers)}")
    return layers if layers > 0 else None


def _invalid(what: str) -> NoReturn:
    raise AdapterRefused("config_invalid", f"{CONFIG_NAME} (mlx-lm's): {what}")


def _unsupported(feature: str, what: str) -> NoReturn:
    raise AdapterRefused("unsupported_feature", f"{CONFIG_NAME} (mlx-lm's): {what}", feature=feature)
