"""Steps recorded once and replayed: on a GPU as CUDA graphs, which take one launch instead of hundreds.

A recorded pass reads everything that differs between steps from fixed places in memory (`packed_inputs`), so that it
serves any sequences and any adapters. There is one for each of a few numbers of rows, with adapters and without; a step
with fewer rows has rows of padding, which write nothing that anybody reads. Steps of decoding rows alone have
recordings of their own; those of steps with prompt chunks are also told which rows' logits are wanted (ADR 0016).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from loraplex.adapters.device.arena import AdapterArena
from loraplex.engine.config import MAX_RECORDED_ROWS
from loraplex.engine.execution.inputs import RecordedSize, Recorder, StepLimits
from loraplex.engine.execution.packed_inputs import PackedSource, Replay
from loraplex.engine.kv.cache import KVCache
from loraplex.engine.model.base import ForwardBatch, Model
from loraplex.kernels.attention.kernel import AttentionKernel, RecordableAttention
from loraplex.kernels.lora.triton_tiling import INVARIANT_TILING, LoraTiling

_SIZES = (1, 2, 4, 8, *range(16, 256, 16), *range(256, 513, 64))
_PROMPT_SIZES = (*range(64, 512, 64), *range(512, MAX_RECORDED_ROWS + 1, 128))


def graph_sizes(max_sequences: int) -> tuple[int, ...]:
    """Numbers of rows that decoding is captured for, if `max_sequences` sequences are served at a time."""
    sizes = [size for size in _SIZES if size < max_sequences]
    return (*sizes, max_sequences) if max_sequences <= _SIZES[-1] else tuple(sizes)


def prompt_graph_sizes(most_rows: int) -> tuple[int, ...]:
    """Numbers of rows that steps with prompt chunks are captured for, up to `most_rows`; 0: none."""
    return (*(size for size in _PROMPT_SIZES if size < most_rows), most_rows) if most_rows else ()


def recorded_sizes(limits: StepLimits, prompt_rows: int) -> tuple[RecordedSize, ...]:
    """Sizes of recorded steps, the cheapest first. `prompt_rows`: the largest step with prompt chunks. Without adapters
    there are about half the launches, so that recording pays for half the rows."""
    decoding = [RecordedSize(size, size) for size in graph_sizes(limits.max_sequences)]
    most = min(limits.max_sequences, _SIZES[-1])
    prompts = [
        RecordedSize(size, min(size, most), prompts=True, adapters_only=2 * size > prompt_rows)
        for size in prompt_graph_sizes(min(prompt_rows, limits.max_rows))
    ]
    return (*decoding, *prompts)


@dataclass(frozen=True, slots=True)
class _Recording:
    """Replays a graph. The graph reads tensors that `work` was made with at fixed addresses, and owns none of them:
    they must live as long as it does."""

    graph: torch.cuda.CUDAGraph
    answer: torch.Tensor
    work: Callable[[], torch.Tensor]

    def __call__(self) -> torch.Tensor:
        self.graph.replay()
        return self.answer


class CudaRecorder:
    """CUDA graphs that share one pool of memory: only one runs at a time, and what it returns is valid until the
    next one runs.

    All are recorded on one stream: cuBLAS keeps a workspace (32 MiB) for every stream that it was ever called on.
    """

    def __init__(self) -> None:
        self._pool: Any = None
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def record(self, work: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        # Once beforehand: kernels are compiled and libraries prepare themselves, which can't be recorded.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            work()
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads copy adapters meanwhile, on streams of their own.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            answer = work()
        self._pool = self._pool or graph.pool()
        return _Recording(graph, answer, work)

    def forget(self) -> None:
        # A pool is gone with the last of its graphs.
        self._pool = None


def prepare_inputs(
    model: Model,
    attention: AttentionKernel,
    kv: KVCache,
    arena: AdapterArena | None,
    limits: StepLimits,
    recorder: Recorder | None,
    *,
    prompt_rows: int = 0,
    batch_invariant: bool = False,
) -> PackedSource:
    """Where the steps of a model begin on Triton's kernels. `recorder`, where there is one and `attention` can be
    recorded, records decoding steps, and those with prompt chunks of up to `prompt_rows` rows. `batch_invariant`: the
    adapters give a row the same bits in every step."""
    lora = None
    if arena is not None:
        tiling = INVARIANT_TILING if batch_invariant else LoraTiling()
        lora = arena.device_lora(limits.max_rows, limits.max_sequences, tiling)
    if not isinstance(attention, RecordableAttention):
        return PackedSource(attention, model.dtype, model.device, limits, lora=lora)
    source = PackedSource(
        attention,
        model.dtype,
        model.device,
        limits,
        lora=lora,
        sizes=() if recorder is None else recorded_sizes(limits, prompt_rows),
        num_groups=kv.num_groups,
        has_windows=kv.state_windows.numel() > 0,
    )
    if recorder is not None:
        record_steps(model, kv, source, recorder)
    return source


@torch.inference_mode()
def record_steps(model: Model, kv: KVCache, source: PackedSource, recorder: Recorder) -> None:
    """Record a pass of `model` for each of the sizes of `source`, and give it to it. While no step is in flight.

    The largest goes first: the others fit into the memory that it takes. All write their logits to the same memory: a
    tensor of its own would stay with each recording.
    """
    most_logits = max((size.sequences for size in source.layouts), default=0)
    logits = torch.empty(most_logits, model.shape.vocab_size, dtype=torch.float32, device=source.device)
    replays: dict[RecordedSize, Replay] = {}
    for size in sorted(source.layouts, key=lambda size: size.rows, reverse=True):
        rows, attention = source.empty_batch(size)
        logits_rows = rows["logits_rows"] if size.prompts else torch.arange(size.rows, device=source.device)
        no_blocks = torch.empty(0, dtype=torch.int64, device=source.device)
        batch = ForwardBatch(
            token_ids=rows["token_ids"],
            positions=rows["positions"],
            attention=attention,
            fresh_blocks=no_blocks,
            logits_rows=logits_rows,
            kv=kv,
            recurrent=source.recorded_units(size),
            logits_out=logits[: size.sequences],
        )
        batches = [] if size.adapters_only else [batch]
        if source.lora is not None:
            made = source.recorded_adapters(size)
            batches.append(replace(batch, lora=made.layers, expert_lora=made.experts, head_lora=made.head))
        if not batches:
            continue
        variants = tuple(recorder.record(partial(model.forward, found)) for found in batches)
        replays[size] = partial(_replay, variants)
    source.replays = {size: replays[size] for size in source.layouts if size in replays}


def forget_recordings(source: PackedSource, recorder: Recorder) -> None:
    """Drop what `record_steps` made, before it is called for another KV cache."""
    source.replays = {}
    recorder.forget()


def _replay(variants: Sequence[Callable[[], torch.Tensor]], with_adapters: bool) -> torch.Tensor:
    return variants[-1 if with_adapters else 0]()
