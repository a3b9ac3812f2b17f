"""Decoding steps recorded once and replayed: on a GPU as CUDA graphs, which take one launch instead of hundreds.

A recorded pass reads everything that differs between steps from fixed places in memory (`packed`), so that it serves
any sequences and any adapters. There is one for each of a few numbers of rows, with adapters and without; a step with
fewer rows has rows of padding, which write nothing that anybody reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from loraplex.adapters.device.arena import AdapterArena
from loraplex.engine.execution.inputs import Recorder, StepLimits
from loraplex.engine.execution.packed_inputs import PackedSource
from loraplex.engine.model.base import ForwardBatch, KVCache, Model
from loraplex.kernels.attention.kernel import AttentionKernel, RecordableAttention
from loraplex.kernels.lora.overlap import Lane, OverlappedLora
from loraplex.kernels.lora.triton_tiling import INVARIANT_TILING, LoraTiling

_SIZES = (1, 2, 4, 8, *range(16, 256, 16), *range(256, 513, 64))


def graph_sizes(max_sequences: int) -> tuple[int, ...]:
    """Numbers of rows that decoding is captured for, if `max_sequences` sequences are served at a time."""
    sizes = [size for size in _SIZES if size < max_sequences]
    return (*sizes, max_sequences) if max_sequences <= _SIZES[-1] else tuple(sizes)


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

        def replay() -> torch.Tensor:
            graph.replay()
            return answer

        return replay

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
    batch_invariant: bool = False,
) -> PackedSource:
    """Where the steps of a model begin on Triton's kernels, its decoding steps recorded by `recorder`, where there is
    one and its `attention` can be recorded. `batch_invariant`: the adapters give a row the same bits in every step."""
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
        sizes=() if recorder is None else graph_sizes(limits.max_sequences),
    )
    if recorder is not None:
        record_decoding(model, kv, source, recorder)
    return source


@torch.inference_mode()
def record_decoding(
    model: Model, kv: KVCache, source: PackedSource, recorder: Recorder, *, lane: Lane | None = None
) -> None:
    """Record a pass of `model` for each of the sizes of `source`, and give it to it. While no step is in flight. With
    a `lane`, the adapters' A sides run on it, beside the base's products.

    The largest goes first: the others fit into the memory that it takes. All write their logits to the same memory: a
    tensor of its own would stay with each recording.
    """
    logits = torch.empty(
        max(source.layouts, default=0), model.shape.vocab_size, dtype=torch.float32, device=source.device
    )
    for size in sorted(source.layouts, reverse=True):
        rows, attention = source.empty_batch(size)
        every_row = torch.arange(size, device=source.device)
        no_blocks = torch.empty(0, dtype=torch.int64, device=source.device)
        batch = ForwardBatch(
            token_ids=rows["token_ids"],
            positions=rows["positions"],
            attention=attention,
            fresh_blocks=no_blocks,
            logits_rows=every_row,
            kv=kv,
            logits_out=logits[:size],
        )
        batches = [batch]
        if source.lora is not None:
            layers, head = source.recorded_adapters(size)
            beside = None if lane is None else OverlappedLora(layers, lane)
            batches.append(
                replace(
                    batch,
                    lora=beside or layers,
                    head_lora=head,
                    begin_lora=None if beside is None else beside.start_shrink,
                )
            )
        variants = tuple(recorder.record(partial(model.forward, found)) for found in batches)
        source.replays[size] = partial(_replay, variants)
    source.replays = dict(sorted(source.replays.items()))


def forget_recordings(source: PackedSource, recorder: Recorder) -> None:
    """Drop what `record_decoding` made, before it is called for another KV cache."""
    source.replays = {}
    recorder.forget()


def _replay(variants: Sequence[Callable[[], torch.Tensor]], with_adapters: bool) -> torch.Tensor:
    return variants[with_adapters]()
