"""What an adapter gives, computed another way: float32, transformers' own modules, and the files read by code of its
own.

The weights stay in the checkpoint's dtype. Each linear is widened while it runs, so the memory beside the model is one
linear, or one slice of the head.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch.nn.functional import linear
from transformers import AutoModelForCausalLM

_PREFIX = "base_model.model."
_ENDS = {
    ".lora_A.weight": "a",
    ".lora_B.weight": "b",
    ".lora_magnitude_vector": "magnitude",
    ".lora_magnitude_vector.weight": "magnitude",
}
_MAX_SLICE = 1 << 24
"""Weights that are widened at a time."""


@dataclass(frozen=True, slots=True)
class AdaptedLinear:
    """One linear's LoRA in float32: a [r, K], b [N, r], with `scaling`; DoRA's magnitude [N], or None."""

    a: torch.Tensor
    b: torch.Tensor
    scaling: float
    magnitude: torch.Tensor | None

    def norm(self) -> float:
        """Of scaling·B·A (Frobenius). ‖B·A‖² is the sum of the elements of (BᵀB)·(AAᵀ), each r×r."""
        squared = ((self.b.T @ self.b).double() * (self.a @ self.a.T).double()).sum()
        return abs(self.scaling) * math.sqrt(max(0.0, float(squared)))


def read_adapter(config_path: Path, tensors_path: Path) -> dict[str, AdaptedLinear]:
    """By the path of the module in transformers' model. Raises OSError."""
    config = json.loads(config_path.read_bytes())
    found: dict[str, dict[str, torch.Tensor]] = {}
    with safe_open(str(tensors_path), framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 - no mapping
            end = next((end for end in _ENDS if name.endswith(end)), None)
            if end is not None:
                path = name.removesuffix(end).removeprefix(_PREFIX)
                found.setdefault(path, {})[_ENDS[end]] = file.get_tensor(name).float()
    return {path: _linear(path, tensors, config) for path, tensors in sorted(found.items())}


def _linear(path: str, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> AdaptedLinear:
    a, b = tensors["a"], tensors["b"]
    rank = a.shape[0]
    alpha = float(_pattern_value(config.get("alpha_pattern") or {}, path, config.get("lora_alpha", 8)))
    divisor = math.sqrt(rank) if config.get("use_rslora") else rank
    return AdaptedLinear(a, b, alpha / divisor, tensors.get("magnitude"))


def _pattern_value(patterns: Mapping[str, Any], path: str, default: Any) -> Any:
    """The first pattern, in the file's order, that names the end of the path. Patterns of an admitted adapter are
    literal names: `^` marks a whole path."""
    for key, value in patterns.items():
        whole = key.startswith("^")
        name = key.removeprefix("^").removesuffix("$").replace("\\.", ".")
        if path == name or (not whole and path.endswith("." + name)):
            return value
    return default


class ReferenceModel:
    """A causal model of transformers. `log_probs` is for one thread at a time."""

    def __init__(self, model_dir: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(
            model_dir, dtype="auto", attn_implementation="eager", local_files_only=True
        ).eval()
        self._adapter: Mapping[str, AdaptedLinear] = {}
        for path, module in self._model.named_modules():
            if isinstance(module, torch.nn.Linear):
                module.forward = partial(self._linear, path, module)
            elif isinstance(module, torch.nn.Embedding):
                module.register_forward_hook(lambda module, arguments, output: output.float())
            else:
                for parameter in module.parameters(recurse=False):
                    parameter.data = parameter.data.float()

    @torch.inference_mode()
    def log_probs(
        self, prompts: Sequence[Sequence[int]], adapter: Mapping[str, AdaptedLinear]
    ) -> list[torch.Tensor]:
        """[L, V] float32 for each prompt of L tokens; with an empty `adapter` those of the base."""
        self._adapter = adapter
        return [
            self._model(input_ids=torch.tensor([list(prompt)]), use_cache=False)
            .logits[0]
            .float()
            .log_softmax(-1)
            for prompt in prompts
        ]

    def _linear(self, path: str, module: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
        x = x.float()
        weight = module.weight
        step = max(1, _MAX_SLICE // weight.shape[1])
        parts = [linear(x, rows.float()) for rows in weight.split(step)]
        y = torch.cat(parts, -1) if len(parts) > 1 else parts[0]
        site = self._adapter.get(path)
        if site is not None:
            y += site.scaling * linear(linear(x, site.a), site.b)
            if site.magnitude is not None:
                y *= self._dora_factor(weight, site)
        return y if module.bias is None else y + module.bias.float()

    @staticmethod
    def _dora_factor(weight: torch.Tensor, site: AdaptedLinear) -> torch.Tensor:
        """m / ‖W + scaling·B·A‖ of each output [N] (DoRA, arXiv 2402.09353, equation 5)."""
        assert site.magnitude is not None
        step = max(1, _MAX_SLICE // weight.shape[1])
        norms = [
            torch.linalg.vector_norm(rows.float() + site.scaling * (b @ site.a), dim=1)
            for rows, b in zip(weight.split(step), site.b.split(step), strict=True)
        ]
        return site.magnitude.reshape(-1) / torch.cat(norms)
