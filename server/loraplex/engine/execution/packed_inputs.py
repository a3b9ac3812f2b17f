"""A step's inputs in one piece of memory, and one copy to the device.

The piece begins with what a recorded pass reads at fixed places: the tokens and positions of the rows, with prompts the
rows whose logits are wanted, where layers have windowed states the step's sequences, the adapters' lists of work, and
where there are routed experts the adapter of each row. Then comes room for what is read by no recorded pass, and at the
end attention's lists, whose last part, the block tables, is as long as the step needs it. So a copy is as long as what
is used. Where layers are of several groups, each has such lists, and the long gaps between them are left out.

A step is laid out for the first recorded size that serves it, with rows of padding behind its own; any other step for
the largest step there is.

Attention of a model that runs through transformers takes no lists: its tensors are made and copied apart, no pass of
such a model is recorded, and all else travels as above.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from loraplex.adapters.device.device_lora import DeviceLora
from loraplex.engine.execution.batch import StepRows
from loraplex.engine.execution.inputs import RecordedSize, Segments, StepAdapters, StepLimits, put_units
from loraplex.engine.model.base import TokenRows
from loraplex.kernels.attention.kernel import AttentionKernel, AttentionLayout, RecordableAttention
from loraplex.kernels.attention.triton_plan import AttentionCapacity
from loraplex.kernels.experts.lora_types import ExpertLoraPass
from loraplex.kernels.lora.types import LoraPass
from loraplex.kernels.recurrent.types import (
    RecurrentRows,
    RecurrentUnit,
    lay_out_units,
    most_units,
    table_size,
)

_ALIGN = 64
_FREE_BYTES = 256 << 10
"""Bytes for what sampling needs. Steps that need more, as with penalties over long texts, copy the rest by itself."""
_GAP_BYTES = 256 << 10
"""Bytes that nothing uses up to which one copy takes what is before and behind them: another copy costs as much."""
_FRAMES = 4
"""Host memory for this number of steps: two in flight, one that is being filled, one to spare."""
ROWS = ("token_ids", "positions")
_LOGITS_ROWS = "logits_rows"

Replay = Callable[[bool], torch.Tensor]
"""Runs a recorded pass, with adapters or without: logits [sequences of its size, V]."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the parts of a step lie, in bytes. `lists`: of attention's work for each group of layers, one after the
    other from `attention` on; none where there are none."""

    lists: tuple[AttentionLayout, ...]
    rows: dict[str, int]
    recurrent: int
    """The table of sequences of layers with windows, in a recorded step."""
    lora: int
    slots: int
    """The slot of each row, int32, where adapters may change routed experts."""
    lora_end: int
    free_end: int
    attention: int
    num_bytes: int

    @classmethod
    def make(
        cls,
        num_rows: int,
        logits_rows: int,
        lists: Sequence[AttentionLayout],
        lora_ints: int,
        recurrent_ints: int = 0,
        *,
        on_experts: bool,
    ) -> Layout:
        rows: dict[str, int] = {}
        at = 0
        for name, count in (*((name, num_rows) for name in ROWS), (_LOGITS_ROWS, logits_rows)):
            rows[name] = at
            at = _aligned(at + 8 * count)
        recurrent, at = at, _aligned(at + 8 * recurrent_ints)
        slots = _aligned(at + 4 * lora_ints)
        lora_end = _aligned(slots + 4 * num_rows * on_experts)
        free_end = _aligned(lora_end + _FREE_BYTES)
        end = free_end + 4 * sum(each.num_ints for each in lists)
        return cls(tuple(lists), rows, recurrent, at, slots, lora_end, free_end, free_end, end)

    def places(self) -> Iterator[tuple[AttentionLayout, int, int]]:
        """The lists of each group: first byte, and bytes."""
        start = self.attention
        for lists in self.lists:
            yield lists, start, 4 * lists.num_ints
            start += 4 * lists.num_ints


@dataclass(slots=True)
class Frame:
    """One step's memory on the host. `sent`: when the device has read it, which a CPU does at once."""

    host: torch.Tensor
    numbers: NDArray[np.uint8]
    sent: torch.cuda.Event | None = None


