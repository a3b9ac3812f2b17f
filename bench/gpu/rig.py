"""The engine's forward pass with its inputs, recordings and adapters, and nothing around it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from bench.gpu.models import Adapter
from loraplex.adapters.device.arena import AdapterArena
from loraplex.adapters.device.host_image import HostImage
from loraplex.adapters.device.layout import ArenaLayout
from loraplex.engine.execution.batch import StepRows
from loraplex.engine.execution.cuda_graphs import CudaRecorder, record_steps
from loraplex.engine.execution.inputs import RecordedSize, StepLimits
from loraplex.engine.execution.packed_inputs import PackedSource
from loraplex.engine.kv.cache import KVCache
from loraplex.engine.kv.layers import keeping_all
from loraplex.engine.model.base import ForwardBatch
from loraplex.engine.model.fused import FusedDecoder
from loraplex.engine.types import EngineRequest, SamplingParams, ScheduledSequence, StepPlan
from loraplex.kernels.attention import BLOCK_SIZE
from loraplex.kernels.attention.kernel import RecordableAttention
from loraplex.kernels.backend import make_kernels
from loraplex.kernels.lora.triton_tiling import INVARIANT_TILING, LoraTiling

GREEDY = SamplingParams(max_tokens=1 << 20, temperature=0.0)


class Repeater:
    """Where there are no CUDA graphs: the same work again."""

    def record(self, work: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        work()
        return work

    def forget(self) -> None: ...


@dataclass(frozen=True)
class RigSize:
    """`max_len`: positions of a sequence; `sizes`: numbers of rows that decoding is recorded for, `prompt_sizes`: that
    steps with prompt chunks are; `arena_bytes` and
    `slots` for adapters."""

    max_rows: int
    max_sequences: int
    max_len: int
    sizes: tuple[int, ...]
    arena_bytes: int
    slots: int
    max_rank: int = 64
    prompt_sizes: tuple[int, ...] = ()


class Rig:
    """A decoder over a KV cache with a place for each of `max_sequences` sequences; slot -1 is the base.
    `batch_invariant`: as the engine's setting; the model is made for it or not. `tiling`: another one for adapters.
    `kv`: that of another rig of the same size, to share; `kv_dtype` of its own one, where it is not the model's."""

    def __init__(
        self,
        model: FusedDecoder,
        size: RigSize,
        *,
        batch_invariant: bool = False,
        tiling: LoraTiling | None = None,
        kv: KVCache | None = None,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        self.model = model
        self.device = model.device
        self.size = size
        self.blocks_each = -(-size.max_len // BLOCK_SIZE)
        self.kv = kv or KVCache(
            keeping_all(model.shape.caches),
            size.max_sequences * self.blocks_each,
            kv_dtype or model.dtype,
            model.device,
            2 * size.max_sequences,
            size.max_sequences,
        )
        self._has_windows = self.kv.state_windows.numel() > 0
        self.layout = ArenaLayout(
            model.site_groups, model.num_layers, model.dtype, max_rank=size.max_rank, head=model.head_group
        )
        self.num_pages = size.arena_bytes // self.layout.page_bytes
        self.arena = AdapterArena(
            self.layout, self.num_pages, size.slots, make_kernels("triton", self.device)
        )
        tiling = tiling or (INVARIANT_TILING if batch_invariant else LoraTiling())
        assert isinstance(model.attention, RecordableAttention)
        self.source = PackedSource(
            model.attention,
            model.dtype,
            self.device,
            StepLimits(size.max_rows, size.max_sequences, self.blocks_each),
            lora=self.arena.device_lora(size.max_rows, size.max_sequences, tiling),
            sizes=(
                *(RecordedSize(rows, rows) for rows in size.sizes),
                *(
                    RecordedSize(rows, min(rows, size.max_sequences), prompts=True)
                    for rows in size.prompt_sizes
                ),
            ),
            has_windows=self._has_windows,
        )
        recorder = CudaRecorder() if self.device.type == "cuda" else Repeater()
        record_steps(self.model, self.kv, self.source, recorder)

    def put(self, slot: int, image: HostImage, first_page: int) -> int:
        """Copy an adapter into adjacent pages. Returns the page behind them."""
        end = first_page + image.num_pages
        self.arena.write(image, slot, tuple(range(first_page, end)))
        return end

    def fill(self, adapters: Sequence[Adapter]) -> None:
        """One adapter a slot, from slot 0 on."""
        page = 0
        for slot, adapter in enumerate(adapters):
            page = self.put(slot, adapter.image, page)
        self.synchronize()

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def rows(
        self,
        place: int,
        start: int,
        tokens: Sequence[int],
        slot: int = -1,
        *,
        samples: bool = True,
        sampling: SamplingParams = GREEDY,
    ) -> ScheduledSequence:
        """The next rows of the sequence in a place of the KV cache."""
        request = EngineRequest(f"{place}", "", (0,), sampling)
        last = -(-(start + len(tokens)) // BLOCK_SIZE)
        first = place * self.blocks_each
        # Two states in turns: a step may be computed twice.
        begun, ended = (position // BLOCK_SIZE for position in (start, start + len(tokens)))
        states = tuple(2 * place + number % 2 for number in range(begun, ended + 1))
        return ScheduledSequence(
            request=request,
            order=place,
            epoch=0,
            start=start,
            num_tokens=len(tokens),
            token_ids=tuple(tokens),
            block_ids=tuple(range(first, first + last)),
            slot=slot,
            samples=samples,
            pending_input=False,
            output_index=0,
            window_slot=place if self._has_windows else -1,
            state=states[0] if self._has_windows else -1,
            state_targets=states[1:] if self._has_windows else (),
        )

    def begin(self, rows: Sequence[ScheduledSequence], *, eager: bool = False) -> Step:
        """Plan a step; `eager`: without a recording, whatever there is."""
        with self.source.unrecorded() if eager else nullcontext():
            planned = StepRows(StepPlan(0, tuple(rows)), self.model.shape.vocab_size)
            inputs = self.source.begin_inputs(planned)
            flat = planned.send(inputs)
        batch = ForwardBatch(
            token_ids=flat.token_ids,
            positions=flat.positions,
            attention=flat.attention,
            fresh_blocks=flat.fresh_blocks,
            logits_rows=flat.logits_rows,
            kv=self.kv,
            lora=flat.adapters.layers,
            head_lora=flat.adapters.head,
            recurrent=flat.recurrent,
        )
        return Step(self, inputs, batch, planned.num_rows, tuple(flat.tokens.slices))

    def logits(self, rows: Sequence[ScheduledSequence], *, eager: bool = False) -> torch.Tensor:
        """[S, V] float32 of the sampled rows, in the order of `rows`."""
        step = self.begin(rows, eager=eager)
        with torch.inference_mode():
            step.inputs.send()
            found = step.run(with_adapters=step.batch.lora is not None or step.batch.head_lora is not None)
        wanted = [index for index, item in enumerate(rows) if item.samples]
        order = {index: row for row, index in enumerate(step.sampled)}
        return found[[order[index] for index in wanted]].clone()


@dataclass(frozen=True)
class Step:
    """A planned step. Its inputs lie on the host until they are sent."""

    rig: Rig
    inputs: Any
    batch: ForwardBatch
    num_rows: int
    sampled: tuple[int, ...]

    def run(self, *, with_adapters: bool) -> torch.Tensor:
        """Logits [rows, V], by the recording that it is laid out for, else by the model."""
        replayed = self.inputs.replay(with_adapters)
        if replayed is not None:
            return replayed[: self.batch.logits_rows.shape[0]]
        batch = self.batch if with_adapters else replace(self.batch, lora=None, head_lora=None)
        return self.rig.model.forward(batch)
