#!/usr/bin/env bash
# Believed: OpenVINO GenAI serves a PEFT adapter as strongly as it was trained, for it takes PEFT's adapter_model.safetensors.
# So is: it reads the tensors alone. Nothing of adapter_config.json counts: AdapterConfig's alpha is the whole scale of B·A, and 1 where none is
# given. A LoRA of rank 4 with lora_alpha 16 is served at a quarter of its strength, without a word, and the alpha that gives PEFT's answers
# is 4, lora_alpha divided by the rank, neither the default nor lora_alpha. One number for all modules: no patterns.
# Seen: openvino-genai 2026.4.1.0, optimum-intel 2.2.0, peft 0.21.2, transformers 5.5.4, torch 2.13.0, 2026-11-30; of 6 greedy answers of 16
#   tokens, equal to PEFT's with its own scale of 4, and with a scale of 1: default 0 and 6, alpha 4 6 and 0, alpha 16 0 and 0
set -euo pipefail
place=$(mktemp -d); trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 2>/dev/null
"$place/venv/bin/pip" install --quiet --disable-pip-version-check optimum-intel==2.2.0 transformers==5.5.4 peft==0.21.2 2>/dev/null
"$place/venv/bin/pip" install --quiet --disable-pip-version-check openvino-genai==2026.4.1.0 openvino-tokenizers==2026.4.1.0 2>/dev/null
cat >"$place/scales.py" <<'PY'
import sys
from pathlib import Path

import numpy as np
import openvino
import openvino_genai
import torch
from openvino_tokenizers import convert_tokenizer
from optimum.intel import OVModelForCausalLM
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

PROMPTS = [[1, 2, 3, 5], [7, 8, 9, 10, 4], [30, 31, 5, 6, 7], [20, 40, 50, 3], [11, 12, 13], [5, 5, 5, 6]]
NUM_TOKENS = 16


def answers_of_peft(folder, scale):
    model = PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(folder / "base"), folder / "adapter").eval()
    for module in model.modules():
        if scale is not None and isinstance(getattr(module, "scaling", None), dict):
            module.scaling["default"] = scale
    found = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        with torch.no_grad():
            for _ in range(NUM_TOKENS):
                ids = torch.cat([ids, model(ids).logits[:, -1].argmax(-1)[None]], 1)
        found.append(ids[0, len(prompt) :].tolist())
    return found


def answers_of_openvino(folder, *alpha):
    adapter = openvino_genai.Adapter(folder / "adapter/adapter_model.safetensors")
    adapters = openvino_genai.AdapterConfig(adapter, *alpha)
    pipeline = openvino_genai.LLMPipeline(folder / "ov", "CPU", adapters=adapters, INFERENCE_PRECISION_HINT="f32")
    asked = openvino_genai.GenerationConfig()
    asked.max_new_tokens, asked.ignore_eos = NUM_TOKENS, True
    ids = [openvino.Tensor(np.array([prompt], dtype=np.int64)) for prompt in PROMPTS]
    return [list(pipeline.generate(each, asked).tokens[0]) for each in ids]


folder = Path(sys.argv[1])
words = Tokenizer(models.WordLevel({f"t{number}": number for number in range(64)}, unk_token="t0"))
words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="t0", bos_token="t62", eos_token="t63", pad_token="t63")
torch.manual_seed(0)
sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, bos_token_id=62, eos_token_id=63, initializer_range=0.4, **sizes))
model.save_pretrained(folder / "base")
tokenizer.save_pretrained(folder / "base")
lora = LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
get_peft_model(model, lora).save_pretrained(folder / "adapter")
OVModelForCausalLM.from_pretrained(folder / "base", export=True).save_pretrained(folder / "ov")
for part, name in zip(convert_tokenizer(tokenizer, with_detokenizer=True), ("tokenizer", "detokenizer"), strict=True):
    openvino.save_model(part, folder / f"ov/openvino_{name}.xml")

trained, weak = answers_of_peft(folder, None), answers_of_peft(folder, 1)
equal = {}
for alpha in ((), (4.0,), (16.0,)):
    found = answers_of_openvino(folder, *alpha)
    equal[alpha] = tuple(sum(a == b for a, b in zip(found, other, strict=True)) for other in (trained, weak))
print(f"answers like PEFT's, like those of a scale of 1, of {len(PROMPTS)}: {equal}")
assert equal == {(): (0, 6), (4.0,): (6, 0), (16.0,): (0, 0)}
PY
"$place/venv/bin/python" "$place/scales.py" "$place" 2>&1 | grep -v "Warning\|it/s"
