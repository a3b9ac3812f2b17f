"""Saves adapters on the experts of tiny mixtures with the PEFT and the transformers that the path has, each beside the
change of every expert's weights that they compute: `python -m support.models.save_expert_adapters FOLDER FAMILY…`."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import LoraConfig, get_peft_model

from support.models.tiny_families import small_config

CHANGES = "changes.pt"
SEVEN = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
BOTH = ["experts.gate_up_proj", "experts.down_proj"]
STACKS: dict[str, dict[str, Any]] = {
    "all-linear": {"target_modules": "all-linear"},
    "seven": {"target_modules": SEVEN},
    "both": {"target_modules": ["q_proj"], "target_parameters": BOTH},
    "down": {"target_modules": [], "target_parameters": BOTH[1:]},
    "gate-up": {"target_modules": [], "target_parameters": BOTH[:1]},
}
PAIRS: dict[str, dict[str, Any]] = {
    "all-linear": {"target_modules": "all-linear"},
    "names": {"target_modules": [*SEVEN, "w1", "w2", "w3"]},
    "rslora": {"target_modules": [*SEVEN, "w1", "w2", "w3"], "use_rslora": True},
    "dora": {"target_modules": [*SEVEN, "w1", "w2", "w3"], "use_dora": True},
}
_STACK = re.compile(r"layers\.(\d+)\..*experts\.(gate_up|down)_proj$")
_ONE = re.compile(r"layers\.(\d+)\..*experts\.(\d+)\.(gate_proj|up_proj|down_proj|w1|w2|w3)\.weight$")
_SITES = {"w1": "gate", "w3": "up", "w2": "down", "gate_proj": "gate", "up_proj": "up", "down_proj": "down"}


def weights(model: torch.nn.Module, *, turned: bool) -> dict[tuple[int, int, str], torch.Tensor]:
    """Every expert's linears [out, in] by layer, expert and site."""
    found = {}
    for name, weight in model.named_parameters():
        if stack := _STACK.search(name):
            for expert, matrix in enumerate(weight.detach()):
                found[int(stack[1]), expert, stack[2]] = (matrix.T if turned else matrix).clone()
        elif one := _ONE.search(name):
            found[int(one[1]), int(one[2]), _SITES[one[3]]] = weight.detach().clone()
    return found


def tiny(family: str) -> torch.nn.Module:
    torch.manual_seed(0)
    config = small_config(family, **({"num_local_experts": 4} if family == "gpt_oss" else {}))
    return transformers.AutoModelForCausalLM.from_config(config, torch_dtype=torch.float32)


def main(out: Path, families: list[str]) -> None:
    recipes = PAIRS if transformers.__version__.startswith("4.") else STACKS
    for family in families:
        turned = family == "gpt_oss"
        for recipe, fields in recipes.items():
            model = tiny(family)
            before = weights(model, turned=turned)
            try:
                trained = get_peft_model(model, LoraConfig(r=4, lora_alpha=6, **fields))
            except ValueError as error:  # some releases refuse some recipes
                print(f"{family} {recipe}: {error}")
                continue
            for name, weight in trained.named_parameters():
                if ".lora_" in name and "magnitude" not in name:
                    torch.nn.init.normal_(weight, std=0.2)
            trained.save_pretrained(out / f"{family}-{recipe}")
            after = weights(trained.merge_and_unload(), turned=turned)
            changes = {key: after[key] - before[key] for key in before}
            torch.save(
                {key: change for key, change in changes.items() if change.any()},
                out / f"{family}-{recipe}" / CHANGES,
            )


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
