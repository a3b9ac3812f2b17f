#!/usr/bin/env bash
# Believed: the config that transformers makes of a GGUF file (`from_pretrained(…, gguf_file=…)`) is that of the model in the file,
#   since the converter writes the keys that the computation needs.
# So is: of Gemma 2, Phi-3 and Qwen3 several keys are not read, and the config class's defaults stand, which are those of one released
#   size. Gemma 2 27B is scaled by 256 instead of 144 (the file has no such key; llama.cpp takes the hidden size over the heads for 46
#   layers), a file's own soft caps are passed over, Phi-3 loses its window and its partial rotation (Phi-4-mini: 3/4 of a head), and a
#   Qwen3 with heads of 64 gets heads of 128. Nothing is refused or told.
# Versions: transformers 5.23.0, gguf 0.19.0, torch 2.13.0 (CPU). Seen 2026-11-29:
#   gemma2 of 46 layers: query_pre_attn_scalar 256, hidden/heads 144; soft caps 50.0 and 30.0, the file has 9.0 and 7.0
#   phi3: sliding_window None, the file has 2047; partial_rotary_factor 1.0, the file rotates 96 of 128
#   qwen3: head_dim 128, the file has 64
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check "torch==2.13.0" "transformers==5.23.0" "gguf==0.19.0" numpy 2>/dev/null
cat > "$work/probe.py" <<'PY'
import sys
from pathlib import Path

import gguf
import numpy as np
from transformers import AutoConfig

top = Path(sys.argv[1])


def config_of(architecture: str, layers: int, hidden: int, heads: int, ints: dict, floats: dict):
    """The config of a file with these keys; its tensors don't matter."""
    folder = top / architecture
    folder.mkdir()
    writer = gguf.GGUFWriter(folder / "m.gguf", architecture)
    writer.add_name("tiny")
    writer.add_block_count(layers)
    writer.add_context_length(8192)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(64)
    writer.add_head_count(heads)
    writer.add_head_count_kv(heads)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    for key, value in ints.items():
        writer.add_uint32(f"{architecture}.{key}", value)
    for key, value in floats.items():
        writer.add_float32(f"{architecture}.{key}", value)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["<unk>", "<s>", "</s>", "a"])
    writer.add_token_scores([0.0] * 4)
    writer.add_token_types([2, 3, 3, 1])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_tensor("token_embd.weight", np.zeros((4, 8), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return AutoConfig.from_pretrained(folder, gguf_file="m.gguf")


sizes = {"attention.key_length": 128, "attention.value_length": 128}
caps = {"attn_logit_softcapping": 9.0, "final_logit_softcapping": 7.0}
gemma = config_of("gemma2", 46, 4608, 32, sizes, caps)
phi = config_of("phi3", 2, 4096, 32, {"attention.sliding_window": 2047, "rope.dimension_count": 96}, {})
qwen = config_of("qwen3", 2, 1024, 16, {"attention.key_length": 64, "attention.value_length": 64}, {})
found_caps = gemma.attn_logit_softcapping, gemma.final_logit_softcapping
part = phi.rope_parameters["partial_rotary_factor"]
print(f"gemma2 of 46 layers: query_pre_attn_scalar {gemma.query_pre_attn_scalar}, hidden/heads 144; "
      f"soft caps {found_caps[0]} and {found_caps[1]}, the file has 9.0 and 7.0")
print(f"phi3: sliding_window {phi.sliding_window}, the file has 2047; partial_rotary_factor {part}, the file rotates 96 of 128")
print(f"qwen3: head_dim {qwen.head_dim}, the file has 64")
as_seen = (gemma.query_pre_attn_scalar, found_caps, phi.sliding_window, part, qwen.head_dim)
sys.exit(as_seen != (256, (50.0, 30.0), None, 1.0, 128))
PY
"$work/venv/bin/python" "$work/probe.py" "$work" 2>/dev/null
