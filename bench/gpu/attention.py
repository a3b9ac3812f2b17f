"""Paged attention on a GPU: right against float64, the same bits again and out of a graph, and how near its floor.

`run_case` gives a dict for one case. Without a GPU it runs interpreted, and gives no times.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from bench.gpu.stopwatch import Stopwatch
from bench.gpu.timing import Ceilings, eager_ms, median_ms, relative_error
from loraplex.kernels.attention import torch_attention as attention
from loraplex.kernels.attention import triton_attention
from loraplex.kernels.attention.kernel import AttentionKernel, AttentionNeeds
from loraplex.kernels.attention.triton_plan import AttentionCapacity, AttentionPlan
from loraplex.kernels.attention.triton_tiling import AttentionShape, Tiling, Tilings, choose_tilings
from loraplex.kernels.backend import make_kernels
from support.kernels.paged import PagedStep, expected_attention, paged_step

TOLERANCE = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
BLOCK_SIZE = 16
"""What may compute prompts beside Triton here: the values of `--attention`."""


@dataclass(frozen=True)
class AttentionCase:
    """`tilings` None: those that the engine would choose. `reference` False where float64 would need too much
    memory."""

    name: str
    heads: int
    kv_heads: int
    head_dim: int
    num_rows: tuple[int, ...]
    seq_lens: tuple[int, ...]
    window: int | None = None
    softcap: float | None = None
    dtype: torch.dtype = torch.bfloat16
    tilings: Tilings | None = None
    reference: bool = True


def small_cases() -> list[AttentionCase]:
    """For the interpreter, and for a first look at a GPU."""
    tilings = Tilings(Tiling(16, 16, 4, 2, 32), Tiling(32, 16, 4, 2, 32))
    of: dict[str, Any] = {"dtype": torch.float32, "tilings": tilings}
    return [
        AttentionCase("small decode", 4, 2, 16, (1, 1, 1), (1, 17, 90), **of),
        AttentionCase("small mix", 4, 2, 16, (1, 6, 1), (40, 20, 3), window=9, softcap=5.0, **of),
    ]


def engine_cases(*, small: bool) -> list[AttentionCase]:
    """In the engine's own tilings: bfloat16 in the shapes of Llama-3.1-8B and Gemma 2; `small`: the same steps in tiny
    shapes and float16, as the interpreter multiplies no bfloat16."""
    dtype, chunk, past = (torch.float16, 37, 61) if small else (torch.bfloat16, 464, 8192)
    llama, gemma = ((8, 2, 32), (4, 2, 144)) if small else ((32, 8, 128), (8, 4, 256))
    many = 3 if small else 48
    decoding = tuple(1 + past * number // many for number in range(many))
    return [
        AttentionCase("engine's tiling, decode", *llama, (1,) * many, decoding, dtype=dtype),
        AttentionCase("engine's tiling, prompt", *llama, (chunk,), (chunk,), dtype=dtype),
        AttentionCase(
            "engine's tiling, decode and a chunk with a past",
            *llama,
            (*(1,) * many, chunk),
            (*decoding, past + chunk),
            dtype=dtype,
        ),
        AttentionCase(
            "engine's tiling, large heads, window, softcap",
            *gemma,
            (1, chunk),
            (past, past + chunk),
            window=past // 2,
            softcap=50.0,
            dtype=dtype,
        ),
    ]


def full_cases() -> list[AttentionCase]:
    """In order of importance."""
    llama, gemma = (32, 8, 128), (8, 4, 256)
    found = [AttentionCase(f"8B decode {n} × 1,024", *llama, (1,) * n, (1024,) * n) for n in (64, 256, 16, 1)]
    found += [
        AttentionCase("8B decode, 1 … 4,096", *llama, (1,) * 64, tuple(range(64, 4097, 64))),
        AttentionCase("8B decode 4 × 32,768", *llama, (1,) * 4, (32768,) * 4),
        AttentionCase("8B decode 1 × 131,072", *llama, (1,), (131072,)),
        AttentionCase("8B prefill 2,048", *llama, (2048,), (2048,)),
        AttentionCase("8B chunk 512 after 8,192", *llama, (512,), (8704,)),
        AttentionCase("8B chunk 32 after 16,384", *llama, (32,), (16416,)),
        AttentionCase("8B mix", *llama, (1,) * 48 + (464,), (1024,) * 48 + (1488,)),
        AttentionCase("8B prefill 8,192", *llama, (8192,), (8192,), reference=False),
        AttentionCase("0.6B decode 64 × 1,024", 16, 8, 128, (1,) * 64, (1024,) * 64),
        AttentionCase("0.5B decode 64 × 1,024", 14, 2, 64, (1,) * 64, (1024,) * 64),
        AttentionCase("Gemma decode", *gemma, (1,) * 32, (6000,) * 32, window=4096, softcap=50.0),
        AttentionCase("Gemma chunk", *gemma, (512,), (6000,), window=4096, softcap=50.0),
        AttentionCase("Phi-3 mix", 32, 32, 96, (1,) * 16 + (256,), (800,) * 16 + (300,), window=512),
        AttentionCase("8B decode 64 × 1,024, fp16", *llama, (1,) * 64, (1024,) * 64, dtype=torch.float16),
    ]
    for tiling in (
        Tiling(128, 64, num_warps=8, num_stages=1, min_split=512),
        Tiling(64, 32, num_warps=4, num_stages=1, min_split=512),
        Tiling(32, 64, num_warps=4, num_stages=3, min_split=512),
    ):
        decode = choose_tilings(AttentionShape(*llama, BLOCK_SIZE), 2, (9, 0)).decode
        name = f"8B prefill 2,048 in {tiling.block_m} × {tiling.block_n} × {tiling.num_stages}"
        found.append(AttentionCase(name, *llama, (2048,), (2048,), tilings=Tilings(decode, tiling)))
    for block_n, warps, stages in ((64, 4, 5), (128, 4, 3), (64, 2, 3), (32, 4, 4)):
        tilings = choose_tilings(AttentionShape(*llama, BLOCK_SIZE), 2, (9, 0))
        decode = Tiling(16, block_n, num_warps=warps, num_stages=stages, min_split=256)
        name = f"8B decode 64 × 1,024 in {block_n} × {warps} warps × {stages}"
        found.append(
            AttentionCase(name, *llama, (1,) * 64, (1024,) * 64, tilings=Tilings(decode, tilings.prefill))
        )
    return found


def torch_cases(*, small: bool) -> list[AttentionCase]:
    """Cases of `engine_cases` that torch's attention can compute."""
    return [case for case in engine_cases(small=small) if case.window is None and case.softcap is None]


