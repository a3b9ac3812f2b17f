#!/usr/bin/env bash
# Believed: `axolotl merge-lora` merges LoRA on the experts of gpt-oss (lora_target_parameters) as PEFT does, or refuses it.
# So is: PEFT asks the experts' module whether its stacks lie turned (is_transposed), as gpt-oss's do. The default merge of axolotl builds
# a module of its own around each weight, which does not say it, and turns the delta where shapes do not fit. down_proj is square in both
# gpt-oss (2880 to 2880): shapes fit, and the transposed delta is added. No error and no warning. Stacks that are not square are right, and so is
# merge_method legacy, which is PEFT's own.
# Seen: axolotl 0.19.0 with its peft 0.20.0 and transformers 5.16.1, torch 2.13.0 (CPU), 2026-12-01; largest difference of logits from the adapter's:
#   down_proj 32 to 32: 0.5 of an effect of 0.51; 48 to 32: 0 of 0.44; gate_up_proj 32 to 64: 0 of 0.64. Merged by PEFT: all 0
set -euo pipefail
place=$(mktemp -d); trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 2>/dev/null
"$place/venv/bin/pip" install --quiet --disable-pip-version-check transformers==5.16.1 peft==0.20.0 safetensors==0.8.0 2>/dev/null
"$place/venv/bin/pip" install --quiet --disable-pip-version-check colorama==0.4.6 requests==2.34.2 fire==0.7.1 pydantic==2.14.4 2>/dev/null
"$place/venv/bin/pip" install --quiet --disable-pip-version-check --no-deps axolotl==0.19.0 2>/dev/null
cat >"$place/experts.py" <<'PY'
import sys
from pathlib import Path

import torch
from axolotl.cli.utils.lora_merge import merge_lora_sharded_efficient
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

place = Path(sys.argv[1])
IDS = torch.tensor([[1, 2, 3, 5, 7, 8, 9, 5, 11, 12, 60, 61]])
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
SIZES |= {"vocab_size": 64, "num_local_experts": 4, "num_experts_per_tok": 2}


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits[0]


def far(parameter, width):
    """How far the merged logits are from the adapter's, and whether the merged delta is the transposed one."""
    folder, adapter, merged = (place / f"{part}-{parameter}-{width}" for part in ("base", "adapter", "merged"))
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt_oss", intermediate_size=width, **SIZES)).save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    without = logits(model)
    lora = LoraConfig(r=4, lora_alpha=8, target_modules=[], target_parameters=[f"mlp.experts.{parameter}"], task_type="CAUSAL_LM")
    model = get_peft_model(model, lora)
    torch.manual_seed(3)
    for each in model.parameters():
        if each.requires_grad:
            each.data.add_(torch.randn_like(each) * 0.2)
    model.save_pretrained(adapter)
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), adapter)
    right = logits(model)
    whole = model.merge_and_unload()
    by_peft = float((logits(whole) - right).abs().max())
    merge_lora_sharded_efficient(folder, adapter, merged, device="cpu")
    off = float((logits(AutoModelForCausalLM.from_pretrained(merged)) - right).abs().max())
    name = f"model.layers.0.mlp.experts.{parameter}"
    before, after = (load_file(path / "model.safetensors")[name] for path in (folder, merged))
    wanted = whole.get_parameter(name).detach() - before
    turned = wanted.mT.shape == before.shape and torch.allclose(after - before, wanted.mT, atol=1e-5)
    effect = float((right - without).abs().max())
    print(f"{parameter} of width {width}: {off:.1g} of an effect of {effect:.2g}, transposed {turned}; by PEFT {by_peft:.1g}")
    return off > 0.05, turned, by_peft < 1e-5


seen = [far(*case) for case in (("down_proj", 32), ("down_proj", 48), ("gate_up_proj", 32))]
sys.exit(0 if seen == [(True, True, True), (False, False, True), (False, False, True)] else "changed")
PY
"$place/venv/bin/python" "$place/experts.py" "$place" 2>/dev/null | grep "effect"
