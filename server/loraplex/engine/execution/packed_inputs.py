"""A step's inputs in one piece of memory, and one copy to the device.

The piece begins with what a recorded pass reads at fixed places: the tokens and positions of the rows and the adapters'
lists of work. Then comes room for what is read by no recorded pass, and at the end attention's lists, whose last part,
the block tables, is as long as the step needs it. So a copy is as long as what is used.

A step of decoding rows alone is laid out for the least recorded size that it fits, with rows of padding behind its own;
any other step for the largest step there is.

Attention of a model that runs through transformers takes no lists: its tensors are made and copied apart, no pass of
such a model is recorded, and all else travels as above.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from loraplex.adapters.device.device_lora import DeviceLora
from loraplex.engine.execution.inputs import Segments, StepLimits
from loraplex.engine.model.base import LoraPass
from loraplex.engine.types import StepPlan
from loraplex.kernels.attention.kernel import AttentionKernel, AttentionLayout, RecordableAttention
from loraplex.kernels.attention.triton_plan import AttentionCapacity
from loraplex.kernels.lora.triton_lora import LoraLauncher

_ALIGN = 64
_FREE_BYTES = 256 << 10
"""For what sampling needs. Steps that need more, as with penalties over long texts, copy the rest by itself."""
_FRAMES = 4
"""Host memory for this number of steps: two in flight, one that is being filled, one to spare."""
ROWS = ("token_ids", "positions")

Replay = Callable[[bool], torch.Tensor]
"""Runs a recorded pass, with adapters or without: logits [rows of its size, V]."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the parts of a step lie, in bytes; a size for `num_rows` rows. `lists`: of attention's work, None where
    there are none."""

    num_rows: int
    lists: AttentionLayout | None
    rows: dict[str, int]
    lora: int
    lora_end: int
    free_end: int
    attention: int
    num_bytes: int

    @classmethod
    def make(cls, num_rows: int, lists: AttentionLayout | None, lora_ints: int) -> Layout:
        rows: dict[str, int] = {}
        at = 0
        for name in ROWS:
            rows[name] = at
            at = _aligned(at + 8 * num_rows)
        lora_end = _aligned(at + 4 * lora_ints)
        free_end = _aligned(lora_end + _FREE_BYTES)
        end = free_end if lists is None else free_end + 4 * lists.num_ints
        return cls(num_rows, lists, rows, at, lora_end, free_end, free_end, end)


@dataclass(slots=True)
class Frame:
    """One step's memory on the host. `sent`: when the device has read it, which a CPU does at once."""

    host: torch.Tensor
    numbers: NDArray[np.uint8]
    sent: torch.cuda.Event | None = None


class PackedSource:
    """Where the steps of a model begin on Triton's kernels.

    `lora`: the arena's adapters on the device, or None. `sizes`: for how many decoding rows passes are recorded, in
    ascending order, none where `attention` cannot be recorded; `replays` is filled by the code that captures them. No
    more than three steps may be in flight.
    """

    def __init__(
        self,
        attention: AttentionKernel,
        dtype: torch.dtype,
        device: torch.device,
        limits: StepLimits,
        *,
        lora: DeviceLora | None,
        sizes: Sequence[int] = (),
    ) -> None:
        self.device = device
        self.dtype = dtype
        self.limits = limits
        self.lora = lora
        self.replays: dict[int, Replay] = {}
        lora_ints = 0 if lora is None else lora.layers.work_size + lora.head_work_size
        self.attention = attention
        self.layouts: dict[int, Layout] = {}
        if isinstance(attention, RecordableAttention):
            largest = AttentionCapacity(
                limits.max_rows,
                limits.max_sequences,
                limits.max_sequences * limits.max_blocks,
                limits.max_rows,
            )
            decoding = [AttentionCapacity(size, size, size * limits.max_blocks, 1) for size in sizes]
            first, *others = attention.layouts([largest, *decoding])
            self.layout = Layout.make(limits.max_rows, first, lora_ints)
            self.layouts = {
                size: Layout.make(size, lists, lora_ints) for size, lists in zip(sizes, others, strict=True)
            }
        else:
            if sizes:
                raise ValueError(f"steps cannot be recorded whose attention is {attention.name}'s")
            self.layout = Layout.make(limits.max_rows, None, lora_ints)
        num_bytes = max(layout.num_bytes for layout in (self.layout, *self.layouts.values()))
        self.memory = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        hosts = [
            torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
            for _ in range(_FRAMES)
        ]
        self._frames = [Frame(host, host.numpy()) for host in hosts]
        self._next = 0

    def begin_inputs(self, plan: StepPlan) -> PackedInputs:
        """See `InputSource.begin_inputs`."""
        count = len(plan.scheduled)
        # Recorded passes end in logits: a step that pools is none of theirs, and samples nothing of what it pools.
        decoding = all(item.num_tokens == 1 and item.samples and not item.targets for item in plan.scheduled)
        size = next((size for size in self.replays if size >= count), None) if decoding else None
        return PackedInputs(self, self._frame(), size)

    def empty_batch(self, size: int) -> tuple[dict[str, torch.Tensor], Any]:
        """The rows and the attention of a recorded size, holding a step of padding alone."""
        layout = self.layouts[size]
        inputs = PackedInputs(self, self._frame(), size)
        rows = {name: inputs.rows(name, []) for name in ROWS}
        inputs.attention([], [], [])
        inputs.adapters([], 0)
        inputs.head_adapters([], 0)
        inputs.send()
        assert layout.lists is not None
        array = self.view(layout.attention, 4 * layout.lists.num_ints, torch.int32)
        return rows, layout.lists.recorded_batch(array)

    def recorded_adapters(self, size: int) -> tuple[LoraLauncher, LoraLauncher | None]:
        """The passes that read the adapters' lists of a recorded size."""
        assert self.lora is not None
        layout = self.layouts[size]
        layers, head = (self.view(*self.lora_place(layout, head=head), torch.int32) for head in (False, True))
        return self.lora.recorded(layers, head, size)

    def view(self, start: int, num_bytes: int, dtype: torch.dtype) -> torch.Tensor:
        """A part of the device's memory."""
        return self.memory[start : start + num_bytes].view(dtype)

    def lora_place(self, layout: Layout, *, head: bool) -> tuple[int, int]:
        """Where the list of work of the layers lies, or that of the head: first byte, and bytes."""
        assert self.lora is not None
        middle = layout.lora + 4 * self.lora.layers.work_size
        return (middle, layout.lora_end - middle) if head else (layout.lora, middle - layout.lora)

    def _frame(self) -> Frame:
        frame = self._frames[self._next]
        self._next = (self._next + 1) % len(self._frames)
        if frame.sent is not None:
            frame.sent.synchronize()
            frame.sent = None
        return frame


