"""Preparation of the first step: inputs, recordings, compiled kernels, and the memory that it all takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from loraplex.adapters.device.arena import AdapterArena
from loraplex.adapters.device.host_image import blank_image
from loraplex.adapters.errors import LoraplexError
from loraplex.engine.execution.device_errors import DeviceOutOfMemory
from loraplex.engine.execution.device_memory import DeviceMemory, headroom
from loraplex.engine.execution.executor import Executor
from loraplex.engine.execution.inputs import Recorder, StepLimits
from loraplex.engine.execution.runner import ModelRunner
from loraplex.engine.kv.cache import KVCache
from loraplex.engine.model.base import Model
from loraplex.engine.sampling.sampler import Sampler
from loraplex.kernels.attention.kernel import RecordableAttention

if TYPE_CHECKING:
    from loraplex.engine.execution.packed_inputs import PackedSource

_TRIAL_BLOCKS = 2


class StepTooLarge(LoraplexError):
    """The device cannot hold the largest step beside the weights and the adapters."""

    code = "step_too_large"


class StepPreparation:
    """Where the steps of an engine begin. On Triton's kernels that is a `PackedSource`; on others steps take plain
    tensors. `max_scored`: positions of prompts that a step scores. `prompt_rows`: rows of the largest step with prompt
    chunks that is recorded."""

    def __init__(
        self,
        model: Model,
        arena: AdapterArena,
        executor: Executor,
        sampler: Sampler,
        *,
        recorder: Recorder | None,
        max_scored: int,
        prompt_rows: int,
        batch_invariant: bool,
    ) -> None:
        self._model = model
        self._arena = arena
        self._executor = executor
        self._sampler = sampler
        self._recorder = recorder
        self._max_scored = max_scored
        self._prompt_rows = prompt_rows
        self._batch_invariant = batch_invariant
        self._limits: StepLimits | None = None
        self.inputs: PackedSource | None = None

    def begin(self, kv: KVCache, limits: StepLimits) -> None:
        """Once: make the inputs, and record steps over `kv`."""
        self._limits = limits
        if self._arena.kernels.lora_pass is not None:
            return
        # Triton need not be there where it does not run.
        from loraplex.engine.execution.cuda_graphs import CudaRecorder, prepare_inputs

        if not isinstance(self._model.attention, RecordableAttention):
            self._recorder = None
        elif self._recorder is None and self._model.device.type == "cuda":
            self._recorder = CudaRecorder()
        self.inputs = prepare_inputs(
            self._model,
            self._model.attention,
            kv,
            self._arena,
            limits,
            self._recorder,
            prompt_rows=self._prompt_rows,
            batch_invariant=self._batch_invariant,
        )

    def recorded(self, *, prompts: bool) -> tuple[int, ...]:
        """Numbers of rows that steps are recorded for: those with prompt chunks, or decoding steps."""
        sizes = () if self.inputs is None else self.inputs.replays
        return tuple(size.rows for size in sizes if size.prompts == prompts)

    def measure(
        self, memory: DeviceMemory, make_kv: Callable[[int], KVCache], limits: StepLimits
    ) -> tuple[int, int]:
        """`begin` with a KV cache of a few blocks, `warm_up`, and the largest step. Returns the bytes that these took,
        and those that they leave for the KV cache: `record_again` with it comes next. Raises StepTooLarge."""
        memory.give_back()
        before = memory.free()
        kv = make_kv(_TRIAL_BLOCKS)
        try:
            self.begin(kv, limits)
            runner = ModelRunner(
                self._model,
                kv,
                self._executor,
                eos_ids=frozenset(),
                lora=self._arena,
                inputs=self.inputs,
                sampler=self._sampler,
            )
            self.warm_up(runner)
            self.run_largest(runner)
        except DeviceOutOfMemory as error:
            raise StepTooLarge(
                f"a step of {limits.max_rows} tokens and {limits.max_sequences} sequences does not fit beside the "
                "weights and the adapters; lower --max-num-batched-tokens, --max-num-seqs or --adapter-memory"
            ) from error
        workspace = max(0, before - memory.free() - kv.num_bytes)
        # The recordings read that KV cache, and no other.
        if self.inputs is not None and self._recorder is not None:
            from loraplex.engine.execution.cuda_graphs import forget_recordings

            forget_recordings(self.inputs, self._recorder)
        del runner, kv
        memory.give_back()
        return workspace, before - workspace - headroom(memory.total())

    def record_again(self, kv: KVCache) -> None:
        """Over the KV cache that is served from."""
        if self.inputs is not None and self._recorder is not None:
            from loraplex.engine.execution.cuda_graphs import record_steps

            record_steps(self._model, kv, self.inputs, self._recorder)

    def warm_up(self, runner: ModelRunner) -> None:
        """Compile the kernels that a step may launch, where that is not done before."""
        if self.inputs is not None:
            from loraplex.engine.execution.warm_up import warm_up

            warm_up(runner, self.inputs, pools=self._model.hidden_size is not None)

    def run_largest(self, runner: ModelRunner) -> None:
        """See `run_largest_step`, on an adapter that is there for it alone."""
        from loraplex.engine.execution.warm_up import run_largest_step

        assert self._limits is not None
        image = blank_image(self._arena.layout)
        self._arena.write(image, 0, (0,))
        image.release()
        try:
            run_largest_step(runner, self._limits, max_scored=self._max_scored, slot=0)
        finally:
            self._arena.clear_slot(0)
