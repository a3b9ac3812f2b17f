#!/usr/bin/env bash
# Believed: an adapter that mergekit extracts at full rank from a fine-tune answers as the fine-tune does.
# So is: where the base has biases (Qwen2's q, k and v), their differences are written as lora_B.bias, and adapter_config.json does not say
# lora_bias. PEFT drops them at load, without a word. With "lora_bias": true written by hand the same file is right. A base without biases
# (Llama) is right at once.
# Seen: mergekit 0.1.5, peft 0.21.2, transformers 5.23.0, torch 2.13.0, 2026-11-30; largest difference of logits from the fine-tune:
#   as extracted 0.358, with lora_bias 2.7e-06, the base alone 0.546
set -euo pipefail
place=$(mktemp -d); trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 2>/dev/null
"$place/venv/bin/pip" install --quiet --disable-pip-version-check mergekit==0.1.5 transformers==5.23.0 peft==0.21.2 safetensors==0.8.0 2>/dev/null
cat >"$place/biases.py" <<'PY'
import json
import subprocess
import sys
import warnings
from pathlib import Path

import torch
from peft import PeftModel
from transformers import Qwen2Config, Qwen2ForCausalLM

IDS = torch.tensor([[1, 2, 3, 5, 7, 8, 9, 5, 11, 12]])


def base():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}
    return Qwen2ForCausalLM(Qwen2Config(vocab_size=64, **sizes)).eval()


def far_from(wanted, model):
    return float((model(IDS).logits - wanted).abs().max())


folder = Path(sys.argv[1])
tuned = base()
torch.manual_seed(1)
with torch.no_grad():
    for name, weight in tuned.named_parameters():
        if "proj" in name:
            weight.add_(torch.randn_like(weight) * 0.3)
base().save_pretrained(folder / "base")
tuned.save_pretrained(folder / "tuned")
extract = [sys.executable, "-c", "from mergekit.scripts.extract_lora import main; main()", "--max-rank", "64"]
extract += ["--base-model", str(folder / "base"), "--model", str(folder / "tuned"), "--out-path", str(folder / "lora")]
subprocess.run(extract, check=True, capture_output=True)
with torch.no_grad():
    wanted = tuned(IDS).logits
    alone = far_from(wanted, base())
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        extracted = far_from(wanted, PeftModel.from_pretrained(base(), folder / "lora").eval())
    config = json.loads((folder / "lora/adapter_config.json").read_text())
    (folder / "lora/adapter_config.json").write_text(json.dumps(config | {"lora_bias": True}))
    mended = far_from(wanted, PeftModel.from_pretrained(base(), folder / "lora").eval())
print(f"extracted {extracted:.3f}, with lora_bias {mended:.1e}, base {alone:.3f}")
assert "lora_bias" not in config and not [each for each in told if "bias" in str(each.message)]
assert mended < 1e-4 and extracted > 0.1
PY
"$place/venv/bin/python" "$place/biases.py" "$place"
