#!/usr/bin/env bash
# Believed: PEFT loads an adapter that has a pair of matrices for each expert (as all did with transformers 4) with the scaling it was trained with.
# So is: on stacked experts it joins gate and up in one pair of twice the rank and doubles lora_alpha, so that alpha / rank stays. With
# use_rslora the scaling is alpha / sqrt(rank), which this makes sqrt(2) larger: gate and up are 1.41 times too strong, down is right. No error.
# Seen: peft 0.21.2, transformers 5.23.0 (Qwen3MoeForCausalLM), torch 2.13.0, 2026-11-28, logits beside weights merged by hand:
#   use_rslora False: off 0 of an effect of 2.59; use_rslora True: off 1.96 of an effect of 6
set -euo pipefail
place=$(mktemp -d); trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 2>/dev/null
"$place/venv/bin/pip" install --quiet --disable-pip-version-check transformers==5.23.0 peft==0.21.2 safetensors==0.8.0 2>/dev/null
cat >"$place/pairs.py" <<'PY'
import json
import sys
from pathlib import Path

import torch
from peft import PeftModel
from safetensors.torch import save_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

place = Path(sys.argv[1])
EXPERTS, HIDDEN, INNER, RANK, ALPHA = 4, 64, 32, 8, 16
SHAPES = {"gate_proj": (INNER, HIDDEN), "up_proj": (INNER, HIDDEN), "down_proj": (HIDDEN, INNER)}
PREFIX = "base_model.model.model.layers.0.mlp.experts"


def base():
    torch.manual_seed(0)
    sizes = {"hidden_size": HIDDEN, "intermediate_size": 96, "moe_intermediate_size": INNER, "num_hidden_layers": 1, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": EXPERTS, "num_experts_per_tok": 2}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(vocab_size=256, initializer_range=0.15, **sizes, **heads)).eval()


def logits(model):
    with torch.no_grad():
        return model(input_ids=torch.arange(3, 40)[None]).logits


def compare(rslora):
    torch.manual_seed(1)
    tensors = {}
    for expert in range(EXPERTS):
        for name, (outputs, inputs) in SHAPES.items():
            tensors[f"{PREFIX}.{expert}.{name}.lora_A.weight"] = torch.randn(RANK, inputs) * 0.1
            tensors[f"{PREFIX}.{expert}.{name}.lora_B.weight"] = torch.randn(outputs, RANK) * 0.1
    folder = place / f"rslora-{rslora}"
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": ALPHA, "target_modules": list(SHAPES)}
    (folder / "adapter_config.json").write_text(json.dumps(config | {"use_rslora": rslora, "base_model_name_or_path": "tiny"}))
    scaling = ALPHA / (RANK**0.5 if rslora else RANK)
    merged = base()
    experts = merged.model.layers[0].mlp.experts
    for expert in range(EXPERTS):
        a, b = ({name: tensors[f"{PREFIX}.{expert}.{name}.lora_{side}.weight"] for name in SHAPES} for side in "AB")
        delta = {name: scaling * b[name] @ a[name] for name in SHAPES}
        experts.gate_up_proj.data[expert] += torch.cat([delta["gate_proj"], delta["up_proj"]])
        experts.down_proj.data[expert] += delta["down_proj"]
    right = logits(merged)
    off = float((logits(PeftModel.from_pretrained(base(), folder).eval()) - right).abs().max())
    effect = float((right - logits(base())).abs().max())
    print(f"use_rslora {rslora}: off {off:.3g} of an effect of {effect:.3g}")
    return off / effect


plain, rslora = compare(False), compare(True)
sys.exit(0 if plain < 1e-3 and rslora > 0.1 else "changed")
PY
"$place/venv/bin/python" "$place/pairs.py" "$place" 2>/dev/null
