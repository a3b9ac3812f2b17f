"""The first ten minutes on a GPU: what is right, which form of batched LoRA is the fastest, and what follows.

    PYTHONPATH=tests:server:adapters:kernels python3 -m bench.gpu.ten_minutes --out build/gpu-first --wheel vllm.whl

Rows are on the disk as they come. Run again with the same --out, it goes on with what was cut off. The budget begins
when the wheels are unpacked, up to half a minute after the start.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bench.gpu.lora_peers.cases import FOLDER
from bench.gpu.lora_peers.wheels import WheelError, unpack
from bench.gpu.suite import Suite, WorkerLost, current_commit
from bench.gpu.ten_minutes.cases import BLOCKS
from bench.gpu.ten_minutes.decisions import table

_LANES = 12
"""Processes that compile."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.gpu.ten_minutes", description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("build/gpu-first"), help="folder for the results")
    parser.add_argument(
        "--wheel", type=Path, action="append", default=[], help="of vLLM or of SGLang; may be repeated"
    )
    parser.add_argument(
        "--budget", type=float, default=555.0, help="seconds for everything, behind the start"
    )
    parser.add_argument("--small", action="store_true", help="tiny shapes, interpreted, without a GPU")
    parser.add_argument("--commit", default=None, help="where git is not there to ask")
    given = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    environment = dict(os.environ)
    if given.small:
        environment |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    try:
        with tempfile.TemporaryDirectory() as folder:
            titles = [unpack(wheel, Path(folder)).title for wheel in given.wheel]
            size = "small" if given.small else "full"
            suite = Suite(
                catalogue=":".join(["bench.gpu.ten_minutes.cases", size, *sorted(titles)]),
                out=given.out,
                budget_s=given.budget,
                lanes=1 if given.small else _LANES,
                blocks=BLOCKS,
                commit=given.commit or current_commit(),
                program="bench.gpu.ten_minutes",
                environment=environment | {FOLDER: folder},
                say=lambda line: print(line, flush=True),
            )
            try:
                right = suite.run()
            finally:  # what was measured before a signal decides too
                _decide(given.out)
    except (WheelError, WorkerLost, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    print((given.out / "decisions.md").read_text("utf-8"))
    print(f"written: {given.out / 'results.md'}, {given.out / 'decisions.md'}")
    return 0 if right else 1


def _decide(out: Path) -> None:
    """Write `decisions.md` from `results.json`, if that is there."""
    written = out / "results.json"
    if written.exists():
        results = json.loads(written.read_text("utf-8"))["results"]
        lines = table({result["case"]: result for result in results})
        (out / "decisions.md").write_text("\n".join(lines) + "\n", "utf-8")


if __name__ == "__main__":
    sys.exit(main())
