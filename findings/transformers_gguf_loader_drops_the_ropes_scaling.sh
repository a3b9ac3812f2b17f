#!/usr/bin/env bash
# Believed: a GGUF file given to transformers (`from_pretrained(…, gguf_file=…)`) becomes the model that the file describes, or is refused.
# So is: the keys llama.rope.scaling.*, llama.attention.sliding_window and tokenizer.ggml.eot_token_id are not read, and the tensor
#   rope_freqs.weight (Llama 3's rope) is dropped, with no missing or unexpected key told. A file of a YaRN model or of Llama 3.1 is
#   loaded with the frequencies of a model without scaling.
# Versions: transformers 5.23.0, gguf 0.19.0, torch 2.13.0 (CPU). Seen 2026-11-28:
#   plain   rope default, first frequencies 1.0000 0.2586 0.0669 0.0173
#   yarn    rope default, first frequencies 1.0000 0.2586 0.0669 0.0173
#   linear  rope default, first frequencies 1.0000 0.2586 0.0669 0.0173
#   llama3  rope default, first frequencies 1.0000 0.2586 0.0669 0.0173
#   keys told as left over: 0; config.json's own linear factor gives 0.2500 first
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check "torch==2.13.0" "transformers==5.23.0" "gguf==0.19.0" numpy accelerate 2>/dev/null
cat > "$work/probe.py" <<'PY'
import sys
from pathlib import Path

import gguf
import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

HIDDEN, HEADS, INNER, LAYERS, THETA = 64, 4, 96, 1, 50_000.0
top = Path(sys.argv[1])


def write(folder: Path, strings: dict, floats: dict, ints: dict, factors: list | None) -> Path:
    folder.mkdir()
    writer = gguf.GGUFWriter(folder / "m.gguf", "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_rope_freq_base(THETA)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(32)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{number}" for number in range(32)])
    writer.add_token_types([gguf.TokenType.NORMAL] * 32)
    writer.add_token_merges(["t 0"])
    writer.add_eos_token_id(2)
    for add, values in ((writer.add_string, strings), (writer.add_float32, floats), (writer.add_uint32, ints)):
        for key, value in values.items():
            add(key, value)
    rng = np.random.default_rng(0)

    def add_tensor(name: str, *shape: int) -> None:
        center = 1.0 if len(shape) == 1 else 0.0
        writer.add_tensor(name, (rng.standard_normal(shape) * 0.3 + center).astype(np.float32))

    add_tensor("token_embd.weight", 32, HIDDEN)
    add_tensor("output.weight", 32, HIDDEN)
    add_tensor("output_norm.weight", HIDDEN)
    for part, shape in {
        "attn_norm": (HIDDEN,), "ffn_norm": (HIDDEN,), "attn_q": (HIDDEN, HIDDEN), "attn_k": (HIDDEN, HIDDEN),
        "attn_v": (HIDDEN, HIDDEN), "attn_output": (HIDDEN, HIDDEN), "ffn_gate": (INNER, HIDDEN),
        "ffn_up": (INNER, HIDDEN), "ffn_down": (HIDDEN, INNER),
    }.items():
        add_tensor(f"blk.0.{part}.weight", *shape)
    if factors:
        writer.add_tensor("rope_freqs.weight", np.array(factors, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder


SCALING = "llama.rope.scaling."
FILES = {
    "plain": ({}, {}, {}, None),
    "yarn": ({SCALING + "type": "yarn"}, {SCALING + "factor": 4.0}, {SCALING + "original_context_length": 128}, None),
    "linear": ({SCALING + "type": "linear"}, {SCALING + "factor": 4.0}, {}, None),
    "llama3": ({}, {}, {}, [1.0, 1.0, 1.5, 2.0, 3.0, 5.0, 8.0, 8.0]),
}
found, left = {}, 0
for name, given in FILES.items():
    folder = write(top / name, *given)
    model, info = AutoModelForCausalLM.from_pretrained(folder, gguf_file="m.gguf", output_loading_info=True)
    found[name] = [round(value, 4) for value in model.model.rotary_emb.inv_freq.tolist()]
    left += sum(len(keys) for keys in info.values() if keys)
    told = " ".join(f"{value:.4f}" for value in found[name][:4])
    print(f"{name:7s} rope {model.config.rope_parameters['rope_type']}, first frequencies {told}")
config = LlamaConfig(
    hidden_size=HIDDEN, num_attention_heads=HEADS, num_hidden_layers=1, intermediate_size=INNER, vocab_size=32,
    rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": THETA},
)
right = LlamaForCausalLM(config).model.rotary_emb.inv_freq[0].item()
print(f"keys told as left over: {left}; config.json's own linear factor gives {right:.4f} first")
same = all(value == found["plain"] for value in found.values())
sys.exit(0 if same and left == 0 and abs(right - 0.25) < 1e-6 else 1)
PY
mkdir "$work/made"
"$work/venv/bin/python" "$work/probe.py" "$work/made" 2>/dev/null
