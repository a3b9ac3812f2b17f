"""Ordinary adapters of every family that is served: each equals PEFT's. One that lacks tensors, or whose names bind to
nothing, is refused, or equal to what PEFT loads of the same file."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file, save_file

from loraplex.adapters.admission.base_model import load_base_spec
from loraplex.adapters.admission.inspection import inspect_adapter
from loraplex.adapters.admission.model_parts import MULTIMODAL, parts_of
from loraplex.adapters.errors import AdapterRefused
from loraplex.adapters.spec import AdapterSpec, BaseSpec
from loraplex.adapters.store.tensors import read_tensor
from loraplex.kernels.lora.site_groups import EMBEDDING, HEAD
from support.adapters.peft_zoo import train
from support.models.tiny_families import save_family
from support.models.tiny_multimodal import load_plain, save_multimodal

Tensors = dict[str, torch.Tensor]
SERVED = (
    "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "apertus", "arcee", "aria_text",
    "biogpt", "bitnet", "cohere", "cohere2", "cohere2_moe", "cohere_compass_text", "cwm", "ernie4_5", "exaone4",
    "flex_olmo", "gemma", "gemma3n_text", "glm", "glm4", "gpt_neox", "granite", "granitemoe", "granitemoehybrid",
    "granitemoeshared", "helium", "hunyuan_v1_dense", "hunyuan_v1_moe", "hyperclovax", "internlm3", "iquestcoder",
    "jais2", "kolibri1", "mellum", "minimax_m2", "minimax_m3_vl_text", "ministral", "ministral3", "mixtral",
    "modernbert-decoder", "nanochat", "nemotron", "olmo", "olmo2", "olmo3", "olmoe", "opt", "persimmon", "phi",
    "qwen2_moe", "qwen3_moe", "seed_oss", "smollm3", "solar_open", "stablelm", "starcoder2", "vaultgemma", "afmoe",
    "dots1", "ernie4_5_moe", "exaone_moe", "glm4_moe", "hy_v3", "qwen3_5_text", "beam", "gemma4_text",
    "gemma4_unified_text", "lfm2", "lfm3", "moshi", "phimoe", "olmo_hybrid", "qwen3_5_moe_text",
    "qwen3_next",
)  # fmt: skip
OFTEN = ("llama", "phi3", "granitemoehybrid", "glm4_moe", "gpt_neox", "hy_v3", "qwen3_5_text", "qwen2_5_vl")
"""Separate and packed linears, a mixture with a dense layer and a shared expert, names of their own, a file whose
names are not the modules', delta nets, and a multimodal type; the long version has all."""


# Nor laguna among SERVED: PEFT loses its shared experts when it loads what it saved.
UNMADE = ("qwen3_omni_moe", "qwen3_omni_moe_thinker")
"""PEFT raises for one of the audio part's linears."""


def make_adapter(base_dir: Path, targets: Any, out: Path) -> Path:
    """Trained by noise, saved by PEFT."""
    config = LoraConfig(r=4, lora_alpha=6, target_modules=targets, task_type="CAUSAL_LM")
    model = get_peft_model(load_plain(base_dir), config)
    train(model, 0, 0.1)
    model.save_pretrained(out)
    return out


def admit(folder: Path, base: BaseSpec) -> AdapterSpec:
    return inspect_adapter(
        folder / "adapter_config.json", folder / "adapter_model.safetensors", base, max_rank=16
    )


def make_ordinary(base_dir: Path, base: BaseSpec, out: Path) -> Path:
    """On all linears where that is served; else on those that the refusal names, or on all sites."""
    folder = make_adapter(base_dir, "all-linear", out / "all")
    try:
        admit(folder, base)
    except AdapterRefused as error:
        refusal = error
    else:
        return folder
    told = re.search(r"target_modules=(\[[^]]+\])", refusal.message)
    assert told or "experts" not in {fault.feature for fault in refusal.faults}, refusal.message
    sites = sorted({site for _, site in base.sites} - {HEAD, EMBEDDING})
    return make_adapter(base_dir, json.loads(told[1]) if told else sites, out / "told")


