"""Steps on a real model: plans in, tokens out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch

from loraplex.engine.execution.batch import FlatStep, StepRows
from loraplex.engine.execution.device_errors import DeviceLost
from loraplex.engine.execution.executor import Executor
from loraplex.engine.execution.inputs import HeadSource, LoraSource, PlainInputs, StepInputs
from loraplex.engine.execution.riders.arrivals import ArrivalSource
from loraplex.engine.execution.riders.expert_loads import StepExperts
from loraplex.engine.execution.riders.measured import MeasuredSites
from loraplex.engine.execution.riders.rider import Forward, Rider
from loraplex.engine.execution.riders.site_probe import SiteProbe
from loraplex.engine.execution.riders.tokens import Arrival, Tokens, wait_for
from loraplex.engine.execution.step_results import StepResult
from loraplex.engine.execution.torch_errors import as_device_fault, give_back_memory
from loraplex.engine.grammar.masks import MaskMaker
from loraplex.engine.kv.cache import KVCache
from loraplex.engine.kv.host_blocks import HostBlocks
from loraplex.engine.model.base import ExpertStarts, ForwardBatch, Model
from loraplex.engine.sampling.sampler import Sampler, TorchSampler
from loraplex.engine.types import BlockCopy, StepPlan

if TYPE_CHECKING:
    from loraplex.engine.execution.packed_inputs import PackedSource


@dataclass(frozen=True, slots=True)
class StepHandle:
    """A submitted step. `result` lacks what its riders find."""

    result: StepResult
    riders: Sequence[Rider] = field(repr=False)
    future: Future[Arrival] = field(repr=False)


class ModelRunner:
    """Computes steps in the order of their submission, on the executor's one worker.

    `submit` and `collect` belong to one thread. A row whose input token the previous submitted step draws takes it from
    the device, without a turn through the host.
    """

    def __init__(
        self,
        model: Model,
        kv: KVCache,
        executor: Executor,
        *,
        eos_ids: frozenset[int],
        lora: LoraSource | None = None,
        inputs: PackedSource | None = None,
        sampler: Sampler | None = None,
        masks: MaskMaker | None = None,
        probe: SiteProbe | None = None,
        heads: HeadSource | None = None,
        experts: ExpertStarts | None = None,
        arrivals: ArrivalSource | None = None,
        host_blocks: HostBlocks | None = None,
    ) -> None:
        """`inputs`: where steps begin that take no plain tensors; it knows the adapters itself. `sampler`: torch's
        unless another one is given. `masks`: for rows with a grammar. `probe`: for the parts of a MeasureRequest.
        `heads`: of versions that classify. `experts`: what the model's steps leave there is told of each.
        `arrivals`: of adapters whose copies go on while steps read them. `host_blocks`: where copies of plans go."""
        self._model = model
        self._kv = kv
        self.num_groups = kv.num_groups
        self.vocab_size = model.shape.vocab_size
        # For slices of made-up tokens.
        self.num_windows = len(kv.state_windows) if kv.state_windows.numel() else 0
        self._executor = executor
        self._eos_ids = eos_ids
        self._lora = lora
        self._inputs = inputs
        self._sampler: Sampler = sampler or TorchSampler(model.shape.vocab_size)
        self._masks = masks
        self._probe = probe
        self._heads = heads
        self._experts = experts
        self._arrivals = arrivals
        self._host_blocks = host_blocks
        self._lost: DeviceLost | None = None
        self._previous = Tokens()

    def submit(self, plan: StepPlan) -> StepHandle:
        """Begin a step. Raises if the plan is not one that this model can run, or an adapter in it is not there, and
        DeviceOutOfMemory and DeviceLost as `collect` does; then nothing of it is computed."""
        try:
            return self._submit(plan)
        except Exception as error:
            fault = as_device_fault(error, self._model.device)
            if fault is error:
                raise
        raise fault

    def _submit(self, plan: StepPlan) -> StepHandle:
        if plan.copies or (self._host_blocks is not None and self._host_blocks.has_on_way):
            self._executor.submit(partial(self._copy, plan.copies))
        riders: list[Rider] = []
        if plan.measure is not None and self._probe is not None:
            riders.append(MeasuredSites(self._probe, plan.measure))
        if not plan.scheduled:
            self._previous = Tokens()
            return StepHandle(StepResult(plan.step_id, []), riders, self._begin(riders, self._no_forward))
        vocab_size = self._model.shape.vocab_size
        rows = StepRows(plan, vocab_size, self.num_groups, self._heads, self._arrivals)
        inputs = self._begin_inputs(rows)
        step = rows.send(inputs)
        self._kv.expect(step.fresh_blocks)
        previous, tokens = self._previous, step.tokens
        tokens.plan(previous, self._sampler, self._masks, self._eos_ids, inputs)
        riders = [*step.riders, *tokens.riders, *riders]
        if self._experts is not None:
            riders.append(StepExperts(self._experts))
        tokens.future = self._begin(riders, partial(self._forward, inputs, step, previous))
        self._previous = tokens
        return StepHandle(StepResult(plan.step_id, rows.results), riders, tokens.future)

    def _begin_inputs(self, rows: StepRows) -> StepInputs:
        if self._inputs is not None:
            return self._inputs.begin_inputs(rows)
        return PlainInputs(self._model.device, self._model.attention, self._lora)

    def _begin(self, riders: Sequence[Rider], forward_pass: Callable[[], Forward]) -> Future[Arrival]:
        work = partial(self._compute, riders, forward_pass)
        return self._executor.submit(partial(self._run, work))

    def collect(self, handle: object) -> StepResult:
        """Wait for a step that `submit` gave this handle for. Raises DeviceOutOfMemory if it did not fit, DeviceLost if
        the device will compute nothing any more, else what its forward pass raised; later steps are computed all the
        same."""
        assert isinstance(handle, StepHandle)
        self._wait(handle.future)
        for rider in handle.riders:
            rider.collect(handle.result)
        return handle.result

    def _wait(self, future: Future[Arrival]) -> None:
        try:
            wait_for(future)
            return
        except Exception as error:
            fault = as_device_fault(error, self._model.device)
            if fault is error:
                raise
        raise fault

    def close(self) -> None:
        """Finish what was submitted, and end the worker."""
        self._executor.close()
        if self._masks is not None:
            self._masks.close()

    # The worker.

    @torch.inference_mode()
    def _copy(self, copies: Sequence[BlockCopy]) -> None:
        """A copy that fails ends the engine: blocks of the index would hold something else."""
        try:
            assert self._host_blocks is not None, "no memory for the copies of a plan"
            self._host_blocks.copy(copies)
        except Exception as error:
            self._lost = DeviceLost(f"blocks could not be copied between the tiers: {error}")

    def _run(self, work: Callable[[], Arrival]) -> Arrival:
        try:
            if self._lost is not None:
                raise self._lost
            return work()
        except Exception as error:
            fault = as_device_fault(error, self._model.device)
            if fault is error:
                raise
        # Only now nothing holds the step's activations any more.
        give_back_memory(self._model.device)
        raise fault

    @torch.inference_mode()
    def _compute(self, riders: Sequence[Rider], forward_pass: Callable[[], Forward]) -> Arrival:
        forward = forward_pass()
        for rider in riders:
            rider.compute(forward)
        if self._model.device.type == "cpu":
            return None
        for rider in riders:
            rider.to_host(_pinned)
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrived.record()
        return arrived

    def _forward(self, inputs: StepInputs, step: FlatStep, previous: Tokens) -> Forward:
        inputs.send()
        step.tokens.fill_in(previous)
        adapters = step.adapters
        logits = inputs.replay(adapters.any_lora)
        if logits is not None:
            return Forward(self._sampler, logits[: step.logits_rows.shape[0]])
        hidden: list[torch.Tensor] = []
        logits = self._model.forward(
            ForwardBatch(
                token_ids=step.token_ids,
                positions=step.positions,
                attention=step.attention,
                fresh_blocks=step.fresh_blocks,
                logits_rows=step.logits_rows,
                kv=self._kv,
                lora=adapters.layers,
                expert_lora=adapters.experts,
                head_lora=adapters.head,
                token_rows=adapters.by_token,
                hidden_rows=step.hidden_rows,
                take_hidden=None if step.hidden_rows is None else hidden.append,
                recurrent=step.recurrent,
                enter_layer=step.enter_layer,
            )
        )
        return Forward(self._sampler, logits, *hidden)

    def _no_forward(self) -> Forward:
        return Forward(self._sampler, torch.empty(0))


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    """On its way: what it holds may be read once the device has come so far."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    return host
