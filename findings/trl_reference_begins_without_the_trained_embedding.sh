#!/usr/bin/env bash
# Believed: TRL's trainers that go on from a trained adapter (a PeftModel and no ref_model) compare with that adapter as it was, so that the
# first loss of DPO is ln 2 = 0.6931 and the first KL is 0.
# So is: they add an adapter "ref" of the same config and copy each parameter that has ".default." within its name. Those of LoRA on an
# embedding and of trainable_token_indices end in ".default", so "ref" keeps what a new adapter begins with: the base's rows. DPO, KTO, GRPO
# and RLOO do so alike, without a word; rewards and KL are measured from a model that nobody trained. DoRA and modules_to_save are
# copied. Give DPO and KTO the merged adapter as ref_model: the first loss is 0.6931 then.
# Seen: trl 1.16.0, peft 0.21.2, transformers 5.23.0, torch 2.13.0 (CPU), 2026-12-01; logits of "ref" beside the adapter's, first loss of DPO:
#   plain, use_dora, modules_to_save: 0 by all four, 0.6931; trainable_token_indices 0.36, 0.6975; LoRA on embed_tokens 0.55, 0.6694
set -euo pipefail
place=$(mktemp -d); trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 2>/dev/null
"$place/venv/bin/pip" install --quiet --disable-pip-version-check transformers==5.23.0 peft==0.21.2 safetensors==0.8.0 2>/dev/null
"$place/venv/bin/pip" install --quiet --disable-pip-version-check trl==1.16.0 accelerate==1.15.0 datasets==5.2.0 2>/dev/null
cat >"$place/reference.py" <<'PY'
import sys
from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, KTOConfig, KTOTrainer, RLOOConfig, RLOOTrainer

place = Path(sys.argv[1])
IDS = torch.tensor([[1, 2, 3, 5, 7, 8, 9, 5, 11, 12]])
words = Tokenizer(models.WordLevel({f"t{number}": number for number in range(64)}, unk_token="t0"))
words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="t0", eos_token="t63", pad_token="t62")
PAIRS = Dataset.from_list([{"prompt": "t1 t2 t3", "chosen": " t5 t7 t8", "rejected": " t9 t11 t12"}] * 2)
MARKED = Dataset.from_list([{"prompt": "t1 t2 t3", "completion": f" t{5 + label}", "label": bool(label)} for label in range(2)])
PROMPTS = Dataset.from_list([{"prompt": "t1 t2 t3"}] * 2)


def base():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes)).eval()


def logits(model, adapter):
    model.set_adapter(adapter)
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits[0]


def trained(name, options):
    """Saves an adapter with random weights; returns it, loaded to be trained on."""
    options = {"target_modules": ["q_proj", "v_proj"], **options}
    model = get_peft_model(base(), LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", **options))
    torch.manual_seed(3)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.add_(torch.randn_like(parameter) * 0.3)
    model.save_pretrained(place / name)
    return PeftModel.from_pretrained(base(), place / name, is_trainable=True)


def trainer(kind, config, data, model, **options):
    common = {"output_dir": str(place / "out"), "use_cpu": True, "bf16": False, "report_to": [], "logging_steps": 1, "max_steps": 1}
    common |= {"gradient_checkpointing": False, "per_device_train_batch_size": 2}
    extra = {"reward_funcs": lambda **_: [0.0, 0.0]} if kind in (GRPOTrainer, RLOOTrainer) else {}
    return kind(model=model, args=config(**common, **options), train_dataset=data, processing_class=tokenizer, **extra)


KINDS = {
    "DPO": (DPOTrainer, DPOConfig, PAIRS, {}),
    "KTO": (KTOTrainer, KTOConfig, MARKED, {}),
    "GRPO": (GRPOTrainer, GRPOConfig, PROMPTS, {"beta": 0.1, "num_generations": 2}),
    "RLOO": (RLOOTrainer, RLOOConfig, PROMPTS, {"beta": 0.1, "num_generations": 2}),
}
CASES = {
    "plain": {},
    "use_dora": {"use_dora": True},
    "modules_to_save": {"modules_to_save": ["lm_head"]},
    "trainable_token_indices": {"trainable_token_indices": [5, 7]},
    "LoRA on embed_tokens": {"target_modules": ["q_proj", "embed_tokens"]},
}
seen = {}
for name, options in CASES.items():
    off = {}
    for kind, (made, config, data, more) in KINDS.items():
        model = trained(name, options)
        trainer(made, config, data, model, **more)
        off[kind] = float((logits(model, "default") - logits(model, "ref")).abs().max())
    loop = trainer(*KINDS["DPO"][:3], trained(name, options))
    loop.train()
    loss = loop.state.log_history[0]["loss"]
    print(f"{name}: reference off by", ", ".join(f"{kind} {far:.2g}" for kind, far in off.items()) + f"; first loss of DPO {loss:.4f}")
    seen[name] = {far > 0.01 for far in off.values()} | {abs(loss - 0.6931) > 0.002}
sys.exit(0 if list(seen.values()) == [{False}] * 3 + [{True}] * 2 else "changed")
PY
export HF_DATASETS_CACHE="$place/datasets"
"$place/venv/bin/python" "$place/reference.py" "$place" 2>/dev/null | grep "reference off"
