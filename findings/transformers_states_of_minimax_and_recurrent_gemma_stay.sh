#!/usr/bin/env bash
# Believed: `generate` answers a left-padded prompt (with its attention_mask) as it answers the prompt alone, and the score that a beam search
# gives a text is the text's. So padding is for Qwen3.5, LFM2, Nemotron-H, Granite 4, Falcon-H1, Bamba, Zamba 2 and OLMo Hybrid, too.
# So is: MiniMax and RecurrentGemma keep their states outside of the common cache classes, and neither holds. MiniMaxCache takes a text's length
# from layer 0; where that is linear attention it is 0, so that each step masks all keys by the mask of the first
# token: padding, whenever there is some. RecurrentGemma does not mask padding in its convolution. Beams are reordered, their states are not.
# No error or warning; without a cache MiniMax is right. Generate with prompts of one length, and without beams.
# Seen: transformers 5.23.0, torch 2.13.0 (CPU), 2026-11-29; 5 padding tokens before 20; differences in standard deviations of the logits:
#   minimax          padded: first token off 2.1e-06, second off 2.7e+00; beams: score -2.606, the text's -3.406
#   recurrent_gemma  padded: first token off 2.4e-01, second off 3.0e-01; beams: score -1.177, the text's -1.131
#   qwen3_5          padded: first token off 1.0e-04, second off 6.2e-05; beams: score -2.657, the text's -2.657
set -euo pipefail
place=$(mktemp -d); trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 2>/dev/null
"$place/venv/bin/pip" install --quiet --disable-pip-version-check transformers==5.23.0 2>/dev/null
cat >"$place/states.py" <<'PY'
import sys

import torch
from transformers import MiniMaxConfig, MiniMaxForCausalLM, Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers import RecurrentGemmaConfig, RecurrentGemmaForCausalLM

SIZES = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4}
TOKENS = {"num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
LAYERS = {"layer_types": ["linear_attention", "full_attention"] * 2, "num_local_experts": 2}
IDS = torch.randint(3, 200, (1, 20), generator=torch.Generator().manual_seed(0))
PADDED = torch.cat([torch.zeros(1, 5, dtype=torch.long), IDS], 1)
OPTIONS = {"do_sample": False, "eos_token_id": None, "return_dict_in_generate": True, "output_logits": True, "output_scores": True}


def wild(kind, config):
    torch.manual_seed(0)
    model = kind(config)
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.data.normal_(0, 0.15)
    return model.eval()


def look(name, model):
    alone = model.generate(IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=2, **OPTIONS).logits
    padded = model.generate(PADDED, attention_mask=(PADDED != 0).long(), max_new_tokens=2, **OPTIONS).logits
    first, second = (float((a - b).abs().max() / a.std()) for a, b in zip(alone, padded))
    beams = model.generate(IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=10, num_beams=4, **OPTIONS)
    score, text = float(beams.sequences_scores[0]), beams.sequences
    with torch.no_grad():
        chances = model(input_ids=text, use_cache=False).logits[0, 19:-1].log_softmax(-1)
    true = float(chances.gather(1, text[0, 20:, None]).mean())
    print(f"{name:16} padded: first token off {first:.1e}, second off {second:.1e}; beams: score {score:.3f}, the text's {true:.3f}")
    return first > 1e-3, second > 1e-3, abs(score - true) > 1e-3


minimax = wild(MiniMaxForCausalLM, MiniMaxConfig(head_dim=16, **LAYERS, **SIZES, **TOKENS))
recurrent = wild(RecurrentGemmaForCausalLM, RecurrentGemmaConfig(lru_width=64, attention_window_size=64, **SIZES, **TOKENS))
qwen = wild(Qwen3_5ForCausalLM, Qwen3_5TextConfig(head_dim=16, **DELTA, **SIZES, **TOKENS))
seen = look("minimax", minimax), look("recurrent_gemma", recurrent), look("qwen3_5", qwen)
sys.exit(0 if seen == ((False, True, True), (True, True, True), (False, False, False)) else "changed")
PY
"$place/venv/bin/python" "$place/states.py" 2>/dev/null
