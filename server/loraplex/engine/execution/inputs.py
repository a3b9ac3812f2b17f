"""How a step's numbers come to the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from loraplex.engine.host_to_device import HostToDevice
from loraplex.engine.model.base import TokenRows
from loraplex.kernels.attention.kernel import AttentionKernel
from loraplex.kernels.experts.lora_types import ExpertLoraPass
from loraplex.kernels.lora.types import LoraPass
from loraplex.kernels.recurrent.types import RecurrentRows, RecurrentUnit, lay_out_units

Segments = Sequence[tuple[int, int, int]]


class LoraSource(Protocol):
    """Where a step's adapters come from: the adapter arena."""

    def lora_pass(self, segments: Segments, num_rows: int) -> LoraPass | None:
        """The adapters of a step's rows; segments are (slot, first_row, num_rows), base rows on none."""
        ...

    def head_pass(self, segments: Segments, num_rows: int) -> LoraPass | None:
        """Their changes of the head, for the rows whose logits are wanted."""
        ...

    def expert_pass(self, segments: Segments, num_rows: int) -> ExpertLoraPass | None:
        """Their changes of routed experts."""
        ...

    def token_pass(
        self, segments: Segments, logits_segments: Segments, upload: HostToDevice
    ) -> TokenRows | None:
        """Their changes by token, in the step's rows and in the rows whose logits are wanted."""
        ...