class PackedSource:
    """Where the steps of a model begin on Triton's kernels.

    `lora`: the arena's adapters on the device, or None. `num_groups`: of layers, by their blocks. `has_windows`:
    whether layers have states with windows. `sizes`: what passes are recorded for, the cheapest first, none where
    `attention` cannot be recorded; `replays` is filled by the code that captures them. No more than three steps may be
    in flight.
    """

    def __init__(
        self,
        attention: AttentionKernel,
        dtype: torch.dtype,
        device: torch.device,
        limits: StepLimits,
        *,
        lora: DeviceLora | None,
        sizes: Sequence[RecordedSize] = (),
        num_groups: int = 1,
        has_windows: bool = False,
    ) -> None:
        self.device = device
        self.dtype = dtype
        self.limits = limits
        self.lora = lora
        self.replays: dict[RecordedSize, Replay] = {}
        lora_ints = 0 if lora is None else lora.layers.work_size + lora.head_work_size
        make = partial(Layout.make, on_experts=lora is not None and lora.experts is not None)
        self.attention = attention
        self.layouts: dict[RecordedSize, Layout] = {}
        if isinstance(attention, RecordableAttention):
            largest = RecordedSize(limits.max_rows, limits.max_sequences, prompts=True)
            made = iter(
                attention.layouts(
                    [
                        AttentionCapacity(
                            size.rows,
                            size.sequences,
                            size.sequences * limits.max_blocks,
                            size.rows if size.prompts else 1,
                        )
                        for size in (largest, *sizes)
                        for _ in range(num_groups)
                    ],
                    [*range(num_groups)] * (1 + len(sizes)),
                )
            )
            self.layout = make(limits.max_rows, 0, [*islice(made, num_groups)], lora_ints)
            for size in sizes:
                logits_rows = size.sequences if size.prompts else 0
                units = table_size(size.rows, size.sequences) if has_windows else 0
                lists = [*islice(made, num_groups)]
                self.layouts[size] = make(size.rows, logits_rows, lists, lora_ints, units)
        else:
            if sizes:
                raise ValueError(f"steps cannot be recorded whose attention is {attention.name}'s")
            self.layout = make(limits.max_rows, 0, (), lora_ints)
        num_bytes = max(layout.num_bytes for layout in (self.layout, *self.layouts.values()))
        self.memory = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        hosts = [
            torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
            for _ in range(_FRAMES)
        ]
        self._frames = [Frame(host, host.numpy()) for host in hosts]
        self._next = 0

    def begin_inputs(self, rows: StepRows) -> PackedInputs:
        """Begin a step's inputs, on the planning thread, once a step."""
        by_token: Collection[int] = () if self.lora is None else self.lora.tokens
        return PackedInputs(self, self._frame(), find_recorded(self.replays, rows, by_token))

    @contextmanager
    def unrecorded(self) -> Iterator[None]:
        """Steps that begin inside launch their kernels one by one."""
        kept, self.replays = self.replays, {}
        try:
            yield
        finally:
            self.replays = kept

    def empty_batch(self, size: RecordedSize) -> tuple[dict[str, torch.Tensor], tuple[Any, ...]]:
        """The rows and the attention of a recorded size, holding a step of padding alone. With prompts, "logits_rows"
        are beside the rows."""
        layout = self.layouts[size]
        inputs = PackedInputs(self, self._frame(), size)
        rows = {name: inputs.rows(name, []) for name in ROWS}
        if size.prompts:
            inputs.logits_rows([])
            rows[_LOGITS_ROWS] = self.view(layout.rows[_LOGITS_ROWS], 8 * size.sequences, torch.int64)
        inputs.attention([], [], [[] for _ in layout.lists])
        inputs.adapters([], 0)
        inputs.head_adapters([], 0)
        inputs.expert_adapters([], 0)
        if layout.recurrent < layout.lora:
            inputs.recurrent([])
        inputs.send()
        batches = [
            lists.recorded_batch(self.view(start, size, torch.int32))
            for lists, start, size in layout.places()
        ]
        return rows, tuple(batches)

    def recorded_adapters(self, size: RecordedSize) -> StepAdapters:
        """The passes that read the adapters' lists of a recorded size. Nothing by token is recorded."""
        assert self.lora is not None
        layout = self.layouts[size]
        of_layers, of_head = (
            self.view(*self.lora_place(layout, head=head), torch.int32) for head in (False, True)
        )
        layers, head = self.lora.recorded(of_layers, of_head, size.rows, size.sequences, prompts=size.prompts)
        experts = None
        if layout.slots < layout.lora_end:
            experts = self.lora.recorded_experts(self.view(layout.slots, 4 * size.rows, torch.int32))
        return StepAdapters(layers, experts, head, None)

    def recorded_units(self, size: RecordedSize) -> RecurrentRows | None:
        """The sequences of layers with windows, as a recorded size reads them; None where there are no such layers."""
        layout = self.layouts[size]
        if layout.recurrent == layout.lora:
            return None
        most = most_units(size.rows, size.sequences, prompts=size.prompts)
        table = self.view(layout.recurrent, layout.lora - layout.recurrent, torch.int64)
        return RecurrentRows((), table, most)

    def view(self, start: int, num_bytes: int, dtype: torch.dtype) -> torch.Tensor:
        """A part of the device's memory."""
        return self.memory[start : start + num_bytes].view(dtype)

    def lora_place(self, layout: Layout, *, head: bool) -> tuple[int, int]:
        """Where the list of work of the layers lies, or that of the head: first byte, and bytes."""
        assert self.lora is not None
        middle = layout.lora + 4 * self.lora.layers.work_size
        return (middle, layout.slots - middle) if head else (layout.lora, middle - layout.lora)

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
    size: RecordedSize | None
    _layout: Layout = field(init=False)
    _free: int = field(init=False)
    _used: int = field(init=False, default=0)
    """The bytes before attention's lists that are used, from the first on."""
    _lists: list[tuple[int, int]] = field(init=False, default_factory=list)
    """The bytes that are used of attention's lists, for each group of layers."""

    def __post_init__(self) -> None:
        self._layout = self.source.layout if self.size is None else self.source.layouts[self.size]
        self._free = self._layout.lora_end

    def ints(self, values: Sequence[int] | NDArray[np.int64]) -> torch.Tensor:
        return self._put(np.asarray(values, dtype=np.int64))

    def floats(self, values: Sequence[float] | NDArray[np.float32]) -> torch.Tensor:
        return self._put(np.asarray(values, dtype=np.float32))

    def doubles(self, values: Sequence[float] | NDArray[np.float64]) -> torch.Tensor:
        return self._put(np.asarray(values, dtype=np.float64))

    def rows(self, name: str, values: Sequence[int]) -> torch.Tensor:
        count = len(values) if self.size is None else self.size.rows
        self._put_rows(name, values, count)
        return self.source.view(self._layout.rows[name], 8 * count, torch.int64)

    def logits_rows(self, values: Sequence[int]) -> torch.Tensor:
        if self.size is None or not self.size.prompts:
            return self.ints(values)
        # Behind them the pass computes the logits of row 0, for nobody.
        self._put_rows(_LOGITS_ROWS, values, self.size.sequences)
        return self.source.view(self._layout.rows[_LOGITS_ROWS], 8 * len(values), torch.int64)

    def attention(
        self,
        num_rows: Sequence[int],
        seq_lens: Sequence[int],
        block_tables: Sequence[Sequence[Sequence[int]]],
    ) -> tuple[Any, ...]:
        if not self._layout.lists:
            lay_out = self.source.attention.lay_out
            return tuple(lay_out(num_rows, seq_lens, tables) for tables in block_tables)
        batches = []
        for (lists, start, num_bytes), tables in zip(self._layout.places(), block_tables, strict=True):
            host = self.frame.numbers[start : start + num_bytes].view(np.int32)
            device = self.source.view(start, num_bytes, torch.int32)
            batch, used = lists.lay_out(
                host, device, num_rows, seq_lens, tables, recorded=self.size is not None
            )
            self._lists.append((start, start + 4 * used))
            batches.append(batch)
        return tuple(batches)

    def adapters(self, segments: Segments, num_rows: int) -> LoraPass | None:
        return self._pass(segments, num_rows, head=False)

    def head_adapters(self, segments: Segments, num_rows: int) -> LoraPass | None:
        return self._pass(segments, num_rows, head=True)

    def expert_adapters(self, segments: Segments, num_rows: int) -> ExpertLoraPass | None:
        lora, start = self.source.lora, self._layout.slots
        if lora is None or start == self._layout.lora_end:
            return None
        num_bytes = 4 * (num_rows if self.size is None else self.size.rows)
        self._used = max(self._used, start + num_bytes)
        numbers = self.frame.numbers[start : start + num_bytes].view(np.int32)
        return lora.begin_expert_pass(segments, numbers, self.source.view(start, num_bytes, torch.int32))

    def token_rows(self, segments: Segments, logits_segments: Segments) -> TokenRows | None:
        lora = self.source.lora
        return None if lora is None else lora.token_pass(segments, logits_segments, self)

    def recurrent(self, units: Sequence[RecurrentUnit]) -> RecurrentRows:
        if self.size is None:
            return put_units(self, units)
        laid_out = lay_out_units(units)
        start, table = self._layout.recurrent, laid_out.table.numpy()
        assert start + table.nbytes <= self._layout.lora
        self.frame.numbers[start : start + table.nbytes] = table.view(np.uint8)
        self._used = max(self._used, start + table.nbytes)
        return replace(laid_out, table=self.source.view(start, table.nbytes, torch.int64))

    def send(self) -> None:
        parts = [(0, self._used)]
        for start, end in self._lists:
            first, last = parts[-1]
            if start - last <= _GAP_BYTES:
                parts[-1] = first, end
            else:
                parts.append((start, end))
        for start, end in parts:
            self.source.memory[start:end].copy_(self.frame.host[start:end], non_blocking=True)
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
        if self.size is not None and not head:
            # Rows of padding are computed too, as the base's.
            num_rows = min(self.size.rows, self.source.limits.max_rows)
        # Of the head there is a row for each sequence.
        prompts = self.size is not None and self.size.prompts and not head
        lora_pass, size = lora.begin_lora_pass(
            segments, num_rows, numbers, view, head=head, fixed=self.size is not None, prompts=prompts
        )
        self._used = max(self._used, start + 4 * size)
        return lora_pass

    def _put_rows(self, name: str, values: Sequence[int], count: int) -> None:
        """With zeros up to `count`."""
        start = self._layout.rows[name]
        numbers = self.frame.numbers[start : start + 8 * count].view(np.int64)
        numbers[: len(values)] = values
        numbers[len(values) :] = 0
        self._used = max(self._used, start + 8 * count)

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


def find_recorded(
    sizes: Iterable[RecordedSize], rows: StepRows, by_token: Collection[int] = ()
) -> RecordedSize | None:
    """The first whose pass serves this step, if its riders let any serve it. None serves one with an adapter that
    changes anything by token, in one of the slots `by_token`: no such change is recorded."""
    if rows.prevents_replay or any(slot in by_token for slot, _, _ in rows.segments):
        return None
    for size in sizes:
        fits = size.rows >= rows.num_rows and size.sequences >= rows.num_slices
        if fits and (rows.decodes or size.prompts) and (rows.segments or not size.adapters_only):
            return size
    return None


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN
