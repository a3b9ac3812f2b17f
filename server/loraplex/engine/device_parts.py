"""The parts of an engine that belong to one device: model, adapter arena, KV cache, recordings, sampler."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from loraplex.adapters.device.arena import AdapterArena
from loraplex.engine.config import EngineConfig
from loraplex.engine.devices import choose_lookahead
from loraplex.engine.execution.device_memory import DeviceMemory
from loraplex.engine.execution.executor import Executor
from loraplex.engine.execution.inputs import Recorder, StepLimits
from loraplex.engine.execution.kv_cache import (
    KVSize,
    WatchedKVCache,
    available_memory,
    free_host_memory,
    host_slots,
    size_kv_cache,
)
from loraplex.engine.execution.riders.site_probe import SiteProbe
from loraplex.engine.execution.runner import ModelRunner
from loraplex.engine.execution.step_preparation import StepPreparation
from loraplex.engine.grammar.masks import MaskMaker
from loraplex.engine.heartbeat import StepHeartbeat
from loraplex.engine.kv.cache import KVCache, block_bytes
from loraplex.engine.kv.host_blocks import HostBlocks
from loraplex.engine.kv.layers import blocks_for
from loraplex.engine.model.base import Model
from loraplex.engine.model.base_head import read_base_head
from loraplex.engine.model.loading import library_of, load_model
from loraplex.engine.model.model_plan import ModelPlan, ModelSettings, make_plan
from loraplex.engine.model.plans import KeptPlans
from loraplex.engine.sampling.sampler import Sampler, make_sampler
from loraplex.engine.sizing import (
    adapter_budget,
    adapter_layout,
    arena_size,
    most_recorded_rows,
    most_tokens,
    row_bytes,
    too_large_pools,
)
from loraplex.kernels.bundle import Kernels
from loraplex.kernels.failures import describe_failure

_MOST_RESTORED = 64 << 20
"""Bytes of prefixes that come from host memory in a step, at most."""
_log = logging.getLogger(__name__)
_MAX_SCORED_BYTES = 64 << 20
"""Bytes of a step's logits that are kept for the log probabilities of prompts, as float32."""


class CompilationFailed(Exception):
    """The kernels cannot be compiled for this processor."""


