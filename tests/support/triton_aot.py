"""Compiles Triton kernels for GPUs that are not there, and tells what each takes of one.

A test lists its `Variant`s and calls `check`, which compares what the compiler says with what a committed file
recorded. The compiling runs in a process of its own: this one may have imported Triton to interpret kernels, and no
kernel can be both. To record anew, after a change that is meant:

    RECORD_AOT=1 python -m pytest tests/kernels/test_..._aot.py
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ARCHS = (80, 90)
"""Compute capabilities, times ten: A100 and H100 or H200."""
MAX_SHARED_BYTES = {80: 163 << 10, 90: 227 << 10}
"""What one block may have of shared memory."""

Constant = int | float | bool | str | None


@dataclass(frozen=True)
class Variant:
    """One kernel with its types and constants, as a launch would compile it.

    `kernel` is "module:function". `signature` gives every parameter that is no constant its type, such as "*bf16",
    "*fp32", "i32", "i64", "fp32"; `constants` gives the others their values. `unaligned` names pointers that may not
    be a multiple of 16 bytes; all others are taken to be, as torch's are. `multiples_of_16` names integers that
    are, in the launches meant here. `archs`: those that it is launched on.
    """

    name: str
    kernel: str
    signature: Mapping[str, str]
    constants: Mapping[str, Constant] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 3
    unaligned: tuple[str, ...] = ()
    multiples_of_16: tuple[str, ...] = ()
    archs: tuple[int, ...] = ARCHS


@dataclass(frozen=True)
class Usage:
    """Registers a thread, shared memory a block, and bytes that registers spill to memory (stores and loads), for the
    stack likewise. `tensor_cores` counts the matrix instructions of the machine code, `wide_loads` the loads of 16
    bytes a thread from global memory."""

    registers: int
    shared_bytes: int
    spill_bytes: int
    stack_bytes: int
    tensor_cores: int
    wide_loads: int


Report = dict[str, dict[str, Usage]]
"""By the variant's name, then by "sm_80" and the like."""


def compile_variants(
    variants: Sequence[Variant], archs: Sequence[int] = ARCHS, *, python: str = sys.executable
) -> tuple[str, Report]:
    """Triton's version and what each variant takes. Raises AssertionError with the compiler's words where one can't
    be compiled."""
    tests = Path(__file__).resolve().parents[1]
    request = {"archs": list(archs), "variants": [asdict(variant) for variant in variants]}
    # A cache elsewhere than the user's: it would hide what a change of the compiler's settings does.
    with tempfile.TemporaryDirectory() as cache:
        env = {**os.environ, "TRITON_CACHE_DIR": cache}
        env.pop("TRITON_INTERPRET", None)
        env["PYTHONPATH"] = os.pathsep.join([str(tests), *filter(None, [env.get("PYTHONPATH")])])
        done = subprocess.run(
            [python, "-m", "support.triton_aot"],
            input=json.dumps(request),
            capture_output=True,
            text=True,
            check=False,
            cwd=tests.parent,
            env=env,
        )
    assert done.returncode == 0, (
        f"the kernels could not be compiled:\n{done.stdout[-2000:]}{done.stderr[-6000:]}"
    )
    answer = json.loads(done.stdout.splitlines()[-1])
    return answer["triton"], {
        name: {arch: Usage(**usage) for arch, usage in by_arch.items()}
        for name, by_arch in answer["usage"].items()
    }


def check(variants: Sequence[Variant], recorded: Path, *, slack: float = 0.15) -> Report:
    """Compile everything and compare it with a committed record. Nothing may spill unless the record says so, and
    then no more than that; what fits no block of an architecture fails, and so does a kernel that no longer uses the
    tensor cores, or wide loads, or begins to; with the recorded version of Triton registers and shared memory may not
    grow by more than `slack`. With RECORD_AOT set, write the record instead.
    """
    assert len({variant.name for variant in variants}) == len(variants)
    version, report = compile_variants(variants)
    if os.environ.get("RECORD_AOT"):
        lines = [f"    {json.dumps(name)}: {_one_line(report[name])}" for name in report]
        recorded.write_text(
            f'{{\n  "triton": {json.dumps(version)},\n  "kernels": {{\n' + ",\n".join(lines) + "\n  }\n}\n"
        )
    record = json.loads(recorded.read_text())
    known = record["kernels"]
    assert set(known) == set(report), (
        f"{recorded.name} records other kernels than there are: record anew with RECORD_AOT=1"
    )
    faults = []
    for name, by_arch in report.items():
        for arch, usage in by_arch.items():
            before = Usage(**known[name][arch])
            faults += [f"{name} on {arch}: {fault}" for fault in _faults(arch, usage, before, slack)]
            if version == record["triton"]:
                faults += [f"{name} on {arch}: {fault}" for fault in _growth(usage, before, slack)]
    assert not faults, "\n".join(faults)
    return report


def _one_line(by_arch: Mapping[str, Usage]) -> str:
    return json.dumps({arch: asdict(usage) for arch, usage in by_arch.items()})


