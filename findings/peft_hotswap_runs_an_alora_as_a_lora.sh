#!/usr/bin/env bash
# Believed: peft's hotswap_adapter refuses an adapter whose kind differs from the one in place, as it does for DoRA and rsLoRA.
# So is: `alora_invocation_tokens` is not among what it compares. An activated LoRA swapped in for a plain one of the same shape runs as a
# plain one: over all positions, with or without the invocation. (Its weights are right; only load_adapter makes it an aLoRA.) No error.
# Seen: peft 0.21.2, transformers 5.23.0, torch 2.13.0, 2026-11-28; largest difference of logits by position, invocation at position 7:
#   loaded as aLoRA, to the base    0 0 0 0 0 0 0, then above 0.2
#   swapped in, to the base         above 0.3 at all ten positions
#   swapped in, to the same weights as a plain LoRA: 0 at all ten positions
set -euo pipefail
place=$(mktemp -d); trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
pip=("$place/venv/bin/pip" --quiet --disable-pip-version-check)
"${pip[@]}" install torch==2.13.0 2>/dev/null
"${pip[@]}" install transformers==5.23.0 peft==0.21.2 safetensors==0.8.0 2>/dev/null
cat >"$place/swap.py" <<'PY'
import json
import shutil
import sys
import warnings
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils.hotswap import hotswap_adapter
from transformers import LlamaConfig, LlamaForCausalLM

warnings.filterwarnings("ignore")
place = Path(sys.argv[1])
IDS = torch.tensor([[1, 2, 3, 5, 7, 8, 9, 5, 11, 12]])


def base():
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes)).eval()


def logits(model):
    with torch.no_grad():
        return model(input_ids=IDS).logits[0]


def save(name, seed, **options):
    model = base()
    torch.manual_seed(seed)
    config = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM", **options)
    get_peft_model(model, config).save_pretrained(place / name)


save("plain", 1)
save("activated", 2, alora_invocation_tokens=[5])
shutil.copytree(place / "activated", place / "same-weights")
config = json.loads((place / "same-weights" / "adapter_config.json").read_text())
(place / "same-weights" / "adapter_config.json").write_text(json.dumps(config | {"alora_invocation_tokens": None}))
swapped = PeftModel.from_pretrained(base(), place / "plain").eval()
hotswap_adapter(swapped, str(place / "activated"), adapter_name="default", torch_device="cpu")
without = logits(base())
loaded = logits(PeftModel.from_pretrained(base(), place / "activated").eval())
plain = logits(PeftModel.from_pretrained(base(), place / "same-weights").eval())
off = {
    "loaded as aLoRA, to the base": loaded - without,
    "swapped in, to the base": logits(swapped) - without,
    "swapped in, to a plain LoRA": logits(swapped) - plain,
}
off = {words: difference.abs().amax(-1) for words, difference in off.items()}
for words, difference in off.items():
    print(f"{words:30}", [round(float(x), 3) for x in difference])
activated, swap, same = off.values()
sys.exit(0 if activated[:7].max() == 0 and activated[7:].min() > 0 and swap.min() > 0 and same.max() < 1e-5 else "changed")
PY
"$place/venv/bin/python" "$place/swap.py" "$place" 2>/dev/null
