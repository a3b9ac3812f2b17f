#!/usr/bin/env bash
# Believed: llama.cpp's convert_lora_to_gguf.py turns a PEFT adapter into a GGUF adapter that does the same, or says what it cannot convert.
# So is: it reads lora_alpha of adapter_config.json and the tensors, and nothing else that scales. `use_rslora` and `alpha_pattern` are
# dropped without a word, exit status 0: llama.cpp multiplies by alpha / rank of each tensor. A rank-16 adapter trained with rsLoRA is
# four times too weak (sqrt(rank) in general), and a module with an alpha of its own gets everybody's. DoRA and saved modules are refused
# (status 1). To convert such an adapter, fold the true scaling into the B matrices first and set lora_alpha to the rank.
# Seen: the converter in llama-cpp-python 0.3.36's source package, peft 0.21.2, transformers 5.23.0, torch 2.13.0, 2026-11-28:
#   plain          q_proj: PEFT 2.0, GGUF 2.0   v_proj: PEFT 2.0, GGUF 2.0
#   use_rslora     q_proj: PEFT 8.0, GGUF 2.0   v_proj: PEFT 8.0, GGUF 2.0
#   alpha_pattern  q_proj: PEFT 2.0, GGUF 2.0   v_proj: PEFT 0.25, GGUF 2.0
set -euo pipefail
place=$(mktemp -d); trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
pip=("$place/venv/bin/pip" --quiet --disable-pip-version-check)
"${pip[@]}" install torch==2.13.0 scikit-build-core pathspec 2>/dev/null
"${pip[@]}" install transformers==5.23.0 peft==0.21.2 safetensors==0.8.0 sentencepiece 2>/dev/null
(cd "$place" \
  && "${pip[@]}" download --no-deps --no-binary :all: --no-build-isolation llama-cpp-python==0.3.36 2>/dev/null \
  && tar xzf llama_cpp_python-*.tar.gz)
converter=$(echo "$place"/llama_cpp_python-*/vendor/llama.cpp)
cat >"$place/scalings.py" <<'PY'
import subprocess
import sys
from pathlib import Path

place, converter = Path(sys.argv[1]), Path(sys.argv[2])
sys.path.insert(0, str(converter / "gguf-py"))
import gguf
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

KINDS = {"plain": {}, "use_rslora": {"use_rslora": True}, "alpha_pattern": {"alpha_pattern": {"v_proj": 4}}}
SITES = {"q_proj": "blk.0.attn_q.weight", "v_proj": "blk.0.attn_v.weight"}
LlamaForCausalLM(
    LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=4)
).save_pretrained(place / "base")
seen = {}
for kind, options in KINDS.items():
    model = LlamaForCausalLM.from_pretrained(place / "base")
    config = LoraConfig(r=16, lora_alpha=32, target_modules=list(SITES), init_lora_weights=False, task_type="CAUSAL_LM", **options)
    adapted = get_peft_model(model, config)
    adapted.save_pretrained(place / kind)
    file = place / f"{kind}.gguf"
    command = [sys.executable, converter / "convert_lora_to_gguf.py", "--base", place / "base", "--outfile", file, place / kind]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"changed: {kind} is refused now: {done.stderr[-300:]}")
    read = gguf.GGUFReader(file)
    alpha = float(read.fields["adapter.lora.alpha"].parts[-1][0])
    ranks = {tensor.name: int(tensor.shape[1]) for tensor in read.tensors if tensor.name.endswith(".lora_a")}
    attention = adapted.base_model.model.model.layers[0].self_attn
    seen[kind] = [(getattr(attention, site).scaling["default"], alpha / ranks[f"{name}.lora_a"]) for site, name in SITES.items()]
    print(f"{kind:14}", "  ".join(f"{site}: PEFT {peft}, GGUF {other}" for site, (peft, other) in zip(SITES, seen[kind])))
want = {"plain": [(2.0, 2.0), (2.0, 2.0)], "use_rslora": [(8.0, 2.0), (8.0, 2.0)], "alpha_pattern": [(2.0, 2.0), (0.25, 2.0)]}
sys.exit(0 if seen == want else "changed")
PY
"$place/venv/bin/python" "$place/scalings.py" "$place" "$converter" 2>/dev/null