def _faults(arch: str, usage: Usage, before: Usage, slack: float) -> list[str]:
    faults = []
    if usage.spill_bytes > before.spill_bytes * (1 + slack):
        faults.append(f"{usage.spill_bytes} bytes spilled, recorded are {before.spill_bytes}")
    limit = MAX_SHARED_BYTES[int(arch.removeprefix("sm_"))]
    if usage.shared_bytes > limit:
        faults.append(f"{usage.shared_bytes} bytes of shared memory, {limit} are the most")
    for name in ("tensor_cores", "wide_loads"):
        now, then = getattr(usage, name), getattr(before, name)
        if bool(now) != bool(then):
            faults.append(f"{name} {now}, recorded are {then}")
    return faults


def _growth(usage: Usage, before: Usage, slack: float) -> list[str]:
    faults = []
    for name in ("registers", "shared_bytes"):
        now, then = getattr(usage, name), getattr(before, name)
        if now > then * (1 + slack):
            faults.append(f"{name} {now}, recorded are {then}")
    return faults


# What follows runs in the compiling process.


def _compile_all(request: dict[str, Any]) -> dict[str, Any]:
    import triton

    jobs = [
        (variant, arch)
        for variant in request["variants"]
        for arch in request["archs"]
        if arch in variant["archs"]
    ]
    # The compiler lets go of the interpreter's lock in its long parts, and the assembler is a process.
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda job: _compile(*job), jobs))
    usage: dict[str, dict[str, Any]] = {}
    for (variant, arch), one in zip(jobs, found, strict=True):
        usage.setdefault(variant["name"], {})[f"sm_{arch}"] = one
    return {"triton": triton.__version__, "usage": usage}


def _compile(variant: dict[str, Any], arch: int) -> dict[str, int]:
    compiled = compile_variant(variant, arch)
    return {"shared_bytes": compiled.metadata.shared, **_read_usage(compiled.asm["ptx"], arch)}


def compile_variant(variant: dict[str, Any], arch: int) -> Any:
    """What Triton made of a variant, given as a dict. Only where kernels are not interpreted."""
    from importlib import import_module

    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    module, name = variant["kernel"].split(":")
    kernel = getattr(import_module(module), name)
    types, constants = variant["signature"], variant["constants"]
    missing = set(kernel.arg_names) ^ (set(types) | set(constants))
    if missing or set(types) & set(constants):
        raise ValueError(
            f"{variant['name']}: the kernel's parameters and the variant's differ in {sorted(missing)}"
        )
    signature = {arg: types.get(arg, "constexpr") for arg in kernel.arg_names}
    attrs = {
        (at,): [["tt.divisibility", 16]]
        for at, arg in enumerate(kernel.arg_names)
        if (signature[arg].startswith("*") and arg not in variant["unaligned"])
        or arg in variant["multiples_of_16"]
    }
    source = ASTSource(kernel, signature, dict(constants), attrs)
    options = {"num_warps": variant["num_warps"], "num_stages": variant["num_stages"]}
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def _read_usage(ptx: str, arch: int) -> dict[str, int]:
    """Assemble once more, to hear what the assembler says, and read the machine code for matrix instructions."""
    from triton.backends import nvidia

    tools = Path(nvidia.__path__[0]) / "bin"
    with tempfile.TemporaryDirectory() as folder:
        source, binary = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(ptx)
        gpu = f"--gpu-name=sm_{arch}{'a' if arch >= 90 else ''}"
        said = subprocess.run(
            [tools / "ptxas", "-v", gpu, source, "-o", binary], capture_output=True, text=True, check=True
        )
        code = subprocess.run(
            [tools / "cuobjdump", "-sass", binary], capture_output=True, text=True, check=True
        )
    log = said.stdout + said.stderr
    return {
        "registers": _number(r"Used (\d+) registers", log),
        "spill_bytes": _number(r"(\d+) bytes spill stores", log) + _number(r"(\d+) bytes spill loads", log),
        "stack_bytes": _number(r"(\d+) bytes stack frame", log),
        "tensor_cores": len(re.findall(r"\b[HQ]G?MMA\b", code.stdout)),
        "wide_loads": len(re.findall(r"\bLDG(?:STS)?\.[A-Z0-9.]*128\b|\bUBLKCP|\bUTMALDG", code.stdout)),
    }


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    if found is None:
        raise ValueError(f"the assembler's report has no {pattern!r}:\n{text}")
    return int(found[1])


if __name__ == "__main__":
    print(json.dumps(_compile_all(json.loads(sys.stdin.read()))))


class Recorder:
    """Stands for a kernel, and keeps what it is launched with."""

    def __init__(self, kernel: Any, keep: Callable[[dict[str, Any]], None]) -> None:
        self._names = kernel.arg_names
        self._keep = keep

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **options: Any) -> None:
            self._keep(dict(zip(self._names, args, strict=False)) | options)

        return launch
