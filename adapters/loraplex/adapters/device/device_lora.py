"""The arena's adapters as the programs of a GPU find them: tables that stay on the device, and lists of work that a
step brings along."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from loraplex.adapters.device.expert_tables import ExpertTables
from loraplex.kernels.experts.lora_types import ExpertLoraPass, segments_on_experts, slots_of_rows
from loraplex.kernels.lora.dispatch import LoraPass, LoraWeights, Scratch, Segment
from loraplex.kernels.lora.token_rows import TokenRowPass, TokenTables, Upload

if TYPE_CHECKING:
    from loraplex.kernels.lora.triton_lora import LoraLauncher, TritonLora
    from loraplex.kernels.lora.triton_tiling import LoraTiling


def effective_segments(
    segments: Sequence[Segment], weights: LoraWeights, filled: NDArray[np.bool_]
) -> list[Segment]:
    """The segments, with slot -1 for those whose adapter changes nothing of what `weights` describes. Raises
    ValueError for an empty slot."""
    chosen = []
    for slot, first, count in segments:
        if slot >= 0 and (slot >= len(filled) or not filled[slot]):
            raise ValueError(f"slot {slot} holds no adapter")
        # One that changes nothing here is the base model's, here.
        chosen.append((slot if slot >= 0 and weights.num_chunks[slot] else -1, first, count))
    return chosen


class DeviceLora:
    """Made by `AdapterArena.device_lora`. `layers`, `head` and `experts` are None where adapters cannot change them.
    `tokens` are by slot the tables of adapters that change anything by token, and `token_pass` is the arena's."""

    def __init__(
        self,
        layers: LoraWeights,
        head: LoraWeights | None,
        experts: ExpertTables | None,
        filled: NDArray[np.bool_],
        tokens: Mapping[int, TokenTables],
        token_pass: Callable[[Sequence[Segment], Sequence[Segment], Upload], TokenRowPass | None],
        scratch: Scratch,
        *,
        max_rows: int,
        max_sequences: int,
        tiling: LoraTiling,
    ) -> None:
        # Triton need not be there where it does not run.
        from loraplex.kernels.lora.triton_lora import TritonLora

        def device_lora(weights: LoraWeights) -> TritonLora:
            return TritonLora(
                weights,
                scratch,
                max_rows=max_rows,
                max_segments=max_sequences,
                tiling=tiling,
            )

        self._weights = (layers, head)
        self._filled = filled
        self.tokens = tokens
        self.token_pass = token_pass
        self.layers = device_lora(layers)
        # Layers and head run one after the other, so that they may compute in the same memory.
        self.head = None if head is None else device_lora(head)
        self._expert_weights = None if experts is None else experts.weights
        self.experts = None if experts is None else experts.programs

    @property
    def head_work_size(self) -> int:
        """int32 of the head's list of work."""
        return 0 if self.head is None else self.head.work_size

    def write(self, slot: int) -> None:
        """Take over what the arena's tables say of a slot's layers and head."""
        self.layers.write(slot)
        if self.head is not None:
            self.head.write(slot)

    def begin_lora_pass(
        self,
        segments: Sequence[Segment],
        num_rows: int,
        into: NDArray[np.int32],
        work: torch.Tensor,
        *,
        head: bool,
        fixed: bool,
        prompts: bool,
    ) -> tuple[LoraPass | None, int]:
        """Write a step's list into `into`, whose copy on the device `work` is; returns the pass and how many int32 were
        written. `fixed`: for launches that were recorded (`recorded`), with the same `prompts`. The pass is None if no
        row has an adapter that changes anything. Raises ValueError as `AdapterArena.lora_pass` does."""
        weights, lora = (self._weights[1], self.head) if head else (self._weights[0], self.layers)
        if weights is None or lora is None:
            return None, 0
        chosen = effective_segments(segments, weights, self._filled)
        slots = sorted({slot for slot, _, _ in chosen if slot >= 0})
        if not slots and not fixed:
            return None, 0
        step = lora.plan(chosen, num_rows, into, fixed=fixed, prompts=prompts)
        if not slots:
            return None, step.size
        return (
            lora.recorded(work, num_rows, prompts=prompts) if fixed else lora.launcher(work, step, slots)
        ), step.size

    def begin_expert_pass(
        self, segments: Sequence[Segment], into: NDArray[np.int32], slots: torch.Tensor
    ) -> ExpertLoraPass | None:
        """Write the slot of each row into `into` [rows], whose copy on the device `slots` is: -1 for rows that no
        adapter on experts has. Returns None if there are such rows alone. Raises ValueError as
        `AdapterArena.expert_pass` does."""
        by_slot = self._on_experts(segments, len(into))
        into[:] = slots_of_rows(by_slot, len(into))
        return self.recorded_experts(slots) if by_slot else None

    def recorded_experts(self, slots: torch.Tensor) -> ExpertLoraPass | None:
        """A pass over experts that may be captured, for rows whose slots are in `slots` when it runs."""
        return None if self.experts is None else self.experts.begin(slots)

    def experts_apart(self, segments: Sequence[Segment], num_rows: int) -> ExpertLoraPass | None:
        """A pass over experts whose slots travel by themselves, beside those of the steps."""
        by_slot = self._on_experts(segments, num_rows)
        if not by_slot:
            return None
        slots = torch.from_numpy(slots_of_rows(by_slot, num_rows))
        return self.recorded_experts(slots.to(self._weights[0].storage.device, non_blocking=True))

    def _on_experts(self, segments: Sequence[Segment], num_rows: int) -> dict[int, list[Segment]]:
        if self._expert_weights is None:
            return {}
        return segments_on_experts(self._expert_weights, segments, num_rows)

    def apart(self, segments: Sequence[Segment], num_rows: int, *, head: bool) -> LoraPass | None:
        """A pass whose list travels by itself, beside those of the steps. None and raises as
        `begin_lora_pass` does."""
        weights, lora = (self._weights[1], self.head) if head else (self._weights[0], self.layers)
        if weights is None or lora is None:
            return None
        chosen = effective_segments(segments, weights, self._filled)
        slots = sorted({slot for slot, _, _ in chosen if slot >= 0})
        if not slots:
            return None
        numbers = np.empty(lora.work_size, np.int32)
        step = lora.plan(chosen, num_rows, numbers)
        work = torch.from_numpy(numbers[: step.size]).to(weights.storage.device, non_blocking=True)
        return lora.launcher(work, step, slots)

    def recorded(
        self, layers: torch.Tensor, head: torch.Tensor, max_rows: int, max_logits: int, *, prompts: bool
    ) -> tuple[LoraLauncher, LoraLauncher | None]:
        """Passes to be captured over the lists of the layers and of the head, for steps of up to `max_rows` rows and
        `max_logits` rows of logits. `prompts`: with prompt chunks."""
        return self.layers.recorded(layers, max_rows, prompts=prompts), (
            None if self.head is None else self.head.recorded(head, max_logits)
        )

    def warm_up(self, dtype: torch.dtype) -> None:
        """Compile what steps of this dtype may launch. While no step is in flight."""
        self.layers.warm_up(dtype)
        if self.head is not None:
            self.head.warm_up(dtype)
        if self.experts is not None:
            self.experts.warm_up(dtype)
