"""The layers of a small step on a CPU as one list of calls, recorded at the first step of that many rows.

What Python does for each kernel of a layer (shapes, new tensors, addresses) takes a tenth of a decoding step. A list is
recorded for each number of rows, with and without adapters; sequences, positions, blocks and adapters may differ from
step to step. Results have the same bits as without it: the same kernels get the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from loraplex.kernels.attention.numba_attention import NumbaAttentionBatch
from loraplex.kernels.experts.numba_expert_lora import NumbaExpertLoraPass
from loraplex.kernels.lora.numba_lora import NumbaLoraPass
from loraplex.kernels.numba_runtime.recording import (
    CallList,
    LayerMemory,
    NotRecordable,
    Recording,
    StepValue,
)
from loraplex.kernels.recorded_layers import LayerInputs

MAX_ROWS = 64
"""Rows up to which steps are recorded: with more, what Python does is less than a hundredth of a step."""


class _AttentionToRecord:
    """Stands in for the `NumbaAttentionBatch` of a group of layers in a step of as many rows."""

    def __init__(self, group: int, num_rows: int, slots: torch.Tensor) -> None:
        self._group = group
        self.num_rows = num_rows
        self.slots = slots
        self._asked: dict[tuple[int, int, int, int], None] = {}

    def lists(self, kv_heads: int, group: int, dim: int, window: int) -> tuple[int, ...]:
        key = (kv_heads, group, dim, window)
        self._asked[key] = None
        return tuple(StepValue((self._group, key, number)) for number in range(7))

    def step_values(self, batch: NumbaAttentionBatch) -> dict[object, int]:
        return {
            (self._group, key, number): value
            for key in self._asked
            for number, value in enumerate(batch.lists(*key))
        }


class _UnitsToRecord:
    """Stands in for the `RecurrentRows` of a step: how many units there are is read from their table."""

    address = StepValue("recurrent")


class NumbaRecordedLayers:
    """Repeats a decoder's layers without the Python code around their kernels. For one thread at a time."""

    def __init__(self) -> None:
        self._memory = LayerMemory()
        self._lists: dict[tuple[int, ...], tuple[CallList, tuple[_AttentionToRecord, ...], torch.Tensor]] = {}
        self._inputs: tuple[torch.Tensor, ...] = ()
        self._kv: object = None
        self._is_recordable = True

    def run(
        self, given: LayerInputs, kv: object, run_layers: Callable[[LayerInputs], torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The result of `run_layers` for these inputs, and the residual that it leaves; both are overwritten by the
        next call. `kv` owns the memory that layers keep keys and values in. None where such a step can't be recorded;
        then nothing was computed."""
        rows = given.residual.shape[0]
        attention, lora, on_experts = given.attention, given.lora, given.expert_lora
        if (
            not self._is_recordable
            or rows > MAX_ROWS
            or any(type(group) is not NumbaAttentionBatch for group in attention)
            or not (lora is None or type(lora) is NumbaLoraPass)
            or not (on_experts is None or type(on_experts) is NumbaExpertLoraPass)
        ):
            return None
        if kv is not self._kv:
            self._kv = kv
            self._lists.clear()
        all_slots = [group.slots for group in attention]
        tables = [each for pair in given.cos_sin for each in pair]
        own_inputs = () if given.own_inputs is None else (given.own_inputs,)
        given_tensors = (given.residual, *own_inputs, *tables, *all_slots)
        if not self._inputs:
            with torch.inference_mode(False):  # else they could not be written to outside of that mode
                self._inputs = tuple(
                    torch.empty(MAX_ROWS, *each.shape[1:], dtype=each.dtype) for each in given_tensors
                )
        tensors = tuple(each[:rows] for each in self._inputs)
        adapters = [each for each in (lora, on_experts) if each is not None]
        key = (rows, *(id(each.weights) for each in adapters))
        found = self._lists.get(key)
        if found is None:
            try:
                found = self._lists[key] = self._record(given, tensors, run_layers)
            except NotRecordable:
                self._is_recordable = False
                return None
        calls, attention_to_record, x = found
        for own, each in zip(tensors, given_tensors, strict=True):
            own.copy_(each)
        values: dict[object, int] = {}
        for recorded, group in zip(attention_to_record, attention, strict=True):
            values |= recorded.step_values(group)
        for each in adapters:
            values |= each.step_values()
        if given.recurrent is not None:
            values[_UnitsToRecord.address.name] = given.recurrent.address
        calls.run(values)
        return x, tensors[0]

    def _record(
        self,
        given: LayerInputs,
        tensors: tuple[torch.Tensor, ...],
        run_layers: Callable[[LayerInputs], torch.Tensor],
    ) -> tuple[CallList, tuple[_AttentionToRecord, ...], torch.Tensor]:
        num_own = 0 if given.own_inputs is None else 1
        first = len(tensors) - len(given.attention)
        residual, all_slots = tensors[0], tensors[first:]
        own_inputs, tables = tensors[1 : 1 + num_own], tensors[1 + num_own : first]
        attention = tuple(
            _AttentionToRecord(group, len(residual), slots) for group, slots in enumerate(all_slots)
        )
        lora, on_experts = (
            None if each is None else each.to_record() for each in (given.lora, given.expert_lora)
        )
        recurrent = None if given.recurrent is None else _UnitsToRecord()
        recording = Recording(self._memory)

        with recording:
            pairs = list(zip(tables[::2], tables[1::2], strict=True))
            own = own_inputs[0] if own_inputs else None
            x = run_layers(
                LayerInputs(
                    residual, pairs, attention, lora, own, recurrent, on_experts, recording.enter_layer
                )
            )
        return recording.call_list(tensors, lora, on_experts), attention, x
