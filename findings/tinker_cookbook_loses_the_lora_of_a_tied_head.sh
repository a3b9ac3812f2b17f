#!/usr/bin/env bash
# Believed: an adapter of Tinker that tinker-cookbook turns into PEFT's form, or merges into the base, answers as it was trained.
# So is: Tinker trains LoRA on the head of each base. Where the base ties its head to the embedding (Qwen3-0.6B to 4B, Llama 3.2),
# build_lora_adapter writes the pair as embed_tokens.lora_A and lora_B, names that PEFT does not give to an embedding: PEFT loads nothing of
# it, and answers as the base, with warnings of missing keys. build_hf_model adds the same pair to the tied weight, so the embedding of what
# goes in changes too, which was not trained. With a head of its own both are right.
# Seen: tinker_cookbook 0.6.1, peft 0.21.2, transformers 5.23.0, torch 2.13.0, 2026-11-30; largest difference of logits from base + LoRA on the
#   head: tied: PEFT 3.82 (the base alone 3.82), merged 5.62; not tied: PEFT 0.0, merged 0.0
set -euo pipefail
place=$(mktemp -d); trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 2>/dev/null
"$place/venv/bin/pip" install --quiet --disable-pip-version-check transformers==5.23.0 peft==0.21.2 safetensors==0.8.0 2>/dev/null
"$place/venv/bin/pip" install --quiet --disable-pip-version-check tinker==0.38.0 pyrage chz blobfile termcolor cloudpickle 2>/dev/null
"$place/venv/bin/pip" install --quiet --disable-pip-version-check --no-deps tinker_cookbook==0.6.1 2>/dev/null
cat >"$place/heads.py" <<'PY'
import json
import logging
import sys
import warnings
from pathlib import Path

import torch
from peft import PeftModel
from safetensors.torch import save_file
from tinker_cookbook.weights import build_hf_model, build_lora_adapter
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

IDS = torch.tensor([[1, 2, 3, 5, 7, 8, 9, 5, 11, 12]])
RANK, ALPHA, HIDDEN, VOCABULARY = 4, 8, 32, 64


def base(tied):
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8, "intermediate_size": 48}
    config = Qwen3Config(vocab_size=VOCABULARY, hidden_size=HIDDEN, initializer_range=0.3, tie_word_embeddings=tied, **sizes)
    return Qwen3ForCausalLM(config).eval()


def differences(folder, tied):
    """Of PEFT's answer, of the merged model's and of the base's from base + LoRA on the head."""
    base(tied).save_pretrained(folder / "base")
    torch.manual_seed(5)
    a, b = torch.randn(RANK, HIDDEN) * 0.2, torch.randn(VOCABULARY, RANK) * 0.2
    (folder / "tinker").mkdir()
    name = "base_model.model.model.unembed_tokens"
    save_file({f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}, folder / "tinker/adapter_model.safetensors")
    (folder / "tinker/adapter_config.json").write_text(json.dumps({"r": RANK, "lora_alpha": ALPHA}))
    given = {"base_model": str(folder / "base"), "adapter_path": str(folder / "tinker")}
    build_lora_adapter(**given, output_path=str(folder / "peft"))
    build_hf_model(**given, output_path=str(folder / "merged"))
    model = base(tied)
    hidden = model.model(IDS).last_hidden_state
    wanted = model.lm_head(hidden) + ALPHA / RANK * (hidden @ a.T @ b.T)
    merged = AutoModelForCausalLM.from_pretrained(folder / "merged", dtype=torch.float32).eval()
    adapted = PeftModel.from_pretrained(base(tied), folder / "peft").eval()
    return [round(float((each(IDS).logits - wanted).abs().max()), 3) for each in (adapted, merged, base(tied))]


warnings.simplefilter("ignore")
logging.disable(logging.WARNING)
with torch.no_grad():
    for tied in (True, False):
        folder = Path(sys.argv[1]) / f"tied-{tied}"
        folder.mkdir()
        by_peft, by_merge, alone = differences(folder, tied)
        print(f"tied {tied}: PEFT {by_peft}, merged {by_merge}, the base alone {alone}")
        assert (by_peft == alone and by_merge > 1) if tied else (by_peft < 0.001 and by_merge < 0.001)
PY
"$place/venv/bin/python" "$place/heads.py" "$place"