def prefill_cases(*, small: bool) -> list[AttentionCase]:
    """Prompts of Llama-3.1-8B, and a chunk with a past."""
    llama = (8, 2, 32) if small else (32, 8, 128)
    steps = [(37, 37), (37, 98)] if small else [(2048, 2048), (8192, 8192), (32768, 32768), (2048, 32768)]
    dtype = torch.float16 if small else torch.bfloat16
    return [
        AttentionCase(f"{rows:,} of {length:,}", *llama, (rows,), (length,), dtype=dtype)
        for rows, length in steps
    ]


def run_case(
    case: AttentionCase, device: torch.device, ceilings: Ceilings | None = None, *, recorded: bool = True
) -> dict[str, Any]:
    """`ok` says whether all that was compared is right; `error` is the largest difference from float64 as a part of
    the largest number; `recorded`: out of a CUDA graph too.

    With `ceilings` one layer is timed: `graph_ms` in a CUDA graph, `floor_ms` what the bytes and flops need,
    `torch_ms` that of the reference in torch."""
    step = make_step(case, device)
    options = attention_options(case)
    plan = make_plan(case, device)
    scratch = triton_attention.AttentionScratch.allocate(plan, device)
    batch = triton_attention.build_attention_batch(plan, scratch, case.num_rows, case.seq_lens, step.tables)
    got = triton_attention.paged_attention(step.q, step.cache, batch, **options)
    scratch.part.fill_(float("nan"))
    scratch.lse.fill_(float("nan"))
    again = triton_attention.paged_attention(step.q, step.cache, batch, **options)
    replayed = _replayed(case, step, plan, scratch, options) if recorded else got
    error = relative_error(got, expected_attention(step, **options)) if case.reference else None
    same_again, same_in_graph = torch.equal(got, again), torch.equal(got, replayed)
    result: dict[str, Any] = {
        "case": case.name,
        "dtype": str(case.dtype).removeprefix("torch."),
        "error": error,
        "same_again": same_again,
        "same_in_graph": same_in_graph,
        "ok": same_again and same_in_graph and (error is None or error <= TOLERANCE[case.dtype]),
    }
    num_bytes, flops = work(case)
    if ceilings is None:
        return result
    floor = ceilings.floor_ms(num_bytes, flops)
    ms = median_ms(lambda: triton_attention.paged_attention(step.q, step.cache, batch, **options), device)
    result |= {"bytes": num_bytes, "flops": flops, "floor_ms": floor, "graph_ms": ms}
    if ms is not None:
        result["times_floor"] = ms / floor
        result["torch_ms"] = _torch_ms(step, options, device)
    return result


