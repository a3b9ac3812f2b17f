"""`python -m loraplex.app.convert GGUF DIR`: a GGUF file as a safetensors model directory, in bfloat16."""

from __future__ import annotations

import sys
from pathlib import Path


def convert(gguf: Path, target: Path) -> None:
    """Write config, tokenizer, chat template and bfloat16 weights of `gguf` into the new directory `target`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    where, name = str(gguf.parent), gguf.name
    AutoTokenizer.from_pretrained(where, gguf_file=name).save_pretrained(str(target))
    model = AutoModelForCausalLM.from_pretrained(
        where, gguf_file=name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    model.save_pretrained(str(target))
    weights = target / "model.safetensors"
    if weights.exists():
        weights.chmod(0o644)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
