"""AutoRound's own writer over the model in BASE: every format of GPTQ's and AWQ's kind. Arguments: BASE OUT."""

import sys
from pathlib import Path

from auto_round import AutoRound
from transformers import AutoModelForCausalLM, AutoTokenizer

base, out = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(base)
given = [tokenizer("The quick brown fox. " * 20, return_tensors="pt")["input_ids"][:, :64] for _ in range(8)]
KINDS = {
    "GPTQ": ("auto_gptq", {}),
    "AWQ": ("auto_awq", {}),
    "AWQ, zeros": ("auto_awq", {"sym": False}),
    "own": ("auto_round", {}),
    "own, zeros": ("auto_round", {"sym": False}),
    "own, 8 bits": ("auto_round", {"bits": 8}),
    "own, a smaller last group": ("auto_round", {"group_size": 96}),
    "own, the head too": ("auto_round", {"quant_lm_head": True}),
    "own, a module of 8 bits": (
        "auto_round",
        {"layer_config": {"model.layers.0.mlp.down_proj": {"bits": 8}}},
    ),
    "own, a module left out": (
        "auto_round",
        {"layer_config": {"model.layers.0.self_attn.q_proj": {"bits": 16}}},
    ),
    "compressed-tensors": ("llm_compressor", {"scheme": "W8A16"}),
}
for name, (form, options) in KINDS.items():
    model = AutoModelForCausalLM.from_pretrained(base, dtype="float32")
    scheme = {} if "scheme" in options else {"bits": 4, "group_size": 32, "sym": True}
    shared = {"iters": 0, "nsamples": 4, "seqlen": 64, "dataset": given, "device_map": "cpu"}
    try:
        AutoRound(model, tokenizer, **shared | scheme | options).quantize_and_save(
            str(Path(out) / name), format=form
        )
    except Exception as error:  # what a tool does not write is told, not judged
        print(f"{name}: not written: {type(error).__name__}: {str(error)[:200]}", file=sys.stderr)
