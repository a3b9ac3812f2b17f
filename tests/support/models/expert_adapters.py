"""LoRA on routed experts: as PEFT saves it of tiny mixtures, and by hand in the forms of others."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import save_file

from loraplex.adapters.admission.experts.forms import ExpertForms, read_experts
from loraplex.adapters.admission.experts.places import expert_paths, take_experts
from loraplex.adapters.admission.faults import Faults
from loraplex.adapters.admission.module_names import names_of
from loraplex.adapters.admission.peft_config import read_settings
from loraplex.adapters.admission.safetensors_header import read_header
from loraplex.adapters.admission.tensor_names import sort_tensors, unwrap, weight_names
from loraplex.adapters.expert_shapes import find_experts
from loraplex.adapters.spec import BaseSpec, ExpertShape
from loraplex.adapters.store.tensors import read_tensor

PREFIX = "base_model.model."
CONFIG = {
    "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8, "lora_dropout": 0.0, "bias": "none",
    "peft_version": "0.21.2", "target_modules": ["q_proj", "gate_proj", "up_proj", "down_proj"],
}  # fmt: skip
Arrays = dict[str, NDArray[np.float32]]
Changes = dict[tuple[int, int], dict[str, NDArray[np.float32]]]
"""B·A with its scaling by layer and expert: of gate_up, gate before up, and of down."""


def plain_base(experts: dict[int, ExpertShape]) -> BaseSpec:
    """A base with nothing but experts."""
    layers = max(experts) + 1
    return BaseSpec("0" * 64, "mixture", layers, {}, "", experts=experts)


def experts_of(model: torch.nn.Module) -> dict[int, ExpertShape]:
    shapes = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
    return find_experts({}, shapes, model.config.num_hidden_layers)


def write(folder: Path, tensors: Arrays, **fields: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file({PREFIX + name: array for name, array in tensors.items()}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG | fields))
    return folder


def read(folder: Path, experts: dict[int, ExpertShape], *, max_rank: int = 16) -> ExpertForms:
    """Read what the files of an adapter have on experts."""
    base = plain_base(experts)
    header = unwrap(read_header(folder / "adapter_model.safetensors"))
    names = names_of(weight_names(header), base)
    faults = Faults()
    paths = list(expert_paths(weight_names(header), base, names))
    settings = read_settings(folder / "adapter_config.json", paths, faults, header, has_experts=True)
    faults.raise_any()
    assert settings is not None
    taken = take_experts(sort_tensors(header), base, names)
    return read_experts(taken, experts, settings.with_names(names), max_rank)


def changes(folder: Path, forms: ExpertForms, experts: dict[int, ExpertShape]) -> Changes:
    path = folder / "adapter_model.safetensors"
    found: Changes = {}
    for weights in forms.weights:
        shape = experts[weights.layer]
        a, b = read_tensor(path, weights.a), read_tensor(path, weights.b)
        for expert in range(shape.count) if weights.expert < 0 else [weights.expert]:
            one, other = a, b
            if weights.expert < 0:
                one = a.reshape(shape.count, weights.rank, -1)[expert]
                other = b.reshape(len(b), weights.rank, shape.count)[:, :, expert]
            if weights.turned:
                one, other = other.T, one.T
            into = found.setdefault((weights.layer, expert), {})
            change = weights.scaling * other @ one
            if weights.site in ("gate", "up"):
                inner = shape.inner_size
                whole = into.setdefault("gate_up", np.zeros((2 * inner, shape.hidden_size), np.float32))
                whole[:inner] += change if weights.site == "gate" else 0
                whole[inner:] += change if weights.site == "up" else 0
            else:
                into[weights.site] = change
    return found


def changes_in(merged: torch.nn.Module, base: torch.nn.Module, *, turned: bool) -> Changes:
    """The difference of two models' stacked weights. `turned`: they are stored as [experts, in, out]."""
    before = dict(base.named_parameters())
    found: Changes = {}
    for name, weight in merged.named_parameters():
        place = re.search(r"layers\.(\d+)\..*experts\.(gate_up|down)_proj$", name)
        if place is None:
            continue
        difference = (weight - before[name]).detach().numpy()
        for expert, change in enumerate(difference):
            into = found.setdefault((int(place[1]), expert), {})
            into[place[2]] = change.T if turned else change
    return found


def pairs(
    experts: dict[int, ExpertShape],
    rank: int = 4,
    leaves: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj"),
) -> Arrays:
    """A pair an expert; `leaves` are the names of gate, up and down."""
    random = np.random.default_rng(0)
    found: Arrays = {}
    for shape in experts.values():
        for expert in range(shape.count):
            for leaf, down in zip(leaves, (False, False, True), strict=True):
                k, n = shape.hidden_size, shape.inner_size
                k, n = (n, k) if down else (k, n)
                path = f"{shape.module_path}.{expert}.{leaf}"
                found[f"{path}.lora_A.weight"] = random.standard_normal((rank, k), np.float32)
                found[f"{path}.lora_B.weight"] = random.standard_normal((n, rank), np.float32)
    return found


def stacks(experts: dict[int, ExpertShape], rank: int = 4, *, turned: bool = False) -> Arrays:
    """PEFT's stacks of gate_up and down."""
    random = np.random.default_rng(1)
    found: Arrays = {}
    for shape in experts.values():
        for end, (k, n) in {
            "experts.base_layer": (shape.hidden_size, 2 * shape.inner_size),
            "experts": (shape.inner_size, shape.hidden_size),
        }.items():
            path = shape.module_path.removesuffix("experts") + end
            columns, height = (n, k) if turned else (k, n)
            rows = rank * shape.count
            found[f"{path}.lora_A.weight"] = random.standard_normal((rows, columns), np.float32)
            found[f"{path}.lora_B.weight"] = random.standard_normal((height, rows), np.float32)
    return found


def three_dimensions(experts: dict[int, ExpertShape], rank: int) -> Arrays:
    """Tinker's: one A of gate and up, and one B of down, for all experts."""
    random = np.random.default_rng(2)
    found: Arrays = {}
    for shape in experts.values():
        h, i, e, path = shape.hidden_size, shape.inner_size, shape.count, shape.module_path
        for leaf in ("w1", "w3"):
            found[f"{path}.{leaf}.lora_A.weight"] = random.standard_normal((1, rank, h), np.float32)
            found[f"{path}.{leaf}.lora_B.weight"] = random.standard_normal((e, i, rank), np.float32)
        found[f"{path}.w2.lora_A.weight"] = random.standard_normal((e, rank, i), np.float32)
        found[f"{path}.w2.lora_B.weight"] = random.standard_normal((1, h, rank), np.float32)
    return found
