"""Classifiers by PEFT: LoRA with a head, made, saved and applied by it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from support.adapters.peft_zoo import train
from support.adapters.tiny_adapters import named_for

LABELS = ["negative", "neutral", "positive"]
CLASSIFIERS: dict[str, dict[str, Any]] = {
    "lora": {"task_type": "SEQ_CLS", "num_labels": 3, "r": 4, "target_modules": ["q_proj", "v_proj", "down_proj"]},
    "dora": {"task_type": "SEQ_CLS", "num_labels": 1, "r": 3, "use_dora": True, "target_modules": ["q_proj", "o_proj"]},
    "tokens": {"task_type": "TOKEN_CLS", "num_labels": 5, "r": 4, "target_modules": ["k_proj", "v_proj", "up_proj"]},
    "dora-tokens": {
        "task_type": "TOKEN_CLS", "num_labels": 2, "r": 2, "use_dora": True, "target_modules": ["v_proj", "up_proj"],
    },
}  # fmt: skip


def _model(base: Path, task_type: str, num_labels: int) -> Any:
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        AutoModelForTokenClassification,
    )

    if task_type == "CAUSAL_LM":
        return AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    kind = AutoModelForTokenClassification if task_type == "TOKEN_CLS" else AutoModelForSequenceClassification
    torch.manual_seed(7)
    return kind.from_pretrained(base, num_labels=num_labels, pad_token_id=0, dtype=torch.float32).eval()


def save_classifiers(
    base: Path, out: Path, chosen: dict[str, dict[str, Any]] = CLASSIFIERS
) -> dict[str, Path]:
    """These adapters, random in A, B and their heads, one directory each below `out`."""
    from peft import LoraConfig, get_peft_model

    made: dict[str, Path] = {}
    model_type = json.loads((base / "config.json").read_text())["model_type"]
    for number, (name, given) in enumerate(chosen.items()):
        options = named_for(model_type, given)
        plain = _model(base, options["task_type"], options.pop("num_labels"))
        model = get_peft_model(plain, LoraConfig(lora_alpha=8, **options))
        train(model, number, 0.3)
        generator = torch.Generator().manual_seed(number)
        for key, weight in model.named_parameters():
            if "modules_to_save" in key:
                weight.data.normal_(0, 0.2, generator=generator)
        model.create_or_update_model_card = lambda folder: None  # a page that nobody reads
        made[name] = out / name
        model.save_pretrained(made[name])
    return made


def save_base_classifier(out: Path, overrides: dict[str, Any], task: str, labels: list[str]) -> Path:
    """A tiny checkpoint that classifies itself, as transformers saves it."""
    from support.models.checkpoints import save_tiny

    save_tiny(out, overrides)
    model = _model(out, "TOKEN_CLS" if task == "token_classify" else "SEQ_CLS", len(labels))
    for weight in model.score.parameters():
        weight.data.normal_(0, 0.2, generator=torch.Generator().manual_seed(5))
    model.config.id2label = dict(enumerate(labels))
    model.save_pretrained(out)
    return out


@torch.no_grad()
def base_logits(base: Path, prompt: list[int]) -> torch.Tensor:
    """Those of such a checkpoint by transformers, as `PeftClassifier.logits` gives them."""
    import transformers

    (name,) = json.loads((base / "config.json").read_text())["architectures"]
    model = getattr(transformers, name).from_pretrained(base, dtype=torch.float32).eval()
    return model(torch.tensor([prompt])).logits[0]


class PeftClassifier:
    """One of them, on its base."""

    def __init__(self, base: Path, folder: Path, num_labels: int) -> None:
        from peft import PeftModel

        config = json.loads((folder / "adapter_config.json").read_text())
        self._model = PeftModel.from_pretrained(_model(base, config["task_type"], num_labels), folder).eval()

    @torch.no_grad()
    def logits(self, prompt: list[int]) -> torch.Tensor:
        """float32 [labels], of a classifier of tokens [tokens, labels]."""
        given = torch.tensor([prompt])
        return self._model(given, attention_mask=torch.ones_like(given)).logits[0]

    @torch.no_grad()
    def hidden(self, prompt: list[int]) -> torch.Tensor:
        """[tokens, C] float32, behind the final norm."""
        return self._model.base_model.model.model(torch.tensor([prompt])).last_hidden_state[0]
