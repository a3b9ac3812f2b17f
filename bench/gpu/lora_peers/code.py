"""Machine code of LoRA kernels here and of a wheel's, for a GPU that is not there: registers, spills, loads.

Kernels are compiled just as they would be launched, with the same constants, types and alignments.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import triton

from bench.gpu.case import Row
from bench.gpu.lora import LLAMA_8B, Batch, LoraCase, distinct
from bench.gpu.lora_peers.cases import OURS
from bench.gpu.lora_peers.contenders import Contender, Matrices, ours, theirs
from bench.gpu.lora_peers.wheels import Wheel, imported
from bench.gpu.report import Column
from loraplex.kernels.lora import triton_lora
from support.kernels.lora_arena import make_arena
from support.machine_code import count

ARCH = 90
CELLS = ((64, 64, 16), (64, 64, 64), (2048, 1, 16))
"""(rows, adapters, rank)."""
REGISTERS, SHARED_BYTES, THREADS, PROGRAMS = 65536, 227 << 10, 2048, 32
"""Sizes of a multiprocessor of an H200."""
COLUMNS: list[Column] = [
    ("case", "case", "s"), ("kernels", "contender", "s"), ("kernel", "kernel", "s"), ("grid", "grid", "s"),
    ("registers", "registers", "d"), ("spills", "spills", "d"), ("programs/SM", "programs", "d"),
    ("LDG.128", "wide", "d"), ("of them at once", "at_once", "d"), ("LDGSTS.128", "copies", "d"),
    ("narrower loads", "narrow", "d"), ("barriers", "barriers", "d"), ("tensor cores", "products", "d"),
    ("instructions", "instructions", "d"),
]  # fmt: skip
_TYPES = {
    torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int32: "i32", torch.int64: "i64",
    torch.uint64: "u64",
}  # fmt: skip
_OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg", "launch_pdl")


@dataclass(frozen=True)
class Launch:
    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]


class _Recorder:
    """Stands for a kernel, and keeps how it is launched."""

    def __init__(self, kernel: Any, keep: Callable[[Launch], None]) -> None:
        self._kernel, self._keep = kernel, keep

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*values: Any, **named: Any) -> None:
            names = dict(zip(self._kernel.arg_names, values, strict=False))
            self._keep(Launch(self._kernel, grid, names | named))

        return launch


def rows(wheels: Sequence[Wheel], cells: Sequence[tuple[int, int, int]] = CELLS) -> Iterator[Row]:
    """A row for each kernel of each contender, for the widest group of Llama-3.1-8B. Raises WheelError."""
    (group,) = (group for group in LLAMA_8B if group.key == "gate_up")
    for num_rows, adapters, rank in cells:
        name = f"gate_up, {num_rows} rows of {adapters}, rank {rank}"
        case = LoraCase(name, (group,), (rank,) * adapters, distinct(num_rows, adapters), max_rank=rank)
        for contender, launches in _launches(case, wheels):
            for launch in launches:
                yield {"case": case.name, "contender": contender, **compiled(launch)}


def _launches(case: LoraCase, wheels: Sequence[Wheel]) -> Iterator[tuple[str, list[Launch]]]:
    """The launches of each contender. The wheel's modules stay imported until the caller has compiled that."""
    (group,) = case.groups
    x = torch.empty(case.num_rows, group.in_features, dtype=case.dtype)
    one = replace(case, ranks=case.ranks[:1], rows=case.rows[:1])  # the rest changes no code
    arena = make_arena(one.groups, 1, one.dtype, one.ranks, max_rank=one.max_rank)
    for name, tiling in OURS.items():
        contender = ours(
            name, Batch(replace(one, tiling=tiling), arena, x.device), group.key, x[: one.num_rows]
        )
        found = [_dependent(launch) for launch in _recorded(contender, [triton_lora], one)]
        yield name, [replace(launch, grid=()) for launch in found]
    slots, rank = len(case.ranks), case.ranks[0]
    matrices = Matrices(
        [[torch.empty(slots, rank, group.in_features, dtype=case.dtype) for _ in group.sites]],
        [[torch.empty(slots, width, rank, dtype=case.dtype) for width in group.out_features]],
    )
    for wheel in wheels:
        with imported(wheel) as modules:
            for contender in theirs(wheel, modules, case, matrices, x):
                yield contender.name, _recorded(contender, list(vars(modules).values()), case)