@dataclass(slots=True)
class PackedInputs:
    """See `StepInputs`. `size`: the recorded size that the step is laid out for, or None."""

    source: PackedSource
    frame: Frame
    size: int | None
    _layout: Layout = field(init=False)
    _free: int = field(init=False)
    _used: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self._layout = self.source.layout if self.size is None else self.source.layouts[self.size]
        self._free = self._layout.lora_end

    def ints(self, values: Sequence[int] | NDArray[np.int64]) -> torch.Tensor:
        return self._put(np.asarray(values, dtype=np.int64))

    def floats(self, values: Sequence[float]) -> torch.Tensor:
        return self._put(np.asarray(values, dtype=np.float32))

    def doubles(self, values: Sequence[float]) -> torch.Tensor:
        return self._put(np.asarray(values, dtype=np.float64))

    def rows(self, name: str, values: Sequence[int]) -> torch.Tensor:
        start = self._layout.rows[name]
        count = self.size or len(values)
        numbers = self.frame.numbers[start : start + 8 * count].view(np.int64)
        numbers[: len(values)] = values
        numbers[len(values) :] = 0
        self._used = max(self._used, start + 8 * count)
        return self.source.view(start, 8 * count, torch.int64)

    def attention(
        self, num_rows: Sequence[int], seq_lens: Sequence[int], block_tables: Sequence[Sequence[int]]
    ) -> Any:
        start, lists = self._layout.attention, self._layout.lists
        if lists is None:
            return self.source.attention.lay_out(num_rows, seq_lens, block_tables)
        num_bytes = 4 * lists.num_ints
        host = self.frame.numbers[start : start + num_bytes].view(np.int32)
        device = self.source.view(start, num_bytes, torch.int32)
        batch, used = lists.lay_out(
            host, device, num_rows, seq_lens, block_tables, recorded=self.size is not None
        )
        self._used = max(self._used, start + 4 * used)
        return batch

    def adapters(self, segments: Segments, num_rows: int) -> LoraPass | None:
        return self._pass(segments, num_rows, head=False)

    def head_adapters(self, segments: Segments, num_rows: int) -> LoraPass | None:
        return self._pass(segments, num_rows, head=True)

    def send(self) -> None:
        if self._used:
            self.source.memory[: self._used].copy_(self.frame.host[: self._used], non_blocking=True)
        if self.source.device.type == "cuda":
            self.frame.sent = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self.frame.sent.record()

    def replay(self, with_adapters: bool) -> torch.Tensor | None:
        return None if self.size is None else self.source.replays[self.size](with_adapters)

    def _pass(self, segments: Segments, num_rows: int, *, head: bool) -> LoraPass | None:
        lora = self.source.lora
        if lora is None:
            if segments:
                raise RuntimeError(
                    f"a row names adapter slot {segments[0][0]}, and this runner has no adapters"
                )
            return None
        start, num_bytes = self.source.lora_place(self._layout, head=head)
        numbers = self.frame.numbers[start : start + num_bytes].view(np.int32)
        view = self.source.view(start, num_bytes, torch.int32)
        lora_pass, size = lora.begin_lora_pass(
            segments, num_rows, numbers, view, head=head, fixed=self.size is not None
        )
        self._used = max(self._used, start + 4 * size)
        return lora_pass

    def _put(self, values: NDArray[Any]) -> torch.Tensor:
        start = self._free
        end = start + values.nbytes
        if end > self._layout.free_end:
            return self._put_apart(values)
        self.frame.numbers[start:end] = values.view(np.uint8) if values.size else ()
        self._free = _aligned(end)
        self._used = max(self._used, end)
        return self.source.view(start, values.nbytes, torch.from_numpy(values[:0]).dtype)

    def _put_apart(self, values: NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(values).to(self.source.device, non_blocking=True)


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN
