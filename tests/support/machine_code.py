"""Loads, waits and barriers of a kernel, read in its machine code for GPUs that are not there.

Kernels are compiled as `support.kernels.triton_compile` compiles them, in a process of their own, unless CODE, which is
committed, has what was found of the same sources. After a change of kernels that are read here:

    KEEP_AOT=1 python -m pytest -m "not soak" tests/kernels/*/test_*_aot.py
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from support.kernels.triton_aot import Variant
from support.kernels.triton_compile import KEPT, _compile_variant, sources_digest

CODE = KEPT.with_name("code.json")
"""What was found, by kernel and architecture, and "sources", a digest of what it depends on."""
_TESTS = Path(__file__).resolve().parents[1]
_INSTRUCTION = re.compile(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([^;]*);")
_WIDE_LOAD = re.compile(r"LDG\.[A-Z0-9.]*128")
_WIDE_COPY = re.compile(r"LDGSTS\.[A-Z0-9.]*128")
_REGISTER = re.compile(r"\bR(\d+)\b")


@dataclass(frozen=True)
class Code:
    """`at_once`: of each run of loads of 16 bytes a thread, how many are under way when the first of them is used.
    `before_wait`: how many of these stand before each wait for the launch before, since the last run. `copies`: how
    many copies of 16 bytes a thread to shared memory are begun before each wait for copies, since the last one.
    `fetched`: instructions that bring lines into the L2 cache before the first wait for the launch before."""

    at_once: list[int]
    before_wait: list[int]
    copies: list[int]
    fetched: int
    barriers: int
    shuffles: int


def read_code(jobs: Sequence[tuple[Variant, int]]) -> list[Code]:
    """For each variant and architecture. Raises AssertionError with the compiler's words where one can't be
    compiled."""
    names = [f"{variant.name} on sm_{arch}" for variant, arch in jobs]
    kept = json.loads(CODE.read_text())
    digests = [_digest(variant, arch) for variant, arch in jobs]
    missing = [at for at, name in enumerate(names) if kept.get(name, {}).get("sources") != digests[at]]
    if missing:
        asked = json.dumps([(asdict(jobs[at][0]), jobs[at][1]) for at in missing])
        for at, code in zip(missing, _compile_apart(asked), strict=True):
            kept[names[at]] = {"sources": digests[at], **code}
        if os.environ.get("KEEP_AOT"):
            lines = [f"  {json.dumps(name)}: {json.dumps(one)}" for name, one in sorted(kept.items())]
            CODE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    return [Code(**{key: value for key, value in kept[name].items() if key != "sources"}) for name in names]


def count(sass: str) -> Code:
    """Count them in a kernel's machine code, from its first instruction to its last."""
    waiting: set[int] = set()
    at_once, before_wait, loads = [], [], 0
    copies, copied, fetched = [], 0, 0
    for found in map(_INSTRUCTION.match, sass.splitlines()):
        if found is None:
            continue
        instruction = found[1]
        registers = [int(number) for number in _REGISTER.findall(instruction)]
        if waiting.intersection(registers):
            at_once.append(loads)
            waiting, loads = set(), 0
        if _WIDE_LOAD.match(instruction):
            waiting.update(range(registers[0], registers[0] + 4))
            loads += 1
        elif instruction.startswith("ACQBULK"):
            before_wait.append(loads)
        elif instruction.startswith("CCTL.E.PF2"):
            fetched += not before_wait
        elif _WIDE_COPY.match(instruction):
            copied += 1
        elif instruction.startswith("DEPBAR.LE") and copied:
            copies.append(copied)
            copied = 0
    words = re.findall(r"\b(BAR\.SYNC|SHFL)\b", sass)
    return Code(at_once, before_wait, copies, fetched, words.count("BAR.SYNC"), words.count("SHFL"))


def _digest(variant: Variant, arch: int) -> str:
    parts = [json.dumps([asdict(variant), arch]), sources_digest(variant.kernel), Path(__file__).read_text()]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _compile_apart(jobs: str) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as cache:
        env = {**os.environ, "TRITON_CACHE_DIR": cache, "PYTHONPATH": str(_TESTS)}
        env.pop("TRITON_INTERPRET", None)
        command = [sys.executable, "-m", "support.machine_code"]
        done = subprocess.run(
            command, input=jobs, capture_output=True, text=True, check=False, cwd=_TESTS.parent, env=env
        )
    assert done.returncode == 0, f"the kernels could not be compiled:\n{done.stderr[-6000:]}"
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


def _compile(variant: dict[str, Any], arch: int) -> dict[str, Any]:
    """Compile a variant and count in its machine code. Kernels must not be interpreted in this process."""
    from triton.backends import nvidia

    cubin = _compile_variant(variant, arch).asm["cubin"]
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder, "kernel.cubin")
        binary.write_bytes(cubin)
        tool = Path(nvidia.__path__[0]) / "bin" / "cuobjdump"
        code = subprocess.run([tool, "-sass", binary], capture_output=True, text=True, check=True)
    return asdict(count(code.stdout))


if __name__ == "__main__":
    print(json.dumps([_compile(variant, arch) for variant, arch in json.loads(sys.stdin.read())]))
