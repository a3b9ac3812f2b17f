"""Batched LoRA on a GPU: right against float64, the same bits again and out of a graph, and how near its floor.

`run_case` gives a dict for one case. Without a GPU it runs interpreted, and gives no times.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from bench.gpu.timing import Ceilings, median_ms, relative_error
from loraplex.kernels.lora.site_groups import HEAD, SiteGroup
from loraplex.kernels.lora.triton_lora import LoraLauncher, TritonLora
from loraplex.kernels.lora.triton_tiling import LoraTiling
from loraplex.kernels.lora.types import Scratch, Segment
from support.kernels.lora_arena import ManualArena, make_arena

TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}
COLD_BYTES = 256 << 20
"""Layers take turns until this number of bytes has been read, several times what a cache holds."""
_MOST_LAYERS = 64
MAX_RECORDED_ROWS = 256

LLAMA_8B = (
    SiteGroup("qkv", ("q_proj", "k_proj", "v_proj"), 4096, (4096, 1024, 1024)),
    SiteGroup("o", ("o_proj",), 4096, (4096,)),
    SiteGroup("gate_up", ("gate_proj", "up_proj"), 4096, (14336, 14336)),
    SiteGroup("down", ("down_proj",), 14336, (4096,)),
)
QWEN_0_6B = (
    SiteGroup("qkv", ("q_proj", "k_proj", "v_proj"), 1024, (2048, 1024, 1024)),
    SiteGroup("o", ("o_proj",), 2048, (1024,)),
    SiteGroup("gate_up", ("gate_proj", "up_proj"), 1024, (3072, 3072)),
    SiteGroup("down", ("down_proj",), 3072, (1024,)),
)
LLAMA_8B_HEAD = (SiteGroup(HEAD, (f"{HEAD}.0", f"{HEAD}.1"), 4096, (65536, 62720)),)
SMALL = (
    SiteGroup("qkv", ("q_proj", "k_proj", "v_proj"), 48, (48, 16, 16)),
    SiteGroup("down", ("down_proj",), 75, (37,)),
)


@dataclass(frozen=True)
class LoraCase:
    """One batch: `rows` (slot, rows) in turn, slot -1 the base, over adapters of these `ranks`. `dora` are the slots
    with vectors. `tiling` None: the one that the engine would choose."""

    name: str
    groups: tuple[SiteGroup, ...]
    ranks: tuple[int, ...]
    rows: tuple[tuple[int, int], ...]
    dora: tuple[int, ...] = ()
    dtype: torch.dtype = torch.bfloat16
    max_rank: int = 64
    tiling: LoraTiling = field(default_factory=LoraTiling)
    reference: bool = True

    @property
    def num_rows(self) -> int:
        return sum(count for _, count in self.rows)

    @property
    def segments(self) -> list[Segment]:
        found, first = [], 0
        for slot, count in self.rows:
            found.append((slot, first, count))
            first += count
        return found


def distinct(rows: int, adapters: int) -> tuple[tuple[int, int], ...]:
    """Rows dealt out evenly, each adapter's side by side."""
    return tuple((slot, rows // adapters) for slot in range(adapters))


def small_cases() -> list[LoraCase]:
    """For the interpreter, and for a first look at a GPU."""
    tiling = LoraTiling(
        block_k=32, block_n=32, max_splits=2, large_rows=32, large_block_k=32, large_block_n=32,
        large_blocks_r=(16, 32), expand_rows=16,
    )  # fmt: skip
    of: dict[str, Any] = {"dtype": torch.float32, "tiling": tiling}
    return [
        LoraCase("small decode", SMALL, (8, 24, 40), ((0, 1), (1, 3), (-1, 1), (2, 6)), dora=(1,), **of),
        LoraCase("small mix", SMALL, (8, 24), ((0, 1), (1, 37)), **of),
    ]


def engine_cases(*, small: bool) -> list[LoraCase]:
    """Batches in the engine's own tilings, with sums by rows and by strips, and with A sides that begin early, on
    tensor cores and without: what tensor cores and the compiler for them can get wrong. bfloat16 in the shapes of
    Llama-3.1-8B; `small`: the same batches in tiny shapes and float16, as the interpreter multiplies no bfloat16."""
    groups, dtype = (SMALL, torch.float16) if small else (LLAMA_8B, torch.bfloat16)
    many, chunk = (3, 37) if small else (64, 464)
    ranks = tuple(8 << (slot % 4) for slot in range(8))
    mix = ((-1, 2), *distinct(many // 2, many // 2), (many // 2, chunk))
    few = tuple((slot, rows) for slot, rows in enumerate((1, 2, 3, 5, 2, 4, 1, 3)))
    tilings = (
        ("engine's tiling", LoraTiling()),
        ("by rows and by strips", LoraTiling(row_programs=12, row_block_k=1024, strip_stages=3)),
        ("A sides early", LoraTiling(row_programs=12, early=True)),
        ("A sides early by rows", LoraTiling(row_programs=12, row_block_k=1024, early=True)),
    )
    return [
        LoraCase(f"{words}, {name}", groups, case_ranks, rows, dora=dora, dtype=dtype, tiling=tiling)
        for words, tiling in tilings
        for name, case_ranks, rows, dora in (
            ("a row an adapter", (16,) * many, distinct(many, many), ()),
            ("several rows an adapter, ranks 8 … 64", ranks, distinct(8 * many, 8), ()),
            ("prompts of rank 64 and 16", (64, 16), ((0, chunk), (1, chunk)), ()),
            ("decoding, base and a chunk, DoRA", (16,) * (many // 2 + 1), mix, (0, many // 2)),
            ("one to five rows an adapter, ranks 8 … 64, DoRA", ranks, (*few, (-1, 2)), (1, 2, 4, 7)),
        )
    ]


def full_cases() -> list[LoraCase]:
    """In order of importance."""
    found = []
    for rows, adapters, rank in (
        (64, 8, 16), (64, 64, 16), (64, 1, 16), (256, 256, 16), (256, 8, 16), (16, 16, 16), (1, 1, 16),
        (64, 64, 8), (64, 64, 64), (64, 8, 64), (256, 64, 64),
    ):  # fmt: skip
        name = f"8B decode, {rows} rows of {adapters} adapters, rank {rank}"
        found.append(LoraCase(name, LLAMA_8B, (rank,) * adapters, distinct(rows, adapters)))
    mixed = tuple(8 << (slot % 4) for slot in range(64))
    found += [
        LoraCase("8B decode, 64 rows, ranks 8 … 64", LLAMA_8B, mixed, distinct(64, 64)),
        LoraCase("8B decode, half base", LLAMA_8B, (16,) * 32, ((-1, 32), *distinct(32, 32))),
        LoraCase("8B decode, zipf", LLAMA_8B, (16,) * 16, _zipf(64, 16)),
        LoraCase("8B decode, DoRA", LLAMA_8B, (16,) * 64, distinct(64, 64), dora=tuple(range(64))),
        LoraCase("8B head, 64 rows of 64", LLAMA_8B_HEAD, (16,) * 64, distinct(64, 64)),
        LoraCase("8B prompt of 2,048", LLAMA_8B, (16,), ((0, 2048),)),
        LoraCase("8B prompt of 512, rank 64", LLAMA_8B, (64,), ((0, 512),)),
        LoraCase("8B prompts of 8 × 1,024", LLAMA_8B, (16,) * 8, distinct(8192, 8), reference=False),
        LoraCase("8B mix", LLAMA_8B, (16,) * 49, (*distinct(48, 48), (48, 464))),
        LoraCase("0.6B decode, 64 rows of 64", QWEN_0_6B, (16,) * 64, distinct(64, 64)),
        LoraCase(
            "8B decode, 64 rows of 64, fp16", LLAMA_8B, (16,) * 64, distinct(64, 64), dtype=torch.float16
        ),
        LoraCase("8B decode, rank 256", LLAMA_8B, (256,) * 8, distinct(64, 8), max_rank=256),
    ]
    for changed in (
        {"row_programs": 8},
        {"row_programs": 12},
        {"row_programs": 16},
        {"row_block_k": 1024},
        {"early": True},
        {"row_programs": 12, "row_block_k": 1024, "early": True},
        {"block_k": 512, "max_splits": 8},
        {"block_k": 128, "max_splits": 32},
        {"block_n": 128},
        {"block_n": 512},
        {"small_warps": 8},
        {"shrink_programs": 2, "expand_programs": 2},
        {"shrink_programs": 6},
    ):
        tiling = replace(LoraTiling(), **changed)
        words = ", ".join(f"{name} {value}" for name, value in changed.items())
        for adapters in (8, 64):
            name = f"8B decode, 64 rows of {adapters}: {words}"
            found.append(LoraCase(name, LLAMA_8B, (16,) * adapters, distinct(64, adapters), tiling=tiling))
    for changed in (
        {"large_block_k": 128, "large_stages": 3},
        {"large_rows": 128, "large_warps": 8},
        {"expand_rows": 16},
        {"strip_stages": 3},
        {"strip_stages": 2},
        {"strip_stages": 1},
        {"strip_stages": 3, "large_block_n": 64},
        {"strip_stages": 2, "large_block_n": 64, "expand_programs": 4},
    ):
        words = ", ".join(f"{name} {value}" for name, value in changed.items())
        tiling = replace(LoraTiling(), **changed)
        found.append(LoraCase(f"8B prompt of 2,048: {words}", LLAMA_8B, (16,), ((0, 2048),), tiling=tiling))
        if "strip_stages" in changed:
            name = f"8B prompt of 512, rank 64: {words}"
            found.append(LoraCase(name, LLAMA_8B, (64,), ((0, 512),), tiling=tiling))
    return found


def run_case(
    case: LoraCase, device: torch.device, ceilings: Ceilings | None = None, *, recorded: bool = True
) -> dict[str, Any]:
    """`ok` says whether all that was compared is right; `error` is the largest difference from float64 as a part of
    the largest number, over all groups of the first and the last layer; `recorded`: out of a CUDA graph too.

    With `ceilings` it is timed, a layer's groups together: `graph_ms` in a CUDA graph, `shrink_ms` and `expand_ms` of
    its two sides, `floor_ms` what the bytes and flops need, `torch_ms` that of a loop over the adapters in torch.
    `plan_us`: of the host, a step."""
    *sides, flops = work(case)
    num_bytes = sum(sides)
    layers = cold_layers(case) if ceilings is not None and device.type == "cuda" else 2
    arena = make_arena(
        case.groups, layers, case.dtype, case.ranks, max_rank=case.max_rank, dora=case.dora, device=device
    )
    batch = Batch(case, arena, device)
    result = {"case": case.name, "dtype": str(case.dtype).removeprefix("torch.")}
    result |= _compare(batch, layers, recorded=recorded)
    if ceilings is None:
        return result
    floor = ceilings.floor_ms(num_bytes, flops)
    result |= {"bytes": num_bytes, "flops": flops, "floor_ms": floor, "list_bytes": 4 * batch.step.size}
    launcher, tensors = batch.launcher, batch.tensors(0)

    def whole() -> None:
        for layer in range(layers):
            for group, (x, y) in tensors.items():
                launcher.apply(layer, group, x, y)

    def shrinks() -> None:
        for layer in range(layers):
            for group, (x, _) in tensors.items():
                launcher.shrink(layer, group, x)

    def expands() -> None:
        for layer in range(layers):
            for group, (_, y) in tensors.items():
                launcher.expand(layer, group, y)

    for name, run in (("graph_ms", whole), ("shrink_ms", shrinks), ("expand_ms", expands)):
        ms = median_ms(run, device, runs=2)
        result[name] = None if ms is None else ms / layers
    if result["graph_ms"] is not None:
        result["times_floor"] = result["graph_ms"] / floor
        result["torch_ms"] = _torch_ms(batch)
        result["plan_us"] = batch.plan_us()
    return result


def cold_layers(case: LoraCase) -> int:
    """The layers that take turns where a case is timed: enough for either side alone to read COLD_BYTES, and at most
    _MOST_LAYERS."""
    return min(_MOST_LAYERS, max(2, -(-COLD_BYTES // min(work(case)[:2]))))


def work(case: LoraCase) -> tuple[int, int, int]:
    """Bytes of the A sides, bytes of the B sides, and flops of a layer that nothing can save: the tiles of every
    adapter of the batch once, x once, and y read and written, of the rows that have adapters."""
    used = sum(case.ranks[slot] for slot in {slot for slot, _ in case.rows if slot >= 0})
    rows = sum(count for slot, count in case.rows if slot >= 0)
    ranks = sum(count * case.ranks[slot] for slot, count in case.rows if slot >= 0)
    a_side = b_side = products = 0
    for group in case.groups:
        inputs = group.in_features * (1 if group.key == HEAD else len(group.sites))
        outputs = sum(group.out_features)
        a_side += used * inputs + rows * group.in_features
        b_side += (used + 2 * rows) * outputs
        products += ranks * (inputs + outputs)
    size = case.dtype.itemsize
    return a_side * size, b_side * size, 2 * products


class Batch:
    """A case on a device: its arena, and its list in a buffer."""

    def __init__(self, case: LoraCase, arena: ManualArena, device: torch.device) -> None:
        self.case, self.arena, self.device = case, arena, device
        self.scratch = Scratch(device)
        self.lora = TritonLora(
            arena.weights,
            self.scratch,
            max_rows=case.num_rows,
            max_segments=len(case.rows),
            tiling=case.tiling,
            programs=None if device.type == "cuda" else 5,
        )
        for slot in range(len(case.ranks)):
            self.lora.write(slot)
        self.host = np.zeros(self.lora.work_size, np.int32)
        self.buffer = torch.zeros(self.lora.work_size, dtype=torch.int32, device=device)
        self.recorded = torch.zeros_like(self.buffer)
        self.step = self.lora.plan(case.segments, case.num_rows, self.host)
        self.buffer.copy_(torch.from_numpy(self.host))
        self.launcher: LoraLauncher = self.lora.launcher(
            self.buffer, self.step, sorted({slot for slot, _ in case.rows if slot >= 0})
        )

    def tensors(self, seed: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        generator = torch.Generator(device=self.device).manual_seed(seed)

        def draw(columns: int) -> torch.Tensor:
            shape = (self.case.num_rows, columns)
            return torch.randn(shape, generator=generator, device=self.device).to(self.case.dtype)

        return {
            group.key: (draw(group.in_features), draw(sum(group.out_features))) for group in self.case.groups
        }

    def poison(self) -> None:
        """Hidden values of the launch before must not be taken for those of the next."""
        self.scratch.buffer("lora hidden", (self.lora.hidden_size,), torch.float32).fill_(float("nan"))

    def replay(self, layer: int, group: str, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The same by launches recorded while the list was empty. Without a GPU, those launches themselves."""
        launcher = self.lora.recorded(self.recorded, self.case.num_rows)
        static = y.clone()
        graph = None
        self.recorded.zero_()
        if self.device.type == "cuda":
            launcher.apply(layer, group, x, static)
            torch.cuda.synchronize(self.device)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                launcher.apply(layer, group, x, static)
        self.lora.plan(self.case.segments, self.case.num_rows, self.host, fixed=True)
        self.recorded.copy_(torch.from_numpy(self.host))
        static.copy_(y)
        if graph is None:
            launcher.apply(layer, group, x, static)
        else:
            graph.replay()
        return static

    def plan_us(self) -> float:
        times = []
        for _ in range(50):
            start = time.perf_counter()
            self.lora.plan(self.case.segments, self.case.num_rows, self.host)
            times.append(time.perf_counter() - start)
        return statistics.median(times) * 1e6


def _compare(batch: Batch, layers: int, *, recorded: bool) -> dict[str, Any]:
    case, error, same_again, graph_error = batch.case, 0.0, True, 0.0
    recorded = recorded and case.num_rows <= MAX_RECORDED_ROWS
    for layer in {0, layers - 1}:
        tensors = batch.tensors(layer)
        for group in case.groups:
            x, y = tensors[group.key]
            got, again = y.clone(), y.clone()
            batch.poison()
            batch.launcher.apply(layer, group.key, x, got)
            batch.poison()
            batch.launcher.apply(layer, group.key, x, again)
            same_again &= torch.equal(got, again)
            want = batch.arena.expected(layer, group, case.segments, x, y) if case.reference else got
            error = max(error, relative_error(got, want))
            if layer == 0 and recorded:
                graph_error = max(graph_error, relative_error(batch.replay(layer, group.key, x, y), want))
    tolerance = TOLERANCE[case.dtype]
    return {
        "error": error if case.reference else None,
        "graph_error": graph_error if recorded else None,
        "same_again": same_again,
        "ok": same_again and error <= tolerance and graph_error <= tolerance,
    }


def _torch_ms(batch: Batch) -> float | None:
    """Milliseconds of a loop over the adapters of one layer, by a library's products, recorded as all else is."""
    case = batch.case
    matrices: list[tuple[str, slice, slice, torch.Tensor, torch.Tensor]] = []
    for slot, first, count in case.segments:
        for group in case.groups:
            begin = 0
            for site, width in zip(group.sites, group.out_features, strict=True):
                found = batch.arena.site(slot, 0, site, group.in_features, width) if slot >= 0 else None
                if found is not None:
                    a, b = (matrix.to(case.dtype) for matrix in found[:2])
                    columns = slice(begin, begin + width)
                    matrices.append((group.key, slice(first, first + count), columns, a.T.contiguous(), b))
                begin += width
    tensors = batch.tensors(0)

    def loop() -> None:
        for group, rows, columns, a, b in matrices:
            x, y = tensors[group]
            y[rows, columns].addmm_(x[rows] @ a, b)

    return median_ms(loop, batch.device, runs=2)


def _zipf(rows: int, adapters: int) -> Sequence[tuple[int, int]]:
    weights = 1 / np.arange(1, adapters + 1)
    counts = np.random.default_rng(5).multinomial(rows, weights / weights.sum())
    return tuple((slot, int(count)) for slot, count in enumerate(counts) if count)
