"""GPTQModel's own writer over the model in BASE. Arguments: BASE OUT."""

import os
import sys
from pathlib import Path


def main() -> None:
    os.cpu_count = lambda: 16  # with two it makes pools that it refuses

    from gptqmodel import GPTQModel, QuantizeConfig
    from gptqmodel.quantization.config import AWQConfig

    base, out = sys.argv[1:]
    KINDS = {
        "GPTQ": (QuantizeConfig, {}),
        "GPTQ, 8 bits": (QuantizeConfig, {"bits": 8}),
        "GPTQ, a scale a row": (QuantizeConfig, {"group_size": -1}),
        "GPTQ, zeros": (QuantizeConfig, {"sym": False}),
        "gptq_v2, zeros": (QuantizeConfig, {"sym": False, "format": "gptq_v2"}),
        "GPTQ, a module left out": (QuantizeConfig, {"dynamic": {"-:.*k_proj": {}}}),
        "GPTQ, ordered by activation": (QuantizeConfig, {"desc_act": True, "act_group_aware": False}),
        "GPTQ, modules of 8 bits": (QuantizeConfig, {"dynamic": {"+:.*down_proj": {"bits": 8}}}),
        "GPTQ, the head too": (QuantizeConfig, {"lm_head": True}),
        "AWQ": (AWQConfig, {}),
        "AWQ, zeros": (AWQConfig, {"sym": False}),
    }
    for name, (config, options) in KINDS.items():
        try:
            model = GPTQModel.load(base, config(**{"bits": 4, "group_size": 32} | options), device="cpu")
            model.quantize(["The quick brown fox jumps over the lazy dog. " * 20] * 32, batch_size=1)
            model.save(str(Path(out) / name))
        except Exception as error:  # what a tool does not write is told, not judged
            print(f"{name}: not written: {type(error).__name__}: {str(error)[:200]}", file=sys.stderr)


main()
