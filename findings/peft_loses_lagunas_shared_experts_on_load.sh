#!/usr/bin/env bash
# Believed: PEFT loads what PEFT has saved, into the same base with the same versions.
# So is: of Laguna it loses the LoRA on the shared experts. transformers renames "mlp.shared_expert." of the checkpoint to
#   "mlp.shared_experts."; PEFT renames an adapter's tensors by the same rules, where the dot fits any letter, so that its own
#   "mlp.shared_experts.up_proj" becomes a name that no module has. The layers stay at lora_B = 0; a warning of missing keys is all.
#   The model in memory answers otherwise than the model that is loaded again.
# Versions: peft 0.21.2, transformers 5.23.0, torch 2.13.0 (CPU). Seen 2026-11-29:
#   saved lora_B of shared_experts.up_proj: 3; of 3 loaded layers 3 have none of it
#   logits of the loaded adapter are off by 1.66 of their spread; warnings of missing keys: 1
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check "torch==2.13.0" "transformers==5.23.0" "peft==0.21.2" numpy 2>/dev/null
cat > "$work/probe.py" <<'PY'
import sys, warnings
from pathlib import Path
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

top = Path(sys.argv[1])
config = AutoConfig.for_model(
    "laguna", vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
    shared_expert_intermediate_size=16, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)
torch.manual_seed(0)
AutoModelForCausalLM.from_config(config).save_pretrained(top / "base")
base = AutoModelForCausalLM.from_pretrained(top / "base")
lora = LoraConfig(r=4, target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM")
trained = get_peft_model(base, lora).eval()
for name, weight in trained.named_parameters():
    if "lora_B" in name:
        torch.nn.init.normal_(weight)
ids = torch.tensor([[3, 9, 4, 7, 5]])
with torch.no_grad():
    before = trained(input_ids=ids).logits
trained.save_pretrained(top / "adapter")
saved = load_file(top / "adapter" / "adapter_model.safetensors")
kept = sum("shared_experts.up_proj.lora_B" in name for name in saved)
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(top / "base"), top / "adapter").eval()
with torch.no_grad():
    off = float((loaded(input_ids=ids).logits - before).abs().max() / before.std())
    ups = [m for n, m in loaded.named_modules() if n.endswith("shared_experts.up_proj") and hasattr(m, "lora_B")]
    empty = sum(not m.lora_B["default"].weight.any() for m in ups)
print(f"saved lora_B of shared_experts.up_proj: {kept}; of {len(ups)} loaded layers {empty} have none of it")
print(f"logits of the loaded adapter are off by {off:.2f} of their spread; "
      f"warnings of missing keys: {len([w for w in told if 'missing' in str(w.message).lower()])}")
sys.exit(not (kept == empty == len(ups) > 0 and off > 0.01))
PY
"$work/venv/bin/python" "$work/probe.py" "$work" 2>/dev/null
