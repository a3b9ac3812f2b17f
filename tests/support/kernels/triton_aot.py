"""Compiles Triton kernels for GPUs that are not there, and tells what each takes of one.

A test lists its `Variant`s and calls `check`, which compares what the compiler says with what a committed file
recorded. support.kernels.triton_compile compiles in a process of its own: this one may have imported Triton to
interpret kernels, and no kernel can be both. To record again, after an intended change:

    RECORD_AOT=1 python -m pytest tests/kernels/*/test_*_aot.py
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from support.kernels.triton_compile import compile_or_read

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
    are, in the launches meant here. `archs`: those that it is launched on. `maxnreg`: the most registers of a thread.
    """

    name: str
    kernel: str
    signature: Mapping[str, str]
    constants: Mapping[str, Constant] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 3
    maxnreg: int | None = None
    unaligned: tuple[str, ...] = ()
    multiples_of_16: tuple[str, ...] = ()
    archs: tuple[int, ...] = ARCHS


@dataclass(frozen=True)
class Usage:
    """Registers a thread, shared memory a block, and bytes that registers spill to memory (stores and loads), and
    those of the stack. `tensor_cores` counts the matrix instructions of the machine code, `wide_loads` the loads of 16
    bytes a thread from global memory."""

    registers: int
    shared_bytes: int
    spill_bytes: int
    stack_bytes: int
    tensor_cores: int
    wide_loads: int


Report = dict[str, dict[str, Usage]]
"""By the variant's name, then by "sm_80" and the like."""


def compile_variants(variants: Sequence[Variant], archs: Sequence[int] = ARCHS) -> tuple[str, Report]:
    """Triton's version and what each variant takes. Raises AssertionError with the compiler's words where one can't
    be compiled."""
    jobs = [(variant, arch) for variant in variants for arch in archs if arch in variant.archs]
    found = compile_or_read([(asdict(variant), arch) for variant, arch in jobs])
    report: Report = {}
    for (variant, arch), one in zip(jobs, found, strict=True):
        report.setdefault(variant.name, {})[f"sm_{arch}"] = Usage(**one["usage"])
    return version("triton"), report


def products_in_flight(*variants: Variant) -> list[tuple[int, int]]:
    """For each variant on sm_90, how many of its WGMMAs take their first operand from registers, and how many of those
    the next operation does not wait for: the ptxas 12.8 in Triton 3.6 and 3.7 may overwrite such an operand too early
    (triton #9433)."""
    found = compile_or_read([(asdict(variant), 90) for variant in variants])
    return [(in_registers, in_flight) for in_registers, in_flight in (one["products"] for one in found)]


def loads_before_product(variant: Variant) -> int:
    """On sm_90: see support.kernels.triton_loads."""
    (found,) = compile_or_read([(asdict(variant), 90)])
    return int(found["loads"])


def check(
    variants: Sequence[Variant],
    recorded: Path,
    *,
    compiled: Sequence[Variant] | None = None,
    slack: float = 0.15,
) -> Report:
    """Compile `compiled`, which is all of `variants` unless given, and compare it with a committed record, which is of
    all. Nothing may spill unless the record says so, and then no more than that; what fits no block of an architecture
    fails, and so does a kernel that no longer uses the tensor cores, or wide loads, or begins to; with the recorded
    version of Triton registers and shared memory may not grow by more than `slack`. With RECORD_AOT set, compile all
    and write the record instead.
    """
    names = {variant.name for variant in variants}
    assert len(names) == len(variants)
    records = bool(os.environ.get("RECORD_AOT"))
    triton, report = compile_variants(variants if records or compiled is None else compiled)
    if records:
        lines = [f"    {json.dumps(name)}: {_one_line(report[name])}" for name in report]
        recorded.write_text(
            f'{{\n  "triton": {json.dumps(triton)},\n  "kernels": {{\n' + ",\n".join(lines) + "\n  }\n}\n"
        )
    record = json.loads(recorded.read_text())
    known = record["kernels"]
    assert set(known) == names, (
        f"{recorded.name} records other kernels than there are: record them again with RECORD_AOT=1"
    )
    faults = []
    for name, by_arch in report.items():
        for arch, usage in by_arch.items():
            before = Usage(**known[name][arch])
            faults += [f"{name} on {arch}: {fault}" for fault in _faults(arch, usage, before, slack)]
            if triton == record["triton"]:
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


_TYPES = {
    "bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "int8": "i8", "int32": "i32", "int64": "i64",
}  # fmt: skip


def launched_variant(
    name: str, kernel: str, arguments: Mapping[str, Any], *, unspecialised: Sequence[str] = ()
) -> Variant:
    """Of a launch that a `Recorder` kept; constants are named in capitals. `unspecialised`: integers that the kernel is
    not compiled apart for."""
    options = {"num_warps": 4, "num_stages": 3, "maxnreg": None, "launch_pdl": False}
    constants = {key: value for key, value in arguments.items() if key.isupper() and key != "K"}
    rest = {key: value for key, value in arguments.items() if key not in constants and key not in options}

    def type_of(value: Any) -> str:
        if hasattr(value, "dtype"):
            return f"*{_TYPES[str(value.dtype).removeprefix('torch.')]}"
        return "fp32" if isinstance(value, float) else "i32"

    return Variant(
        name,
        kernel,
        {key: type_of(value) for key, value in rest.items()},
        constants,
        num_warps=arguments.get("num_warps", options["num_warps"]),
        num_stages=arguments.get("num_stages", options["num_stages"]),
        maxnreg=arguments.get("maxnreg", options["maxnreg"]),
        multiples_of_16=tuple(
            key
            for key, value in rest.items()
            if isinstance(value, int) and value % 16 == 0 and key not in unspecialised
        ),
    )


class Recorder:
    """Stands for a kernel, and keeps what it is launched with."""

    def __init__(self, kernel: Any, keep: Callable[[dict[str, Any]], None]) -> None:
        self._names = kernel.arg_names
        self._keep = keep

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **options: Any) -> None:
            self._keep(dict(zip(self._names, args, strict=False)) | options)

        return launch