def run_torch(case: AttentionCase, device: torch.device) -> dict[str, Any]:
    """Torch's attention against float64, by way of the engine's seam."""
    step = make_step(case, device)
    kernel = _kernel("torch", case, device)
    batch = kernel.lay_out(step.num_rows, step.seq_lens, step.tables)
    options = attention_options(case)
    error = relative_error(
        kernel.run(step.q, step.cache, batch, **options), expected_attention(step, **options)
    )
    return {
        "case": f"torch: {case.name}",
        "dtype": str(case.dtype).removeprefix("torch."),
        "error": error,
        "ok": error <= TOLERANCE[case.dtype],
    }


def compare_prefill(
    case: AttentionCase, device: torch.device, ceilings: Ceilings, watch: Stopwatch
) -> dict[str, Any]:
    """One layer's attention by Triton (a) and by torch (b), queued as a step without a recording is, in turns.
    `error`: of b's answer, from a's."""
    step = make_step(case, device)
    runs, answers = [], []
    for name in ("triton", "torch"):
        kernel = _kernel(name, case, device)
        batch = kernel.lay_out(step.num_rows, step.seq_lens, step.tables)
        runs.append(partial(kernel.run, step.q, step.cache, batch, **attention_options(case)))
        answers.append(runs[-1]())
    error = relative_error(answers[1], answers[0])
    a_ms, b_ms = watch.interleaved_ms(runs)
    num_bytes, flops = work(case)
    return {
        "case": case.name,
        "a": "triton",
        "b": "torch",
        "floor_ms": ceilings.floor_ms(num_bytes, flops),
        "a_ms": a_ms,
        "b_ms": b_ms,
        "a_to_b": a_ms / b_ms,
        "a_tflop_per_s": flops / a_ms / 1e9,
        "b_tflop_per_s": flops / b_ms / 1e9,
        "error": error,
        "ok": error <= 2 * TOLERANCE[case.dtype],
    }


def make_step(case: AttentionCase, device: torch.device) -> PagedStep:
    return paged_step(
        case.num_rows,
        case.seq_lens,
        heads=case.heads,
        kv_heads=case.kv_heads,
        head_dim=case.head_dim,
        block_size=BLOCK_SIZE,
        dtype=case.dtype,
        device=device,
        window=case.window,
    )


