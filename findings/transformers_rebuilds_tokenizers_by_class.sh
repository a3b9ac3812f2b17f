#!/usr/bin/env bash
# Believed: AutoTokenizer gives the ids that the folder's own tokenizer.json gives, since it is a file of the same library.
# So is: transformers 5 takes vocabulary, merges and post-processor of the file, and writes normalizer, pre-tokenizer and decoder again for
#   classes that have an __init__ of their own: LlamaTokenizer, Qwen2Tokenizer, GPT2Tokenizer, GPTNeoXTokenizer and more. A file with
#   another split gets other ids, without a warning. `PreTrainedTokenizerFast` is taken as it lies, and so is LlamaTokenizer over a
#   byte-level file; but that one gets <s> and </s> as new ids behind the vocabulary, for which the model has no rows.
# Versions: transformers 5.23.0, tokenizers 0.23.x, no torch. Seen 2026-11-28:
#   Qwen2Tokenizer           '2026' is ['202', '6'] by tokenizer.json and ['2', '0', '2', '6'] by AutoTokenizer
#   GPT2Tokenizer            '2026' is ['202', '6'] by tokenizer.json and ['2026'] by AutoTokenizer
#   PreTrainedTokenizerFast  '2026' is ['202', '6'] by tokenizer.json and ['202', '6'] by AutoTokenizer
#   LlamaTokenizerFast       '2026' is ['202', '6'] by tokenizer.json and ['202', '6'] by AutoTokenizer
#   LlamaTokenizerFast knows 3 tokens that tokenizer.json does not have
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check "transformers==5.23.0" 2>/dev/null
cat > "$work/probe.py" <<'PY'
import json
import sys
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from tokenizers.pre_tokenizers import ByteLevel, Split
from transformers import AutoTokenizer

MERGES = [("2", "0"), ("20", "2"), ("202", "6")]
TOKENS = ["<|endoftext|>", *sorted(ByteLevel.alphabet()), *map("".join, MERGES)]
CLASSES = {"Qwen2Tokenizer": "qwen2", "GPT2Tokenizer": "starcoder2", "PreTrainedTokenizerFast": "llama", "LlamaTokenizerFast": "llama"}
tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(TOKENS)}, merges=MERGES))
tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
    [Split(Regex(r"\p{N}{1,3}"), "isolated"), ByteLevel(add_prefix_space=False, use_regex=False)]
)
tokenizer.decoder = decoders.ByteLevel()
tokenizer.add_special_tokens(["<|endoftext|>"])
seen, more = {}, {}
for name, model_type in CLASSES.items():
    folder = Path(sys.argv[1]) / name
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": name, "bos_token": None} if "Llama" not in name else
        {"tokenizer_class": name, "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}))
    read = AutoTokenizer.from_pretrained(folder)
    seen[name] = (tokenizer.encode("2026").tokens, read.tokenize("2026"))
    more[name] = len(read) - tokenizer.get_vocab_size()
    print(f"{name:24} '2026' is {seen[name][0]} by tokenizer.json and {seen[name][1]} by AutoTokenizer")
print(f"LlamaTokenizerFast knows {more['LlamaTokenizerFast']} tokens that tokenizer.json does not have")
differ = {name for name, (own, read) in seen.items() if own != read}
sys.exit(0 if differ == {"Qwen2Tokenizer", "GPT2Tokenizer"} and more["LlamaTokenizerFast"] == 3 else "changed")
PY
"$work/venv/bin/python" "$work/probe.py" "$work" 2>/dev/null
