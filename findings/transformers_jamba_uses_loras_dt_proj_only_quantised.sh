#!/usr/bin/env bash
# Believed: an adapter that was trained over a base in 8 or 4 bits acts over the same base in full precision, up to what the bits round off.
# So is: Jamba and FalconMamba call dt_proj as a module where the base was quantised at load, and multiply by dt_proj.weight otherwise. A LoRA on
# dt_proj (all-linear puts one there in Jamba) trains over int8, and acts there and over nf4. Over the full-precision base PEFT loads it
# without a word, and it has no effect and gets no gradient, while a merge of it has its effect. Serve such an adapter over the
# quantised base, or merged.
# Seen: transformers 5.23.0, peft 0.21.2, bitsandbytes 0.50.2, torch 2.13.0 (CPU), 2026-12-01; LoRA on dt_proj trained for 40 steps over int8:
#   falcon_mamba: loss over int8 9.14 to 0.264; over full precision 9.14 alone and 9.14 loaded, by the same bits, 0.273 merged
#   jamba: loss over int8 7.19 to 0.0896; over full precision 6.94 alone and 6.94 loaded, by the same bits, 0.086 merged
#   the same adapters move the logits over nf4 by about 10
set -euo pipefail
place=$(mktemp -d); trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 2>/dev/null
"$place/venv/bin/pip" install --quiet --disable-pip-version-check transformers==5.23.0 peft==0.21.2 safetensors==0.8.0 2>/dev/null
"$place/venv/bin/pip" install --quiet --disable-pip-version-check accelerate==1.15.0 bitsandbytes==0.50.2 2>/dev/null
cat >"$place/steps.py" <<'PY'
import sys
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig

place = Path(sys.argv[1])
IDS = torch.tensor([[3, 9, 4, 7, 5, 11, 13, 3, 9, 4, 7, 5, 11, 13]])
SIZES = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2, "initializer_range": 0.3, "pad_token_id": 0}
JAMBA = {"intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 1, "num_experts_per_tok": 1}
JAMBA |= {"mamba_dt_rank": 64, "attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False}
FAMILIES = {"falcon_mamba": {"time_step_rank": 64, "state_size": 16}, "jamba": JAMBA}
INT8 = BitsAndBytesConfig(load_in_8bit=True)
NF4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")


def base(name, quantisation=None):
    return AutoModelForCausalLM.from_pretrained(place / name, quantization_config=quantisation, dtype=torch.float32)


def loss(model):
    with torch.no_grad():
        return float(model.eval()(input_ids=IDS, labels=IDS, use_cache=False).loss)


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=IDS, use_cache=False).logits


wrong = []
for name, sizes in FAMILIES.items():
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **SIZES, **sizes)).save_pretrained(place / name)
    model = base(name, INT8)
    before = loss(model)
    torch.manual_seed(1)
    model = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules=["dt_proj"], task_type="CAUSAL_LM"))
    optimiser = torch.optim.Adam([each for each in model.parameters() if each.requires_grad], lr=0.05)
    for _ in range(40):
        model.train()(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
        optimiser.step()
        optimiser.zero_grad()
    model.save_pretrained(place / f"{name}-lora")
    trained = loss(model)
    plain = base(name)
    without, alone = logits(plain), loss(plain)
    model = PeftModel.from_pretrained(plain, place / f"{name}-lora")
    idle = bool(torch.equal(logits(model), without))
    loaded, merged = loss(model), loss(model.merge_and_unload())
    four = base(name, NF4)
    rounded = logits(four)
    acts = float((logits(PeftModel.from_pretrained(four, place / f"{name}-lora")) - rounded).abs().max())
    print(f"{name}: over int8 {before:.3g} to {trained:.3g}; over nf4 its logits move by {acts:.2g};", end=" ")
    print(f"over full precision without {alone:.3g}, loaded {loaded:.3g}, the same bits {idle}, merged {merged:.3g}")
    if not (idle and trained < before - 0.1 and merged < alone - 0.1 and acts > 0.05):
        wrong.append(name)
sys.exit(f"changed: {wrong}" if wrong else 0)
PY
"$place/venv/bin/python" "$place/steps.py" "$place" 2>/dev/null
