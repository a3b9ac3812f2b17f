"""A checkpoint of 8-bit weights for 8-bit activations, made of one in 16 bits:

    PYTHONPATH=tests python -m bench.cpu.w8a8_checkpoint MODEL OUT

MODEL is a directory of one `model.safetensors` with its config and tokenizer. OUT, which must not exist, becomes a
compressed-tensors checkpoint in the format int-quantized, as llm-compressor writes one: int8 weights with a scale for
each output, activations in int8 with a scale for each token, found when it is served; embedding, norms and head stay.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from support.models.quantised_formats import write_quantised

FORMAT = "compressed int8, a scale a row"


def write_w8a8(model: Path, out: Path) -> None:
    """Raises SystemExit if `out` exists."""
    if out.exists():
        raise SystemExit(f"{out} exists already")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent) as made:
        write_quantised(model, Path(made), FORMAT)
        (Path(made) / "quantised").rename(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    write_w8a8(options.model, options.out)


if __name__ == "__main__":
    main()
