#!/usr/bin/env bash
# Believed: generate() of an activated LoRA writes the same greedy text however it computes it: with or without the KV cache, with drafts
# from the prompt, with a prompt read in chunks. For a plain LoRA it does.
# So is: PEFT counts once, from the prompt, how many of its last tokens are the adapter's, and takes that number from the end of whatever
# a later call gets. Without a cache the call grows, so the invocation and what follows slide out of the adapter. Of several drafted
# tokens only that many of the last ones have it. Of a prompt in chunks each chunk's last tokens have it, those before the invocation too.
# Nothing is said. Only beam search is refused. One forward pass over the whole text, and generate() with one token a step, are right.
# Seen: peft 0.21.2, transformers 5.23.0, torch 2.13.0, 2026-11-30; tokens until the first that differs from whole passes, of 16:
#   default 16, use_cache=False 1, prompt_lookup_num_tokens=4 8, prefill_chunk_size=4 0; of a plain LoRA 16 each
set -euo pipefail
place=$(mktemp -d); trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
pip=("$place/venv/bin/pip" --quiet --disable-pip-version-check)
"${pip[@]}" install torch==2.13.0 2>/dev/null
"${pip[@]}" install transformers==5.23.0 peft==0.21.2 2>/dev/null
cat >"$place/ways.py" <<'PY'
import sys
import warnings
from itertools import takewhile

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

warnings.filterwarnings("ignore")
PROMPT = torch.tensor([[5, 9, 11, 5, 9, 11, 5, 9, 11, 20, 21, 22, 7, 8]])
INVOCATION, LENGTH = [7, 8], 16
WAYS = {
    "default": {},
    "no cache": {"use_cache": False},
    "drafts from the prompt": {"prompt_lookup_num_tokens": 4},
    "prompt in chunks": {"prefill_chunk_size": 4},
}


def adapted(**options):
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    base = LlamaForCausalLM(LlamaConfig(vocab_size=64, pad_token_id=0, eos_token_id=None, **sizes)).eval()
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj"]
    config = LoraConfig(r=4, lora_alpha=64, target_modules=targets, init_lora_weights=False, task_type="CAUSAL_LM", **options)
    return get_peft_model(base, config).eval()


@torch.no_grad()
def by_whole_passes(model):
    text = PROMPT
    for _ in range(LENGTH):
        text = torch.cat([text, model(input_ids=text).logits[:, -1:].argmax(-1)], dim=1)
    return text[0, PROMPT.shape[1] :].tolist()


def same(model):
    """Tokens until the first that differs, by way."""
    right, found = by_whole_passes(model), {}
    for way, options in WAYS.items():
        text = model.generate(input_ids=PROMPT, attention_mask=torch.ones_like(PROMPT), max_new_tokens=LENGTH, do_sample=False, **options)
        pairs = zip(right, text[0, PROMPT.shape[1] :].tolist())
        found[way] = len([*takewhile(lambda pair: pair[0] == pair[1], pairs)])
    return found


activated, plain = same(adapted(alora_invocation_tokens=INVOCATION)), same(adapted())
print("activated", activated)
print("plain    ", plain)
other = [count for way, count in activated.items() if way != "default"]
sys.exit(0 if activated["default"] == LENGTH and max(other) < LENGTH and set(plain.values()) == {LENGTH} else "changed")
PY
"$place/venv/bin/python" "$place/ways.py" 2>/dev/null