def changes_of(folder: Path, spec: AdapterSpec, base: BaseSpec) -> dict[str, torch.Tensor]:
    """scaling·B·A of each module that has any."""
    path = folder / "adapter_model.safetensors"
    return {
        base.sites[site.layer, site.site].module_path: site.scaling
        * torch.from_numpy(read_tensor(path, site.b) @ read_tensor(path, site.a))
        for site in spec.sites
    }


def changes_in_peft(folder: Path, base_dir: Path) -> dict[str, torch.Tensor]:
    """The same, as PEFT loads the files, without parts that no text goes through, and without routed experts, which
    `experts/test_forms.py` compares."""
    model = PeftModel.from_pretrained(load_plain(base_dir), folder)
    parts = parts_of(model.config.model_type)
    layers = {
        name.removeprefix("base_model.model."): layer
        for name, layer in model.named_modules()
        if isinstance(layer, LoraLayer)
        and "experts" not in name.split(".")
        and parts.part_of(name.removeprefix("base_model.model.")) is None
    }
    with torch.no_grad():
        changes = {name: layer.get_delta_weight("default") for name, layer in layers.items()}
    return {name: change for name, change in changes.items() if change.any()}


def check_equal(folder: Path, spec: AdapterSpec, base: BaseSpec, base_dir: Path) -> None:
    ours, theirs = changes_of(folder, spec, base), changes_in_peft(folder, base_dir)
    assert ours.keys() == theirs.keys()
    for module, change in ours.items():
        torch.testing.assert_close(change, theirs[module], atol=1e-6, rtol=1e-5)


def lacking(tensors: Tensors, model_type: str) -> Iterator[tuple[str, Tensors]]:
    """Names of what is dropped of an adapter, or renamed, each with what is left."""
    prefix, parts = "base_model.model.", parts_of(model_type)
    modules = sorted({name.rpartition(".lora_")[0] for name in tensors})
    modules = [module for module in modules if parts.part_of(module.removeprefix(prefix)) is None]
    for matrix in "AB":
        name = f"{modules[-1]}.lora_{matrix}.weight"
        yield f"one lora_{matrix}", {other: t for other, t in tensors.items() if other != name}
    yield "one module", {name: t for name, t in tensors.items() if not name.startswith(f"{modules[-1]}.")}
    for leaf in sorted({module.rpartition(".")[2] for module in modules}):
        left = {name: t for name, t in tensors.items() if f".{leaf}.lora_" not in name}
        if left:
            yield f"all of {leaf}", left
    yield "everything", {}
    for decoder in ("model.language_model.model.", "transformer.", "model.visual."):
        yield decoder, {prefix + decoder + name.removeprefix(prefix): t for name, t in tensors.items()}


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(f, marks=() if f in OFTEN else pytest.mark.soak)
        for f in (*SERVED, *MULTIMODAL)
        if f not in UNMADE
    ],
)
def test_an_adapter_that_lacks_tensors_is_refused_or_equal_to_peft(family: str, tmp_path: Path) -> None:
    base_dir = (save_multimodal if family in MULTIMODAL else save_family)(family, tmp_path / "base")
    base = load_base_spec(base_dir)
    folder = make_ordinary(base_dir, base, tmp_path)
    check_equal(folder, admit(folder, base), base, base_dir)

    tensors_path, config_path = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    whole, config = load_file(tensors_path), json.loads(config_path.read_text())
    expression = rf"(.*\.)?({'|'.join(config['target_modules'])})"
    for targets in (config["target_modules"], expression):
        config_path.write_text(json.dumps(config | {"target_modules": targets}))
        accepted = []
        for what, tensors in lacking(whole, family):
            save_file(tensors, tensors_path, metadata={"format": "pt"})
            try:
                spec = admit(folder, base)
            except AdapterRefused:
                continue
            accepted.append(what)
            check_equal(folder, spec, base, base_dir)
        # A list of names tells that a module is missing. By an expression the tensors tell what was trained.
        assert bool(accepted) == (targets == expression)
        assert all(what.startswith(("one module", "all of")) for what in accepted)