def _kernel(choice: str, case: AttentionCase, device: torch.device) -> AttentionKernel:
    shape = AttentionShape(case.heads, case.kv_heads, case.head_dim, BLOCK_SIZE)
    needs = AttentionNeeds(shape, (case.window,), case.softcap is not None)
    return make_kernels("triton", device).choose_attention(choice, needs, case.dtype).kernel


def attention_options(case: AttentionCase) -> dict[str, Any]:
    return {"scale": case.head_dim**-0.5, "window": case.window, "softcap": case.softcap}


def make_plan(case: AttentionCase, device: torch.device) -> AttentionPlan:
    """A plan for just this step."""
    shape = AttentionShape(case.heads, case.kv_heads, case.head_dim, BLOCK_SIZE)
    capacity = AttentionCapacity(
        num_rows=sum(case.num_rows),
        num_sequences=len(case.num_rows),
        num_blocks=sum(-(-length // BLOCK_SIZE) for length in case.seq_lens),
        max_rows_per_sequence=max(case.num_rows),
    )
    programs = 8
    capability = (9, 0)
    if device.type == "cuda":
        programs = 2 * torch.cuda.get_device_properties(device).multi_processor_count
        capability = torch.cuda.get_device_capability(device)
    tilings = case.tilings or choose_tilings(shape, case.dtype.itemsize, capability)
    return AttentionPlan(shape, capacity, tilings, num_programs=programs, windows=(case.window,))


def work(case: AttentionCase) -> tuple[int, int]:
    """Bytes and flops that nothing can save: every K and V that a sequence's rows see once, queries and answers; two
    products for what each row sees."""
    positions = pairs = 0
    for count, length in zip(case.num_rows, case.seq_lens, strict=True):
        first = length - count
        positions += length if case.window is None else min(length, count + case.window - 1)
        seen = np.arange(first + 1, length + 1)
        pairs += int(seen.sum() if case.window is None else np.minimum(seen, case.window).sum())
    elements = 2 * positions * case.kv_heads + 2 * sum(case.num_rows) * case.heads
    return elements * case.head_dim * case.dtype.itemsize, 4 * pairs * case.heads * case.head_dim


def _replayed(
    case: AttentionCase,
    step: PagedStep,
    plan: AttentionPlan,
    scratch: triton_attention.AttentionScratch,
    options: dict[str, Any],
) -> torch.Tensor:
    """The answer of launches recorded while the list of work was empty."""
    device = step.q.device
    host = np.full(plan.num_ints, 1 << 30, dtype=np.int32)
    array = torch.from_numpy(host).to(device)
    run = _recorded(step, triton_attention.graph_batch(plan, array, scratch), options, device)
    written = plan.write(host, case.num_rows, case.seq_lens, step.tables)
    array[: written.num_ints].copy_(torch.from_numpy(host[: written.num_ints]))
    replayed: torch.Tensor = run()
    return replayed


def _recorded(
    step: PagedStep,
    batch: triton_attention.TritonAttentionBatch,
    options: dict[str, Any],
    device: torch.device,
) -> Any:
    """What replays one launch, recorded while the array says that there is nothing to do. Without a GPU, the launch
    itself, with the grids of the capacity."""

    def launch() -> torch.Tensor:
        return triton_attention.paged_attention(step.q, step.cache, batch, **options)

    if device.type != "cuda":
        return launch
    batch.array.zero_()
    launch()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = launch()

    def replay() -> torch.Tensor:
        out.fill_(float("nan"))
        graph.replay()
        return out

    return replay


def _torch_ms(step: PagedStep, options: dict[str, Any], device: torch.device) -> float | None:
    # Its gathers read every position of a block: there must be numbers.
    cache = step.cache.nan_to_num()
    batch = attention.build_attention_batch(
        step.num_rows,
        step.seq_lens,
        step.tables,
        block_size=BLOCK_SIZE,
        max_gather_blocks=1 << 16,
        device=device,
    )
    return eager_ms(lambda: attention.paged_attention(step.q, cache, batch, **options), device)