def _recorded(contender: Contender, modules: Sequence[ModuleType], case: LoraCase) -> list[Launch]:
    found: list[Launch] = []
    with _in_place_of_kernels(modules, found.append):
        contender.shrink(0)
        columns = sum(width for group in case.groups for width in group.out_features)
        contender.expand(0, torch.empty(case.num_rows, columns, dtype=case.dtype))
    return found


@contextmanager
def _in_place_of_kernels(modules: Sequence[ModuleType], keep: Callable[[Launch], None]) -> Iterator[None]:
    before = [
        (module, name, value)
        for module in modules
        for name, value in vars(module).items()
        if isinstance(value, triton.JITFunction)
    ]
    for module, name, kernel in before:
        setattr(module, name, _Recorder(kernel, keep))
    try:
        yield
    finally:
        for module, name, kernel in before:
            setattr(module, name, kernel)


def _dependent(launch: Launch) -> Launch:
    """The launch on Hopper, where B sides are launched while their A sides run."""
    return replace(launch, arguments=launch.arguments | {"DEPENDENT": True})


def compiled(launch: Launch) -> Row:
    """The kernel's machine code for ARCH, counted."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel, given = launch.kernel, launch.arguments
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int], list[list[object]]] = {}
    for at, parameter in enumerate(kernel.params):
        value = given.get(parameter.name, parameter.default)
        specialised = not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (specialised and type(value) is int and value == 1):
            signature[parameter.name] = "constexpr"
            constants[parameter.name] = value
            continue
        signature[parameter.name] = _type(value)
        whole = value.data_ptr() if isinstance(value, torch.Tensor) else value
        if specialised and isinstance(whole, int) and whole % 16 == 0:
            attributes[(at,)] = [["tt.divisibility", 16]]
    options = {name: given[name] for name in _OPTIONS if given.get(name) is not None}
    source = ASTSource(kernel, signature, constants, attributes)
    made = triton.compile(source, target=GPUTarget("cuda", ARCH, 32), options=options)
    threads = 32 * made.metadata.num_warps
    found = _counted(made.asm["cubin"])
    fitting = (
        REGISTERS // (threads * (-(-found["registers"] // 8) * 8)),
        SHARED_BYTES // (made.metadata.shared + 1024),
        THREADS // threads,
        PROGRAMS,
    )
    grid = f"{prod(launch.grid):,}" if launch.grid else "persistent"
    return {"kernel": kernel.fn.__name__.strip("_"), "grid": grid, "programs": min(fitting), **found}


def _type(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"*{_TYPES[value.dtype]}"
    if isinstance(value, float):
        return "fp32"
    return "i32" if abs(value) < 1 << 31 else "i64"


def _counted(cubin: bytes) -> dict[str, int]:
    from triton.backends import nvidia

    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder, "kernel.cubin")
        binary.write_bytes(cubin)
        tool = Path(nvidia.__path__[0]) / "bin" / "cuobjdump"
        used, sass = (
            subprocess.run([tool, option, binary], capture_output=True, text=True, check=True).stdout
            for option in ("-res-usage", "-sass")
        )
    registers = re.search(r"REG:(\d+)", used)
    assert registers is not None, used
    wide, copies = (len(re.findall(rf"\b{load}\.[A-Z0-9.]*128", sass)) for load in ("LDG", "LDGSTS"))
    code = count(sass)
    return {
        "registers": int(registers[1]),
        "spills": len(re.findall(r"\b(?:STL|LDL)\b", sass)),
        "wide": wide,
        "at_once": max(code.at_once, default=0),
        "copies": copies,
        "narrow": len(re.findall(r"\bLDG(?:STS)?\b", sass)) - wide - copies,
        "barriers": code.barriers,
        "products": len(re.findall(r"\b[HQ]G?MMA\b", sass)),
        "instructions": len(re.findall(r"/\*[0-9a-f]{4,}\*/ ", sass)),
    }
