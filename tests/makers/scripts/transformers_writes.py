"""What the pinned transformers saves for each format that it makes of a model in 16 bits. Arguments: BASE OUT."""

import sys
from pathlib import Path

from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    FineGrainedFP8Config,
    HqqConfig,
    QuantoConfig,
    TorchAoConfig,
)

base, out = sys.argv[1:]


def torchao(name):
    def make():
        from torchao.quantization import quant_api

        return TorchAoConfig(getattr(quant_api, name)())

    return make


KINDS = {
    "nf4": lambda: BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
    "nf4, nested": lambda: BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
    ),
    "fp4": lambda: BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="fp4"),
    "bitsandbytes int8": lambda: BitsAndBytesConfig(load_in_8bit=True),
    "fp8": lambda: FineGrainedFP8Config(weight_block_size=(32, 32)),
    "hqq": lambda: HqqConfig(nbits=4, group_size=32),
    "quanto": lambda: QuantoConfig(weights="int8"),
    "torchao int8": torchao("Int8WeightOnlyConfig"),
}
for name, config in KINDS.items():
    try:
        model = AutoModelForCausalLM.from_pretrained(
            base, dtype="float32", device_map="cpu", quantization_config=config()
        )
        model.save_pretrained(Path(out) / name)
    except Exception as error:  # what this machine cannot write is told, not judged
        print(f"{name}: not written: {type(error).__name__}: {str(error)[:200]}", file=sys.stderr)
