#!/usr/bin/env bash
# Believed: AutoTokenizer.from_pretrained(…, gguf_file=…) gives the ids that llama.cpp gives for the same file.
# So is: the key tokenizer.ggml.pre, which names how a text is split before the merges, is not read. Every byte-level file gets GPT-2's split.
#   llama.cpp splits single digits for smollm (so that "\n\n1." keeps its two line ends in one token), and punctuation and numbers by
#   threes for default. Lists, indented numbers and tables get ids that the model never saw; nothing warns.
# Versions: transformers 5.23.0, gguf 0.19.0, tokenizers 0.23.x, torch 2.13.0 (CPU). Seen 2026-11-28:
#   gpt-2    'a\n\n1' is ['a', 'Ċ', 'Ċ', '1'] here and ['a', 'Ċ', 'Ċ', '1'] by llama.cpp's expressions
#   smollm   'a\n\n1' is ['a', 'Ċ', 'Ċ', '1'] here and ['a', 'ĊĊ', '1'] by llama.cpp's expressions
# llama.cpp itself (the source in llama-cpp-python 0.3.36) gave the ids on the right for files with these keys.
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
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.pre_tokenizers import ByteLevel, Digits
from transformers import AutoTokenizer

MERGES = ["Ċ Ċ"]
TOKENS = ["<|end|>", *sorted(ByteLevel.alphabet()), "ĊĊ"]
BY_LLAMA_CPP = {
    "gpt-2": ByteLevel(add_prefix_space=False),
    "smollm": pre_tokenizers.Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]),
}
TEXT = "a\n\n1"
seen = {}
for split, parts in BY_LLAMA_CPP.items():
    folder = Path(sys.argv[1]) / split
    folder.mkdir()
    writer = gguf.GGUFWriter(folder / "m.gguf", "llama")
    for add, value in (
        (writer.add_block_count, 1), (writer.add_context_length, 64), (writer.add_embedding_length, 32),
        (writer.add_feed_forward_length, 32), (writer.add_head_count, 1), (writer.add_head_count_kv, 1),
        (writer.add_layer_norm_rms_eps, 1e-5), (writer.add_tokenizer_model, "gpt2"), (writer.add_tokenizer_pre, split),
        (writer.add_token_list, TOKENS), (writer.add_token_types, [3] + [1] * (len(TOKENS) - 1)),
        (writer.add_token_merges, MERGES), (writer.add_eos_token_id, 0), (writer.add_bos_token_id, 0),
    ):
        add(value)
    writer.add_tensor("token_embd.weight", np.zeros((len(TOKENS), 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    read = AutoTokenizer.from_pretrained(folder, gguf_file="m.gguf").tokenize(TEXT)
    right = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(TOKENS)}, merges=[("Ċ", "Ċ")]))
    right.pre_tokenizer = parts
    seen[split] = (read, right.encode(TEXT).tokens)
    print(f"{split:8} {TEXT!r} is {seen[split][0]} here and {seen[split][1]} by llama.cpp's expressions")
sys.exit(0 if seen["gpt-2"][0] == seen["gpt-2"][1] == seen["smollm"][0] != seen["smollm"][1] else "changed")
PY
"$work/venv/bin/python" "$work/probe.py" "$work" 2>/dev/null
