"""The product on a GPU: a checkpoint on the disk, an engine over it, and requests with adapters.

    PYTHONPATH=tests:server:adapters:kernels:build/gpu-site python3 -m bench.gpu.engine --out build/gpu

The model has Llama-3.1-8B's shape and random weights, 16 GB in a temporary folder. Answers are compared with
transformers and PEFT; then 200 adapters share the memory of 64 slots, a step finds no memory, and a KV cache is too
small. `engine.json` in --out holds what is known after each part. `--codes` serves the base as 8-bit codes, `--small`
runs tiny shapes, interpreted, without a GPU. The exit status is 0 if all is right, else 1.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.gpu.engine", description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("build/gpu"), help="folder for engine.json")
    parser.add_argument(
        "--work", type=Path, default=None, help="folder for the checkpoint: 17 GB for a while"
    )
    parser.add_argument("--small", action="store_true", help="tiny shapes, interpreted, without a GPU")
    parser.add_argument("--codes", action="store_true", help="serve the base's linears as 8-bit codes")
    parser.add_argument("--layers", type=int, default=None, help="layers of the model (default: the shape's)")
    given = parser.parse_args(arguments)
    if given.small:
        os.environ |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    # Triton decides as it is imported whether it interprets.
    import torch

    from bench.gpu.engine.product import FULL, SMALL, run_product
    from bench.gpu.worker import environment, plain

    if not given.small and not torch.cuda.is_available():
        print("torch finds no CUDA device here; --small runs without one", file=sys.stderr)
        return 1
    device = torch.device("cpu" if given.small else "cuda")
    given.out.mkdir(parents=True, exist_ok=True)
    told = {"environment": environment(device), "rows": (rows := [])}
    with tempfile.TemporaryDirectory(dir=given.work) as folder:
        shape = (SMALL if given.small else FULL).changed(codes=given.codes, layers=given.layers)
        path = given.out / "engine.json"
        for row in run_product(shape, device, Path(folder)):
            rows.append(row)
            path.write_text(json.dumps(plain(told), indent=1) + "\n", "utf-8")
            print(" ".join(f"{name}={_shown(value)}" for name, value in row.items()), flush=True)
    right = all(row["ok"] for row in rows)
    print(f"{'all is right' if right else 'something is wrong'}: {path}")
    return 0 if right else 1


def _shown(value: object) -> str:
    return (
        f"{value:.4g}" if isinstance(value, float) else repr(value) if isinstance(value, str) else str(value)
    )


if __name__ == "__main__":
    sys.exit(main())
