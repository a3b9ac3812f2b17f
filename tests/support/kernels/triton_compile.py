"""Triton kernels compiled for GPUs that are not there, once, in a process of its own, where no kernel is interpreted.

What was found of a kernel depends on the sources of its module and of all that this imports, the sources of what
compiles it here, the versions of Triton and Python, the variant and the architecture. It is compiled again where one of
them has changed, and else read from KEPT, which is committed, or from below XDG_CACHE_HOME. After a change of kernels,
so that CI need not compile them:

    KEEP_AOT=1 python -m pytest -m "not soak" tests/kernels/*/test_*_aot.py
"""

from __future__ import annotations

import ast
import functools
import hashlib
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

from loraplex import kernels
from support.kernels.triton_loads import loads_before_product

Job = tuple[dict[str, Any], int]
"""A support.kernels.triton_aot.Variant as a dict, and an architecture."""

_TESTS = Path(__file__).resolve().parents[2]
_KERNELS = "loraplex.kernels."
KEPT = _TESTS / "kernels" / "aot" / "compiled.json"
"""A file of what was found, by a job's name, and "sources", a digest of all sources and versions that it depends on."""


def compile_or_read(jobs: Sequence[Job]) -> list[dict[str, Any]]:
    """For each job `usage`, the fields of support.kernels.triton_aot.Usage, and `products`: how many WGMMAs take their
    first operand from registers, and how many of those the next operation does not wait for; and `loads`, as
    support.kernels.triton_loads counts them. Raises AssertionError with the compiler's words where one can't be
    compiled."""
    names = [_name(job) for job in jobs]
    sources = {name: sources_digest(job[0]["kernel"]) for name, job in zip(names, jobs, strict=True)}
    kept = json.loads(KEPT.read_text())
    found = {name: kept[name] for name in names if kept.get(name, {}).get("sources") == sources[name]}
    missing = {name: job for name, job in zip(names, jobs, strict=True) if name not in found}
    files = {name: _cache() / f"{_digest(name.encode(), sources[name].encode())}.json" for name in missing}
    uncompiled = {name: job for name, job in missing.items() if not files[name].exists()}
    if uncompiled:
        _cache().mkdir(parents=True, exist_ok=True)
        for name, one in zip(uncompiled, _compile_apart(list(uncompiled.values())), strict=True):
            written = files[name].with_suffix(f".{os.getpid()}")
            written.write_text(json.dumps({"sources": sources[name], **one}))
            written.replace(files[name])
    found |= {name: json.loads(path.read_text()) for name, path in files.items()}
    if missing and os.environ.get("KEEP_AOT"):
        _keep({name: found[name] for name, job in missing.items() if job[0]["kernel"].startswith(_KERNELS)})
    return [found[name] for name in names]


def _name(job: Job) -> str:
    """The same for the same job alone."""
    variant, arch = job
    return f"{variant['name']} on sm_{arch}, {_digest(json.dumps(job, sort_keys=True).encode())}"


def _keep(found: dict[str, dict[str, Any]]) -> None:
    kept = json.loads(KEPT.read_text()) | found
    lines = [f"  {json.dumps(name)}: {json.dumps(one)}" for name, one in sorted(kept.items())]
    KEPT.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def _cache() -> Path:
    root = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return root / "loraplex" / "tests" / "triton"


@functools.cache
def sources_digest(kernel: str) -> str:
    """A digest for "module:function": of its module, of the modules of `loraplex.kernels` that it imports, directly or
    not, of what compiles it here, and of the versions of Triton and Python."""
    paths = [*imported_sources(kernel.partition(":")[0]), *Path(__file__).parent.glob("triton_*.py")]
    contents = [f"triton {version('triton')} python {platform.python_version()}".encode()]
    contents += [path.name.encode() + path.read_bytes() for path in sorted(paths)]
    return _digest(*contents)


def imported_sources(module: str) -> set[Path]:
    """The files of a module and of all that it imports, as far as they are in `loraplex.kernels`."""
    found: set[Path] = set()
    waiting = [module]
    while waiting:
        name = waiting.pop()
        place = Path(kernels.__path__[0]).joinpath(*name.split(".")[2:])
        path = next(
            (path for path in (place.with_suffix(".py"), place / "__init__.py") if path.is_file()), None
        )
        if not f"{name}.".startswith(_KERNELS) or path is None or path in found:
            continue
        found.add(path)
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.ImportFrom) and node.module:
                waiting += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            elif isinstance(node, ast.Import):
                waiting += [alias.name for alias in node.names]
    return found


def _digest(*contents: bytes) -> str:
    digest = hashlib.sha256()
    for content in contents:
        digest.update(f"{len(content)}\n".encode() + content)
    return digest.hexdigest()[:16]


def _compile_apart(jobs: Sequence[Job]) -> list[dict[str, Any]]:
    # Triton's own cache goes elsewhere: it would hide what a change of the compiler's settings does.
    with tempfile.TemporaryDirectory() as cache:
        env = {**os.environ, "TRITON_CACHE_DIR": cache}
        env.pop("TRITON_INTERPRET", None)
        env["PYTHONPATH"] = os.pathsep.join([str(_TESTS), *filter(None, [env.get("PYTHONPATH")])])
        done = subprocess.run(
            [sys.executable, "-m", "support.kernels.triton_compile"],
            input=json.dumps(jobs),
            capture_output=True,
            text=True,
            check=False,
            cwd=_TESTS.parent,
            env=env,
        )
    assert done.returncode == 0, (
        f"the kernels could not be compiled:\n{done.stdout[-2000:]}{done.stderr[-6000:]}"
    )
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


# What follows runs in the compiling process.


def _compile_all(jobs: Sequence[Job]) -> list[dict[str, Any]]:
    # The compiler lets go of the interpreter's lock in its long parts, and the assembler is a process.
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda job: _compile(*job), jobs))


def _compile(variant: dict[str, Any], arch: int) -> dict[str, Any]:
    compiled = _compile_variant(variant, arch)
    return {
        "usage": {"shared_bytes": compiled.metadata.shared, **_read_usage(compiled.asm["ptx"], arch)},
        "products": _products_in_flight(compiled.asm["ttgir"]),
        "loads": loads_before_product(compiled.asm["ptx"]),
    }


def _compile_variant(variant: dict[str, Any], arch: int) -> Any:
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
    options = {name: variant[name] for name in ("num_warps", "num_stages", "maxnreg")}
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


def _products_in_flight(ttgir: str) -> tuple[int, int]:
    """Matrix products whose first operand is in registers, and those of them that the next operation does not wait
    for."""
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
    print(json.dumps(_compile_all(json.loads(sys.stdin.read()))))
