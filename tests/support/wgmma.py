"""Finds matrix products in registers that a Hopper kernel does not wait for: the ptxas 12.8 in Triton 3.6 and 3.7
may overwrite such an operand too early (triton #9433). Runs in a process of its own, as `triton_aot` does."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from support.triton_aot import Variant, compile_variant


def products_in_flight(variant: Variant) -> tuple[int, int]:
    """How many of the WGMMAs of a variant on sm_90 take their first operand from registers, and how many of those
    the next operation does not wait for."""
    tests = Path(__file__).resolve().parents[1]
    with tempfile.TemporaryDirectory() as cache:
        env = {**os.environ, "TRITON_CACHE_DIR": cache, "PYTHONPATH": str(tests)}
        env.pop("TRITON_INTERPRET", None)
        done = subprocess.run(
            [sys.executable, "-m", "support.wgmma"],
            input=json.dumps(asdict(variant)),
            capture_output=True,
            text=True,
            check=False,
            cwd=tests.parent,
            env=env,
        )
    assert done.returncode == 0, done.stderr[-4000:]
    found, unawaited = json.loads(done.stdout.splitlines()[-1])
    return found, unawaited


def _count(ttgir: str) -> tuple[int, int]:
    lines = [line.strip() for line in ttgir.splitlines()]
    found = unawaited = 0
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        product = re.match(r"(%\S+) = ttng\.warp_group_dot .*: tensor<[^>]*dot_op", line)
        if product:
            found += 1
            awaited = f"ttng.warp_group_dot_wait {product[1]}" in following and "pendings = 0" in following
            unawaited += not awaited
    return found, unawaited


if __name__ == "__main__":
    print(json.dumps(_count(compile_variant(json.loads(sys.stdin.read()), 90).asm["ttgir"])))
