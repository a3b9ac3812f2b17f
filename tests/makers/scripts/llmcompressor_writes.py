"""llm-compressor's own writer over the model in BASE. Arguments: BASE OUT."""

import sys
from pathlib import Path

from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import QuantizationModifier
from transformers import AutoModelForCausalLM

base, out = sys.argv[1:]
for scheme in (
    "W8A8",
    "W8A16",
    "W4A16",
    "W4A16_ASYM",
    "FP8_DYNAMIC",
    "FP8_BLOCK",
    "NVFP4A16",
    "MXFP4A16",
):
    try:
        model = AutoModelForCausalLM.from_pretrained(base, dtype="float32")
        oneshot(model=model, recipe=QuantizationModifier(targets="Linear", scheme=scheme, ignore=["lm_head"]))
        model.save_pretrained(Path(out) / scheme, save_compressed=True)
    except Exception as error:  # what a tool does not write is told, not judged
        print(f"{scheme}: not written: {type(error).__name__}: {str(error)[:200]}", file=sys.stderr)
