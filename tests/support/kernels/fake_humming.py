"""A package in the place of humming-kernels: its type of linears, with the checks and tensors of 0.1.19, computed on
any device by the library's own formula (`dequantize_weight`: a word's lowest bits are its first code, 8 stands for 0).
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch


class HummingLayer(torch.nn.Module):
    """Linears that were made are in `made`. `fails`: what `transform` raises."""

    made: list[HummingLayer]
    fails: Exception | None = None

    def __init__(
        self, shape_n: int, shape_k: int, weight_config: dict[str, Any], *, torch_dtype: torch.dtype
    ) -> None:
        super().__init__()
        assert weight_config["dtype"] == "int4"
        assert torch_dtype in (torch.float16, torch.bfloat16)
        self.group = weight_config["group_size"]
        self.is_transformed = False
        self.calls = 0
        for name, tensor in {
            "weight": torch.zeros(shape_n, shape_k * 4 // 32, dtype=torch.int32),
            "weight_scale": torch.zeros(shape_n, shape_k // self.group, dtype=torch_dtype),
        }.items():
            setattr(self, name, torch.nn.Parameter(tensor, requires_grad=False))
        self.made.append(self)

    def load_from_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
        for name, own in self.named_parameters():
            assert (tensors[name].shape, tensors[name].dtype) == (own.shape, own.dtype), name
        self.load_state_dict(tensors, strict=False)

    def transform(self) -> None:
        if self.fails is not None:
            raise self.fails
        assert self.weight.shape[0] % 64 == 0
        assert self.weight.shape[1] * 8 % 32 == 0
        self.is_transformed = True

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        assert self.is_transformed, "call transform() before forward()"
        self.calls += 1
        codes = torch.stack([self.weight >> 4 * place & 15 for place in range(8)], -1).flatten(1)
        scales = self.weight_scale.double().repeat_interleave(self.group, 1)
        # In float64 the order of sums, which depends on the number of rows, changes no rounded result.
        return (inputs.double() @ ((codes - 8) * scales).T).to(inputs.dtype)


def install_fake(
    monkeypatch: pytest.MonkeyPatch, folder: Path, version: str = "0.1.19"
) -> type[HummingLayer]:
    """A stand-in for the installed wheel: its metadata below `folder`, and its module. Gives the type of linears."""
    info = folder / f"humming_kernels-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.4\nName: humming-kernels\nVersion: {version}\n")
    monkeypatch.syspath_prepend(str(folder))
    layer: type[HummingLayer] = type("HummingLayer", (HummingLayer,), {"made": []})
    package, module = ModuleType("humming"), ModuleType("humming.layer")
    package.__path__ = []
    module.HummingLayer = layer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "humming", package)
    monkeypatch.setitem(sys.modules, "humming.layer", module)
    return layer
