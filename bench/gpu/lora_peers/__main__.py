"""LoRA kernels of vLLM and of SGLang beside those here, in one run: docs/lab/gpu.md.

PYTHONPATH=tests:server:adapters:kernels python3 -m bench.gpu.lora_peers --wheel vllm.whl --wheel sglang.whl
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bench.gpu.lora_peers.cases import FOLDER
from bench.gpu.lora_peers.code import COLUMNS, rows
from bench.gpu.lora_peers.wheels import WheelError, unpack
from bench.gpu.report import markdown_table
from bench.gpu.suite import Suite, WorkerLost, current_commit


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.gpu.lora_peers", description=__doc__.split("\n")[0])
    parser.add_argument(
        "--wheel", type=Path, action="append", required=True, help="of vLLM or of SGLang; may be repeated"
    )
    parser.add_argument("--out", type=Path, default=Path("build/gpu-peers"), help="folder for the results")
    parser.add_argument("--budget", type=float, default=120.0, help="seconds for everything")
    parser.add_argument("--small", action="store_true", help="tiny shapes, interpreted, without a GPU")
    parser.add_argument(
        "--code",
        action="store_true",
        help="print what the kernels take of a GPU that is not there, and run none",
    )
    parser.add_argument("--commit", default=None, help="where git is not there to ask")
    given = parser.parse_args(arguments)
    environment = dict(os.environ)
    if given.small:
        environment |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    try:
        with tempfile.TemporaryDirectory() as folder:
            wheels = [unpack(wheel, Path(folder)) for wheel in given.wheel]
            if given.code:
                print("\n".join(markdown_table(COLUMNS, list(rows(wheels)))))
                return 0
            titles = sorted(wheel.title for wheel in wheels)
            suite = Suite(
                catalogue=":".join(
                    ["bench.gpu.lora_peers.cases", "small" if given.small else "full", *titles]
                ),
                out=given.out,
                budget_s=given.budget,
                commit=given.commit or current_commit(),
                program="bench.gpu.lora_peers",
                environment=environment | {FOLDER: folder},
            )
            right = suite.run()
    except (WheelError, WorkerLost, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    print((given.out / "results.md").read_text("utf-8"))
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
