"""Adapters that PEFT itself makes and applies: the yardstick for what the engine computes."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file, save_file

from support.models.checkpoints import experts_in

ALL_SITES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

ZOO: dict[str, dict[str, Any]] = {
    "r1-qv": {"r": 1, "lora_alpha": 2, "target_modules": ["q_proj", "v_proj"]},
    "r3-mlp": {"r": 3, "lora_alpha": 3, "target_modules": ["gate_proj", "up_proj", "down_proj"]},
    "r8-all": {"r": 8, "lora_alpha": 16, "target_modules": ALL_SITES},
    "r16-rslora": {"r": 16, "lora_alpha": 8, "use_rslora": True, "target_modules": ALL_SITES},
    "r64-all": {"r": 64, "lora_alpha": 64, "target_modules": ALL_SITES},
    "patterns": {
        "r": 8,
        "lora_alpha": 8,
        "target_modules": ALL_SITES,
        "rank_pattern": {"q_proj": 24, "mlp.down_proj": 5},
        "alpha_pattern": {"q_proj": 48, "self_attn.k_proj": 4},
    },
    "some-layers": {
        "r": 12,
        "lora_alpha": 24,
        "target_modules": ["k_proj", "o_proj", "up_proj"],
        "layers_to_transform": [0, 3, 7, 29],
    },
    "rslora-patterns": {
        "r": 4,
        "lora_alpha": 6,
        "use_rslora": True,
        "target_modules": ["o_proj", "down_proj"],
        "rank_pattern": {"down_proj": 32},
    },
}

KINDS: dict[str, dict[str, Any]] = {
    "dora": {"r": 8, "lora_alpha": 16, "use_dora": True, "target_modules": ALL_SITES},
    "dora-rslora-qkv": {
        "r": 20,
        "lora_alpha": 8,
        "use_dora": True,
        "use_rslora": True,
        "target_modules": ["q_proj", "v_proj"],
        "layers_to_transform": [0, 5, 29],
        "fan_in_fan_out": True,
    },
    "head": {"r": 6, "lora_alpha": 12, "target_modules": ["lm_head"]},
    "head-dora-and-layers": {
        "r": 4,
        "lora_alpha": 8,
        "use_dora": True,
        "target_modules": [*ALL_SITES, "lm_head"],
        "layers_to_transform": [0, 14, 29],
        "rank_pattern": {"lm_head": 9},
    },
    "expression": {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": r".*\.layers\.1?[05]\..*(q|v|down)_proj",
        "exclude_modules": r".*\.0\..*",
    },
}
"""What adapters may be beside plain LoRA in the layers by a list of names."""

STORED: dict[str, torch.dtype] = {
    "in-float64": torch.float64,
    "in-float16": torch.float16,
    "in-bfloat16": torch.bfloat16,
    "in-float8": torch.float8_e4m3fn,
}
"""Dtypes that PEFT loads: a copy of "some-layers" each."""


def cut_model(base: Path, out: Path, num_layers: int) -> Path:
    """`base` with its first layers alone, as a model directory."""
    out.mkdir()
    for path in base.iterdir():
        if path.suffix != ".safetensors":
            shutil.copy(path, out)
    config = json.loads((base / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | {"num_hidden_layers": num_layers}))
    (weights,) = base.glob("*.safetensors")
    kept = {
        name: tensor
        for name, tensor in load_file(weights).items()
        if not (layer := re.match(r"model\.layers\.(\d+)\.", name)) or int(layer[1]) < num_layers
    }
    save_file(kept, out / weights.name, metadata={"format": "pt"})
    return out


def make_zoo(base: Path, out: Path, *, std: float = 0.02) -> dict[str, Path]:
    """One directory an adapter of `ZOO`, `KINDS` and `STORED`, with random A and B: saved by PEFT in float32, and
    copied in other dtypes. For a model of fewer layers, its last one stands for those that it lacks."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    made: dict[str, Path] = {}
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    last = plain.config.num_hidden_layers - 1
    for number, (name, given) in enumerate((ZOO | KINDS).items()):
        options = dict(given)
        if "layers_to_transform" in options:
            options["layers_to_transform"] = sorted(
                {min(layer, last) for layer in given["layers_to_transform"]}
            )
        model = get_peft_model(plain, LoraConfig(task_type="CAUSAL_LM", **options))
        train(model, number, std)
        model.create_or_update_model_card = lambda folder: None  # a page that nobody reads
        made[name] = out / name
        model.save_pretrained(made[name], save_embedding_layers=False)
        plain = model.unload()
    for name, dtype in STORED.items():
        made[name] = out / name
        shutil.copytree(made["some-layers"], made[name])
        path = made[name] / "adapter_model.safetensors"
        save_file({key: tensor.to(dtype) for key, tensor in load_file(path).items()}, path)
    return made


