#!/usr/bin/env bash
# Believed: an adapter that PEFT 0.18 has saved answers the same in today's PEFT, or does not load.
# So is: up to 0.19.0 PEFT saved LoRA on stacked experts (target_parameters) the other way round: lora_A stood on the outputs. Where a stack
# is not square the shapes no longer fit and the load fails. OLMoE's gate and up are square (hidden size = 2 x the width of an expert, as in
# OLMoE-1B-7B): the file loads without an error or a warning, and A and B have changed places.
# Seen: peft 0.18.1 saves, 0.18.1 and 0.21.2 load; transformers 5.23.0 (OlmoeForCausalLM), torch 2.13.0, 2026-11-29:
#   peft 0.18.1 off 0 of an effect of 1.7
#   peft 0.21.2 off 2.33 of an effect of 1.7
set -euo pipefail
place=$(mktemp -d); trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 2>/dev/null
"$place/venv/bin/pip" install --quiet --disable-pip-version-check transformers==5.23.0 accelerate==1.15.0 safetensors==0.8.0 psutil==7.2.2 2>/dev/null
for version in 0.18.1 0.21.2; do
    "$place/venv/bin/pip" install --quiet --disable-pip-version-check --no-deps --target "$place/peft-$version" peft==$version 2>/dev/null
done
cat >"$place/square.py" <<'PY'
import sys
from pathlib import Path

import peft
import torch
from transformers import OlmoeConfig, OlmoeForCausalLM

folder, step = Path(sys.argv[1]) / "adapter", sys.argv[2]
HIDDEN = 48


def base():
    torch.manual_seed(0)
    sizes = {"hidden_size": HIDDEN, "intermediate_size": HIDDEN // 2, "num_hidden_layers": 2, "num_attention_heads": 4}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "initializer_range": 0.12}
    return OlmoeForCausalLM(OlmoeConfig(vocab_size=128, num_key_value_heads=2, **sizes, **experts)).eval()


def logits(model):
    with torch.no_grad():
        return model(input_ids=torch.arange(3, 40)[None]).logits


if step == "save":
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=[], target_parameters=["experts.gate_up_proj"])
    model = peft.get_peft_model(base(), config).eval()
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            parameter.data = torch.randn(parameter.shape) * 0.15
    model.save_pretrained(folder)
    torch.save(logits(model), folder / "logits.pt")
    sys.exit()
trained = torch.load(folder / "logits.pt")
off = float((logits(peft.PeftModel.from_pretrained(base(), folder).eval()) - trained).abs().max())
effect = float((trained - logits(base())).abs().max())
print(f"peft {peft.__version__} off {off:.3g} of an effect of {effect:.3g}")
sys.exit(0 if (off > 0.1 * effect) == (step == "wrong") else "changed")
PY
run() { PYTHONPATH="$place/peft-$1" "$place/venv/bin/python" "$place/square.py" "$place" "$2" 2>/dev/null; }
run 0.18.1 save
run 0.18.1 right
run 0.21.2 wrong