@dataclass(frozen=True, slots=True)
class Device:
    """A device with its kernels, and the thread that runs its steps. `memory`: that of the device; None on a CPU, where
    the KV cache gets a share of what is free. `recorder`: records steps in place of CUDA graphs."""

    kernels: Kernels
    executor: Executor
    memory: DeviceMemory | None
    recorder: Recorder | None = None


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A planned model with the arena for its adapters. `free_host`: bytes of host memory that were free before pools
    took any; None where that is not known. `library`: see `library_of`."""

    plan: ModelPlan
    model: Model
    arena: AdapterArena
    num_pages: int
    num_slots: int
    free_host: int | None
    library: str


@dataclass(frozen=True, slots=True)
class DeviceParts:
    """Everything on one device, ready to run steps. `max_step_tokens` and `max_scored`: tokens of a step, and positions
    of prompts that it scores. `workspace`: bytes that the largest step takes; None where that was not measured.
    `host_blocks`: those in host memory; `most_restored_blocks`: as of `SchedulerConfig`."""

    loaded: LoadedModel
    kv: KVCache
    kv_size: KVSize
    steps: StepPreparation
    runner: ModelRunner
    max_step_tokens: int
    max_scored: int
    workspace: int | None
    host_blocks: HostBlocks | None
    most_restored_blocks: int


def plan_model(config: EngineConfig, kernels: Kernels) -> ModelPlan:
    """Raises LoraplexError."""
    kept = None if config.plan_dir is None else KeptPlans(Path(config.plan_dir))
    return make_plan(Path(config.model_path), ModelSettings.of(config), kernels, kept)


def load_device(config: EngineConfig, device: Device, plan: ModelPlan) -> LoadedModel:
    """The model on its device, with the arena beside it. Raises LoraplexError."""
    kernels, executor = device.kernels, device.executor
    model = executor.submit(lambda: load_model(plan)).result()
    layout = adapter_layout(model, config.max_adapter_rank)
    head = None
    if plan.head is not None:
        head = read_base_head(plan.model_dir, plan.head, model.shape.vocab_size, model.hidden_size)
    free = available_memory(kernels.device)
    budget = config.adapter_memory or adapter_budget(free // config.num_sharing, kernels.device.type)
    num_pages, num_slots = arena_size(budget, layout)
    free_host = free_host_memory()
    arena = executor.submit(lambda: AdapterArena(layout, num_pages, num_slots, kernels, head)).result()
    return LoadedModel(plan, model, arena, num_pages, num_slots, free_host, library_of(model))


def build_device(
    config: EngineConfig,
    device: Device,
    loaded: LoadedModel,
    heartbeat: StepHeartbeat,
    host_pools: Mapping[str, int],
    make_masks: Callable[[int], MaskMaker],
    *,
    eos_ids: frozenset[int],
    wrap_model: Callable[[Model], Model] | None = None,
) -> DeviceParts:
    """KV cache, recordings, sampler and runner around a loaded model. `host_pools`: bytes of host memory that the
    engine takes beside, by the option that sets them. `make_masks` gets the size of the vocabulary. Raises
    LoraplexError."""
    model, kernels, memory = loaded.model, device.kernels, device.memory
    max_step_tokens = most_tokens(
        config.max_num_batched_tokens,
        kernels.device.type,
        row_bytes(model.site_groups, model.dtype.itemsize),
        0 if memory is None else memory.total(),
    )
    vocab_size = model.shape.vocab_size
    served = model if wrap_model is None else wrap_model(model)
    sampler = make_sampler(kernels, vocab_size=vocab_size, max_rows=config.max_num_seqs)
    max_scored = max(1, _MAX_SCORED_BYTES // (4 * vocab_size))
    steps = _steps(config, device, loaded, served, sampler, max_scored)
    make_kv = _KVMaker(config, device, loaded, heartbeat, max_step_tokens)
    limits = StepLimits(max_step_tokens, config.max_num_seqs, 0)
    workspace = None
    if memory is None:
        size = make_kv.size(None)
        pools = {
            "--kv-cache-memory": size.num_bytes,
            "--adapter-memory": loaded.arena.num_bytes,
        }
        _warn_of_memory(pools | dict(host_pools), loaded.free_host)
        kv = make_kv(size.num_blocks, size.num_states, size.num_windows)
        steps.begin(kv, replace(limits, max_blocks=blocks_for(size.max_model_len)))
    else:
        _warn_of_memory(host_pools, loaded.free_host)
        limits = replace(limits, max_blocks=blocks_for(config.max_model_len or model.shape.max_positions))
        workspace, budget = steps.measure(memory, make_kv, limits)
        if config.kv_cache_memory > budget:
            _log.warning("--kv-cache-memory leaves less than is needed for the steps: %d bytes would", budget)
        size = make_kv.size(budget)
        kv = make_kv(size.num_blocks, size.num_states, size.num_windows)
        steps.record_again(kv)
    _warn_of_windows(config, size)
    host_blocks = _host_blocks(config, device, loaded, kv, heartbeat)
    runner = ModelRunner(
        served,
        kv,
        device.executor,
        eos_ids=eos_ids,
        lora=loaded.arena,
        heads=loaded.arena,
        arrivals=loaded.arena,
        inputs=steps.inputs,
        sampler=sampler,
        masks=make_masks(vocab_size),
        probe=SiteProbe(loaded.arena, served.dtype, served.device),
        experts=model.expert_starts,
        host_blocks=host_blocks,
    )
    if memory is None:
        steps.warm_up(runner)
    else:
        steps.run_largest(runner)
    most_restored = max(1, _MOST_RESTORED // block_bytes(model.shape.caches, loaded.plan.kv_dtype))
    return DeviceParts(
        loaded, kv, size, steps, runner, max_step_tokens, max_scored, workspace, host_blocks, most_restored
    )  # fmt: skip


def _warn_of_windows(config: EngineConfig, size: KVSize) -> None:
    if 0 < size.num_windows < config.max_num_seqs:
        _log.warning(
            "--kv-cache-memory has states for %d sequences at once, not for %d: they take half of it",
            size.num_windows,
            config.max_num_seqs,
        )


def _host_blocks(
    config: EngineConfig, device: Device, loaded: LoadedModel, kv: KVCache, heartbeat: StepHeartbeat
) -> HostBlocks | None:
    """Blocks and states in `kv_host_memory` bytes."""
    if not config.kv_host_memory:
        return None
    num_slots, _ = host_slots(config.kv_host_memory, loaded.model.shape.caches, loaded.plan.kv_dtype)
    return device.executor.submit(lambda: HostBlocks(kv, num_slots, heartbeat.mark)).result()


@dataclass(frozen=True, slots=True)
class _KVMaker:
    """Sizes KV caches, and makes them in the thread that runs the steps."""

    config: EngineConfig
    device: Device
    loaded: LoadedModel
    heartbeat: StepHeartbeat
    max_step_tokens: int

    def __call__(self, num_blocks: int, num_states: int = 1, num_windows: int = 1) -> KVCache:
        return self.device.executor.submit(
            lambda: WatchedKVCache(
                self.loaded.model.shape.caches,
                num_blocks,
                self.loaded.plan.kv_dtype,
                self.device.kernels.device,
                self.heartbeat,
                blocks_ahead=2 * blocks_for(self.max_step_tokens),
                num_states=num_states,
                num_windows=num_windows,
            )
        ).result()

    def size(self, budget: int | None) -> KVSize:
        """`budget`: bytes of the device that are left for it; None: a share of what is free."""
        return size_kv_cache(
            self.loaded.model.shape,
            self.loaded.plan.kv_dtype,
            self.device.kernels.device,
            kv_cache_memory=self.config.kv_cache_memory,
            state_cache=self.config.state_cache,
            max_model_len=self.config.max_model_len,
            max_num_seqs=self.config.max_num_seqs,
            budget=budget,
            num_sharing=self.config.num_sharing,
            most_ahead=(1 + choose_lookahead(self.config.lookahead, self.device.kernels.device))
            * self.max_step_tokens,
        )


def _steps(
    config: EngineConfig,
    device: Device,
    loaded: LoadedModel,
    served: Model,
    sampler: Sampler,
    max_scored: int,
) -> StepPreparation:
    model, place = loaded.model, device.kernels.device
    capability = torch.cuda.get_device_capability(place) if place.type == "cuda" else None
    return StepPreparation(
        served,
        loaded.arena,
        device.executor,
        sampler,
        recorder=device.recorder,
        max_scored=max_scored,
        prompt_rows=most_recorded_rows(
            config.recorded_prompt_rows,
            capability,
            model.num_layers,
            model.num_weights,
        ),
        batch_invariant=config.batch_invariant,
    )


def compile_kernels(
    kernels: Kernels,
    dtype: torch.dtype,
    executor: Executor,
    on_stage: Callable[[str], None],
    **parts: bool,
) -> None:
    """Compile what must be before the first step. `parts` as of `Compilation`. Raises CompilationFailed."""
    compilation = kernels.compilation
    if compilation is None:
        return
    if not compilation.is_done(dtype, **parts):
        on_stage("compiling kernels for this processor (once; 10 to 20 s, minutes where the machine is slow)")
    try:
        executor.submit(lambda: compilation.run(dtype, **parts)).result()
    except Exception as error:  # of any kind: what is compiled depends on the processor
        raise CompilationFailed(describe_failure(kernels.backend, error)) from error


def _warn_of_memory(pools: Mapping[str, int], free: int | None) -> None:
    """`pools`: bytes of host memory by the option that sets them. They fill up as they are used for the first time: a
    start that takes more than there is goes well, and the process is killed hours later."""
    reason = too_large_pools(pools, free)
    if reason is not None:
        _log.warning(reason)
