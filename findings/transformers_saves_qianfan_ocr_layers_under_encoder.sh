#!/usr/bin/env bash
# Believed: save_pretrained of transformers writes a checkpoint by the names that the model's files have: what it loads and saves again is
# the same file for every other reader.
# So is: the renamings of a load are reversed one by one at a save. Qianfan-OCR's have "encoder.layers." -> "layers." for its vision tower,
# without an anchor, so the reverse meets the language model's layers too: the files that one loads have
# language_model.model.layers.0..., the file that is saved has language_model.model.encoder.layers.0.... transformers reads both (the
# renaming removes the word again), and nothing is told; a reader that knows the original names finds no layer of the language model.
# Seen: transformers 5.23.0, torch 2.13.0, 2026-11-29:
#   loaded from  language_model.model.layers.0.mlp.down_proj.weight
#   saved as     language_model.model.encoder.layers.0.mlp.down_proj.weight
#   both files load without missing weights, and the logits are equal
set -euo pipefail
place=$(mktemp -d); trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
pip=("$place/venv/bin/pip" --quiet --disable-pip-version-check)
"${pip[@]}" install torch==2.13.0 2>/dev/null
"${pip[@]}" install transformers==5.23.0 safetensors==0.8.0 2>/dev/null
cat >"$place/names.py" <<'PY'
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText

place = Path(sys.argv[1])
text = {"model_type": "qwen3", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 64}
vision = AutoConfig.for_model("qianfan_ocr").vision_config.to_dict() | {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16, "patch_size": 4}
config = AutoConfig.for_model("qianfan_ocr", text_config=text, vision_config=vision, image_token_id=63)
torch.manual_seed(0)
AutoModelForImageTextToText.from_config(config).save_pretrained(place / "saved")
saved = load_file(place / "saved/model.safetensors")
# The names that the model's own files have.
shutil.copytree(place / "saved", place / "original")
language = "language_model.model."
original = {name.replace(f"{language}encoder.", language): tensor for name, tensor in saved.items()}
save_file(original, place / "original/model.safetensors", metadata={"format": "pt"})
logits = {}
for folder in ("original", "saved"):
    model, info = AutoModelForImageTextToText.from_pretrained(place / folder, output_loading_info=True)
    if info["missing_keys"]:
        sys.exit(f"changed: {folder} lacks {sorted(info['missing_keys'])[:3]}")
    logits[folder] = model.eval()(input_ids=torch.arange(3, 12)[None]).logits
    model.save_pretrained(place / f"{folder}-again")
again = load_file(place / "original-again/model.safetensors")
layer = "layers.0.mlp.down_proj.weight"
loaded = next(name for name in original if name.startswith(language) and name.endswith(layer))
written = next(name for name in again if name.startswith(language) and name.endswith(layer))
print("loaded from ", loaded)
print("saved as    ", written)
same = torch.equal(logits["original"], logits["saved"])
print("both files load without missing weights, and the logits are", "equal" if same else "different")
sys.exit(0 if same and loaded == language + layer and written == f"{language}encoder.{layer}" else "changed")
PY
"$place/venv/bin/python" "$place/names.py" "$place" 2>/dev/null