class HeadSource(Protocol):
    """Where the heads of classifiers lie: the adapter arena."""

    def head_rows(self, slot: int) -> NDArray[np.int64] | None:
        """Where the rows of a slot's head begin, by label. None where it has no head."""
        ...

    def head_logits(self, granules: torch.Tensor, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """[n] float32: the logits of these rows of x [P, C], each with the row of a head that begins there."""
        ...


class StepInputs(HostToDevice, Protocol):
    """The inputs of one step, which the planning thread fills and the worker sends."""

    def rows(self, name: str, values: Sequence[int]) -> torch.Tensor:
        """One number a row: [T] int64. Where a recorded pass is to be replayed, as long as that one is, with zeros
        behind the step's own rows."""
        ...

    def logits_rows(self, values: Sequence[int]) -> torch.Tensor:
        """The rows whose logits are wanted: [S] int64, where a recorded pass that is to be replayed reads them."""
        ...

    def attention(
        self,
        num_rows: Sequence[int],
        seq_lens: Sequence[int],
        block_tables: Sequence[Sequence[Sequence[int]]],
    ) -> tuple[Any, ...]:
        """The input of the model's attention for a batch, for each group of layers: sequence i has the next num_rows[i]
        rows, seq_lens[i] positions at its end and in group g the blocks block_tables[g][i]."""
        ...

    def adapters(self, segments: Segments, num_rows: int) -> LoraPass | None:
        """See `LoraSource.lora_pass`."""
        ...

    def head_adapters(self, segments: Segments, num_rows: int) -> LoraPass | None:
        """See `LoraSource.head_pass`."""
        ...

    def expert_adapters(self, segments: Segments, num_rows: int) -> ExpertLoraPass | None:
        """See `LoraSource.expert_pass`."""
        ...

    def token_rows(self, segments: Segments, logits_segments: Segments) -> TokenRows | None:
        """See `LoraSource.token_pass`."""
        ...

    def recurrent(self, units: Sequence[RecurrentUnit]) -> RecurrentRows:
        """The sequences of layers whose state is behind a window."""
        ...

    def send(self) -> None:
        """Queue the copies. For the worker, before anything that reads them."""
        ...

    def replay(self, with_adapters: bool) -> torch.Tensor | None:
        """Run the recorded pass that the step is laid out for, in the worker, and return its logits, first those of
        `logits_rows`. None where there is none, and the model must be run."""
        ...


@dataclass(frozen=True, slots=True)
class StepAdapters:
    """Changes by the adapters of a step: in the layers, in their experts, in the head, and by token. None: nothing."""

    layers: LoraPass | None
    experts: ExpertLoraPass | None
    head: LoraPass | None
    by_token: TokenRows | None

    @property
    def any_lora(self) -> bool:
        """Whether there are changes that a recorded pass with adapters makes."""
        return self.layers is not None or self.experts is not None or self.head is not None


def begin_adapters(
    inputs: StepInputs, segments: Segments, num_rows: int, logits_segments: Segments, num_logits: int
) -> StepAdapters:
    """Prepare all of them for a step. The second pair of arguments is over the rows whose logits are wanted."""
    return StepAdapters(
        inputs.adapters(segments, num_rows),
        inputs.expert_adapters(segments, num_rows),
        inputs.head_adapters(logits_segments, num_logits) if num_logits else None,
        inputs.token_rows(segments, logits_segments),
    )


class Recorder(Protocol):
    """Makes something that can be replayed of work that is queued on a device."""

    def record(self, work: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        """Returns a function that does the same work again over the same memory, and returns what `work` returned."""
        ...

    def forget(self) -> None:
        """Release all recordings so far: none is replayed any more."""
        ...


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The largest step. `max_blocks`: KV blocks of one sequence."""

    max_rows: int
    max_sequences: int
    max_blocks: int


@dataclass(frozen=True, slots=True)
class RecordedSize:
    """The largest step that a recorded pass serves: `rows` rows of `sequences` sequences.

    With `prompts` a sequence may have many rows, and the pass takes `sequences` numbers of rows whose logits it
    computes. Without, each has one row, whose logits it computes. `adapters_only`: it is replayed for steps with
    adapters alone.
    """

    rows: int
    sequences: int
    prompts: bool = False
    adapters_only: bool = False


def put_units(upload: HostToDevice, units: Sequence[RecurrentUnit]) -> RecurrentRows:
    """These units, with a table of their own."""
    laid_out = lay_out_units(units)
    return replace(laid_out, table=upload.ints(laid_out.table.numpy()))


class PlainInputs:
    """A tensor each, copied as it is made: what a CPU wants, where nothing is copied, and what runs anywhere."""

    def __init__(
        self,
        device: torch.device,
        attention: AttentionKernel | None = None,
        lora: LoraSource | None = None,
    ) -> None:
        """`attention`: the model's; None where there is no model."""
        self._device = device
        self._attention = attention
        self._lora = lora

    def ints(self, values: Sequence[int] | NDArray[np.int64]) -> torch.Tensor:
        return self._tensor(values, torch.int64)

    def floats(self, values: Sequence[float] | NDArray[np.float32]) -> torch.Tensor:
        return self._tensor(values, torch.float32)

    def doubles(self, values: Sequence[float] | NDArray[np.float64]) -> torch.Tensor:
        return self._tensor(values, torch.float64)

    def rows(self, name: str, values: Sequence[int]) -> torch.Tensor:
        return self._tensor(values, torch.int64)

    def logits_rows(self, values: Sequence[int]) -> torch.Tensor:
        return self._tensor(values, torch.int64)

    def attention(
        self,
        num_rows: Sequence[int],
        seq_lens: Sequence[int],
        block_tables: Sequence[Sequence[Sequence[int]]],
    ) -> tuple[Any, ...]:
        assert self._attention is not None
        return tuple(self._attention.lay_out(num_rows, seq_lens, tables) for tables in block_tables)

    def adapters(self, segments: Segments, num_rows: int) -> LoraPass | None:
        return self._source(segments).lora_pass(segments, num_rows) if segments else None

    def head_adapters(self, segments: Segments, num_rows: int) -> LoraPass | None:
        return self._source(segments).head_pass(segments, num_rows) if segments else None

    def expert_adapters(self, segments: Segments, num_rows: int) -> ExpertLoraPass | None:
        return self._source(segments).expert_pass(segments, num_rows) if segments else None

    def token_rows(self, segments: Segments, logits_segments: Segments) -> TokenRows | None:
        return self._source(segments).token_pass(segments, logits_segments, self) if segments else None

    def recurrent(self, units: Sequence[RecurrentUnit]) -> RecurrentRows:
        return put_units(self, units)

    def send(self) -> None:
        """There is nothing left to do."""

    def replay(self, with_adapters: bool) -> None:
        return None

    def _source(self, segments: Segments) -> LoraSource:
        if self._lora is None:
            raise RuntimeError(f"a row names adapter slot {segments[0][0]}, and this runner has no adapters")
        return self._lora

    def _tensor(self, values: Any, dtype: torch.dtype) -> torch.Tensor:
        made = (
            torch.from_numpy(values) if isinstance(values, np.ndarray) else torch.tensor(values, dtype=dtype)
        )
        return made.to(self._device, non_blocking=True)