def train(model: Any, seed: int, std: float) -> None:
    """What stands for training: random A and B, and DoRA's magnitudes moved by some tenths of their size."""
    generator = torch.Generator().manual_seed(seed)
    for key, weight in model.named_parameters():
        if "lora_magnitude_vector" in key:
            weight.data.mul_(1 + 0.2 * torch.randn(weight.shape, generator=generator))
        elif "trainable_tokens_delta" in key:
            # Rows of the base, moved by as much as they are large.
            weight.data.add_(float(weight.data.std()) * torch.randn(weight.shape, generator=generator))
        elif "lora_" in key:
            weight.data.normal_(0, std, generator=generator)


@contextmanager
def any_linear() -> Iterator[None]:
    """Lets PEFT put LoRA on a Mamba-2's out_proj, which it refuses: fused kernels for training read the weight alone.
    Passes in torch go through the module."""
    from peft.tuners import tuners_utils

    with mock.patch.object(tuners_utils, "_check_lora_target_modules_mamba"):
        yield


class PeftReference:
    """transformers + PEFT with many adapters loaded, one at a time in use."""

    def __init__(self, base: Path, adapters: dict[str, Path], dtype: torch.dtype) -> None:
        from peft import PeftModel
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(base, dtype=dtype, **experts_in(dtype))
        names = list(adapters)
        self._adapters = names
        with any_linear():
            self.model = PeftModel.from_pretrained(
                model, adapters[names[0]], adapter_name=_safe(names[0]), autocast_adapter_dtype=False
            )
            for name in names[1:]:
                self.model.load_adapter(
                    adapters[name], adapter_name=_safe(name), autocast_adapter_dtype=False
                )
        self.model.to(dtype).eval()

    @contextmanager
    def _using(self, name: str | None) -> Iterator[Any]:
        if name is None:
            with self.model.disable_adapter():
                yield self.model
        else:
            self.model.set_adapter(_safe(name))
            yield self.model

    @torch.no_grad()
    def logits(self, name: str | None, token_ids: list[int], *, acts_from: int | None = None) -> torch.Tensor:
        """[len(token_ids), V] float32: teacher-forced logits of every position. `acts_from`: the position from which an
        activated adapter acts, whatever the tokens behind it spell."""
        options = {} if acts_from is None else {"alora_offsets": [len(token_ids) - acts_from]}
        with self._using(name) as model:
            return model(torch.tensor([token_ids]), **options).logits[0].float()

    @torch.no_grad()
    def logits_and_hidden(self, name: str | None, token_ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """`logits` and `hidden` of one pass."""
        with self._using(name) as model:
            found = model(torch.tensor([token_ids]), output_hidden_states=True)
            return found.logits[0].float(), found.hidden_states[-1][0].float()

    def hidden(self, name: str | None, token_ids: list[int]) -> torch.Tensor:
        """[len(token_ids), C] float32: the hidden states of every position behind the final norm."""
        return self.logits_and_hidden(name, token_ids)[1]


def _safe(name: str) -> str:
    # PEFT uses adapter names as module names, where a dot is not allowed.
    return name.replace(".", "_").replace("-", "_")
