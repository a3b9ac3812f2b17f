"""From an `EngineConfig` to an engine that runs: `device_parts` builds what lies on the device, and here is put around
it what schedules, loads adapters and follows grammars."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Literal

import torch

from loraplex.adapters.admission.base_model import load_base_spec
from loraplex.adapters.cache.adapter_cache import AdapterCache
from loraplex.adapters.device.host_slab import HostSlab
from loraplex.adapters.device.image_files import ImageFiles, image_key
from loraplex.adapters.device.transport import ThreadedTransport
from loraplex.adapters.end_tokens import EndTokens, read_end_tokens, read_not_followed
from loraplex.adapters.spec import BaseSpec
from loraplex.adapters.store.interface import Store
from loraplex.adapters.store.open_store import open_store
from loraplex.engine.config import EngineConfig, SchedulerConfig
from loraplex.engine.core.engine_core import EngineCore
from loraplex.engine.core.handed import MOST_BYTES
from loraplex.engine.device_parts import (
    CompilationFailed,
    Device,
    DeviceParts,
    LoadedModel,
    build_device,
    compile_kernels,
    load_device,
    plan_model,
)
from loraplex.engine.devices import (
    DeviceUnavailable,
    choose_kernels,
    choose_lookahead,
    obstacle_to_speculation,
)
from loraplex.engine.execution.cost_measurement import measure_step_times, time_on
from loraplex.engine.execution.device_memory import CudaMemory, DeviceMemory
from loraplex.engine.execution.executor import Executor, set_threads
from loraplex.engine.execution.inputs import Recorder, StepLimits
from loraplex.engine.execution.kv_cache import available_memory
from loraplex.engine.execution.kv_disk import check_disk, check_prefixes, open_disk, prefix_form
from loraplex.engine.execution.runner import ModelRunner
from loraplex.engine.grammar.masks import MaskMaker
from loraplex.engine.grammar.matchers import GrammarMatchers
from loraplex.engine.grammar.tokenizer import load_grammar_tokenizer
from loraplex.engine.grammar.vocabulary import GrammarVocabulary
from loraplex.engine.heartbeat import StepHeartbeat
from loraplex.engine.kv.cache import block_bytes
from loraplex.engine.kv.disk_tier import DiskTier
from loraplex.engine.kv.layers import blocks_for
from loraplex.engine.kv.states import state_bytes, window_bytes
from loraplex.engine.model.base import Model
from loraplex.engine.model.model_plan import ModelPlan
from loraplex.engine.numerics import numerical_build
from loraplex.engine.reports import EngineInfo, MemoryUse
from loraplex.engine.scheduling.drafting import Drafter
from loraplex.engine.scheduling.speculation import Speculation
from loraplex.engine.scheduling.timing.copy_lead import CopyLead
from loraplex.engine.scheduling.timing.step_bound import StepBound, make_bound
from loraplex.engine.scheduling.timing.step_times import StepTimes
from loraplex.engine.sizing import host_budget, most_sequences, require_room
from loraplex.kernels.attention import BLOCK_SIZE
from loraplex.kernels.backend import best_backend, obstacle_to, resolve_kernels
from loraplex.kernels.bundle import Kernels

_log = logging.getLogger(__name__)
LOADER_THREADS = 2
HISTORY_BYTES = 64 << 20
"""Finished answers that drafts are taken from: of all tenants, and of one."""
TENANT_HISTORY_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """A core that is ready for its step thread. `close` ends its worker, loader and disk threads."""

    core: EngineCore
    info: EngineInfo
    heartbeat: StepHeartbeat
    runner: ModelRunner
    transport: ThreadedTransport
    grammars: GrammarMatchers
    disk: DiskTier | None

    def close(self) -> None:
        self.grammars.close()
        self.transport.close()
        self.runner.close()
        if self.disk is not None:
            self.disk.close()


def build_engine(
    config: EngineConfig,
    wake: Callable[[], None],
    on_stage: Callable[[str], None] = lambda stage: None,
    *,
    wrap_model: Callable[[Model], Model] | None = None,
    recorder: Recorder | None = None,
    memory: DeviceMemory | None = None,
) -> BuiltEngine:
    """Load the base model, size the KV cache and the arena, and put an engine around them.

    `wake` is called from loader threads when the core should look again, `on_stage` with what is done now where that
    takes long. `wrap_model` may put something around the model, for example a recorder of its logits. `recorder`
    records decoding steps where the model's kernels allow it; CUDA graphs do on a GPU unless another one is given.
    `memory` is the device's: the KV cache gets what the largest step and the recordings leave of it. None on a GPU
    means that GPU's, on a CPU that the cache gets a share of what is free.
    Raises LoraplexError with what is wrong and what to do.
    """
    set_threads(config.num_threads, num_sharing=config.num_sharing)
    kernels = choose_kernels(config.device, config.kernels, batch_invariant=config.batch_invariant)
    place = kernels.device
    if place.type == "cuda" and config.num_sharing > 1:
        raise DeviceUnavailable(
            f"--replicas {config.num_sharing} starts engines that share a CPU; on GPUs run one engine for each: "
            "CUDA_VISIBLE_DEVICES=N loraplex engine --join HOST:PORT"
        )
    best = best_backend(place)
    if config.kernels == "auto" and kernels.backend != best:
        _tell_fallback(obstacle_to(best, place) or "")
    # On a CPU all parallel work is the worker's: each thread that does any gets a team of threads of its own, and where
    # teams have more threads than there are cores OpenMP puts them to sleep between any two operations.
    executor = Executor()
    if memory is None and place.type == "cuda":
        memory = CudaMemory(place)
    config = replace(config, max_num_seqs=most_sequences(config.max_num_seqs, place.type))

    def build(kernels: Kernels) -> BuiltEngine:
        opened = _Opened(base, ends, store, executor.submit(lambda: plan_model(config, kernels)).result())
        check_prefixes(config, opened.plan)
        return _build(config, opened, Device(kernels, executor, memory, recorder), wake, on_stage, wrap_model)

    try:
        check_disk(config)  # before what takes long: it may be refused
        on_stage("reading the model")
        base = load_base_spec(
            Path(config.model_path),
            cache_dir=None if config.cache_dir is None else Path(config.cache_dir),
            quantise=config.quantise,
        )
        ends = _end_tokens(config)
        store = open_store(
            config.artifact_url, Path(config.artifact_dir), cache_bytes=config.artifact_cache_bytes
        )
        try:
            return build(kernels)
        except CompilationFailed as error:
            if config.kernels != "auto":
                raise DeviceUnavailable(
                    f"--kernels {config.kernels}: {error}; choose auto or torch"
                ) from error
            _tell_fallback(str(error))
        return build(resolve_kernels("torch", place, batch_invariant=config.batch_invariant))
    except BaseException:
        executor.close()
        raise


@dataclass(frozen=True, slots=True)
class _Opened:
    """The model's directory as it was read, and the store of adapters, before anything is made of them."""

    base: BaseSpec
    ends: EndTokens
    store: Store
    plan: ModelPlan


def _build(
    config: EngineConfig,
    opened: _Opened,
    device: Device,
    wake: Callable[[], None],
    on_stage: Callable[[str], None],
    wrap_model: Callable[[Model], Model] | None,
) -> BuiltEngine:
    others = None if (memory := device.memory) is None else memory.total() - memory.free()
    loaded = load_device(config, device, opened.plan)
    # Before the minutes that compilation may take: it may be refused.
    host = _host_slab(config, device.kernels.device, loaded)
    compile_kernels(
        device.kernels, loaded.model.dtype, device.executor, on_stage,
        codes=opened.plan.linears.have_codes,
        kv_codes=opened.plan.kv_dtype is torch.int8,
        recurrent=any(kind.state_bytes for kind in loaded.model.shape.caches),
        experts=opened.plan.spec is not None and bool(opened.plan.spec.mixtures),
    )  # fmt: skip
    on_stage("preparing the memory and the first step")
    transport, heartbeat = _transport(config, opened, loaded, host, wake), StepHeartbeat()
    eos_ids = frozenset(opened.ends.ids)
    grammars = _grammars(opened.plan, eos_ids, wake)
    lookahead = choose_lookahead(config.lookahead, device.kernels.device)
    parts = build_device(
        config,
        device,
        loaded,
        heartbeat,
        {"--adapter-cpu-memory": host.num_bytes, "--kv-host-memory": config.kv_host_memory},
        lambda vocab_size: MaskMaker(grammars, vocab_size, lookahead=lookahead > 0),
        eos_ids=eos_ids,
        wrap_model=wrap_model,
    )
    on_stage("measuring how long steps take")
    speculation, no_speculation, bound = _timed(config, lookahead, device, parts)
    form = prefix_form(config, opened.plan, loaded.library, opened.base.fingerprint)
    disk = open_disk(config, form, parts.host_blocks, wake)
    hands_over = parts.host_blocks is not None and parts.kv_size.needs.windows == (None,)
    if parts.host_blocks is not None and parts.host_blocks.state_slots * form.piece_bytes > MOST_BYTES:
        hands_over = False  # a prefix is of no use without its state
    core = EngineCore(
        _scheduler_config(
            config, parts, lookahead, lacks_disk=config.kv_disk_dir is not None and disk is None
        ),
        parts.runner,
        AdapterCache(
            transport=transport,
            num_pages=loaded.num_pages,
            num_slots=loaded.num_slots,
            host_bytes=host.num_bytes,
            load_timeout_s=config.adapter_load_timeout,
            clock=time.monotonic,
            max_loads=LOADER_THREADS,
        ),
        eos_ids=eos_ids,
        clock=time.monotonic,
        heartbeat=heartbeat,
        grammars=grammars,
        speculation=speculation,
        bound=bound,
        lead=_copy_lead(device, parts, bound),
        disk=disk,
        prefixes=form if hands_over else None,
    )
    if parts.host_blocks is not None:
        parts.host_blocks.hand = core.handover.put
    info = replace(
        _info(config, opened, device, parts, host, others),
        prefix_form=form.name if hands_over else "",
        speculation=speculation is not None,
        speculation_reason=no_speculation,
        max_step_ms=0.0 if bound is None else 1000 * bound.max_s,
    )
    return BuiltEngine(core, info, heartbeat, parts.runner, transport, grammars, disk)


def _scheduler_config(
    config: EngineConfig, parts: DeviceParts, lookahead: Literal[0, 1], *, lacks_disk: bool
) -> SchedulerConfig:
    return SchedulerConfig(
        num_blocks=parts.kv_size.num_blocks,
        max_model_len=parts.kv_size.max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=parts.max_step_tokens,
        max_waiting=config.max_waiting,
        max_scored_tokens=parts.max_scored,
        lookahead=lookahead,
        windows=parts.kv_size.needs.windows,
        num_host_blocks=0 if parts.host_blocks is None else parts.host_blocks.num_slots,
        state_slots=0 if parts.host_blocks is None else parts.host_blocks.state_slots,
        most_restored_blocks=parts.most_restored_blocks,
        lacks_disk=lacks_disk,
        num_states=parts.kv_size.num_states,
        num_windows=parts.kv_size.num_windows,
    )


def _grammars(plan: ModelPlan, eos_ids: frozenset[int], wake: Callable[[], None]) -> GrammarMatchers:
    return GrammarMatchers(
        lambda: GrammarVocabulary(load_grammar_tokenizer(plan.model_dir, eos_ids), plan.shape.vocab_size),
        wake,
    )


def _end_tokens(config: EngineConfig) -> EndTokens:
    ends = read_end_tokens(Path(config.model_path), config.turn_ends)
    if ends.warning:
        told = "the model's files disagree about the end of a turn: %s; each of these tokens ends it"
        _log.warning(told, ends.warning)
    if (asked := read_not_followed(Path(config.model_path))) is not None:
        _log.log(logging.WARNING if asked.of_none else logging.INFO, "%s", asked.told)
    return ends


def _timed(
    config: EngineConfig, lookahead: int, device: Device, parts: DeviceParts
) -> tuple[Speculation | None, str, StepBound | None]:
    """The parts that go by the time of steps: an engine's drafts, or None and why it has none, and the steps' bound."""
    obstacle = obstacle_to_speculation(config.speculation, lookahead, device.kernels)
    if obstacle and not config.max_step_ms:
        return None, obstacle, None
    limits = StepLimits(parts.max_step_tokens, config.max_num_seqs, blocks_for(parts.kv_size.max_model_len))
    on_cpu = device.kernels.device.type == "cpu"
    worked = time_on(device.executor) if on_cpu else time.perf_counter
    try:
        measured = measure_step_times(parts.runner, limits, worked)
        times = StepTimes(replace(measured, sizes=parts.steps.recorded(prompts=True)))
    except Exception as error:  # of any kind: an engine serves as well without it
        reason = f"what steps cost could not be measured: {error}"
        _log.warning("no step is bounded by time, and speculation is off: %s", reason)
        return None, obstacle or reason, None
    bound = make_bound(config.max_step_ms, times)
    if obstacle:
        return None, obstacle, bound
    drafter = Drafter(bytes_per_tenant=TENANT_HISTORY_BYTES, total_bytes=HISTORY_BYTES)
    return Speculation(drafter, measured.costs), "", bound


def _copy_lead(device: Device, parts: DeviceParts, bound: StepBound | None) -> CopyLead | None:
    """Return the prediction of first steps. None without a bound of steps, and on a CPU: a copy there takes a core and
    the memory's bandwidth from the step beside it (ADR 0073)."""
    if bound is None or device.kernels.device.type == "cpu":
        return None
    return CopyLead(bound, parts.max_step_tokens)


def _host_slab(config: EngineConfig, place: torch.device, loaded: LoadedModel) -> HostSlab:
    """Host memory for adapters. Raises LoraplexError."""
    layout = loaded.arena.layout
    num_bytes = config.adapter_cpu_memory or host_budget(
        available_memory(torch.device("cpu")) // config.num_sharing
    )
    require_room("--adapter-cpu-memory", num_bytes // layout.page_bytes, layout, layout.page_bytes)
    return HostSlab(num_bytes, layout.page_bytes, pinned=place.type == "cuda")


def _transport(
    config: EngineConfig, opened: _Opened, loaded: LoadedModel, host: HostSlab, wake: Callable[[], None]
) -> ThreadedTransport:
    """The threads that bring adapters from the store to the device."""
    images = None
    if config.image_dir is not None and config.adapter_image_cache:
        key = image_key(loaded.arena.layout, f"{opened.base.fingerprint} {opened.base.quantise}")
        images = ImageFiles(Path(config.image_dir), key, config.adapter_image_cache)
    return ThreadedTransport(
        opened.store, opened.base, loaded.arena, host, wake=wake, threads=LOADER_THREADS, images=images
    )


def _info(
    config: EngineConfig,
    opened: _Opened,
    device: Device,
    parts: DeviceParts,
    host: HostSlab,
    others: int | None,
) -> EngineInfo:
    """`others`: bytes of the device that other programs held before."""
    loaded, kv_size, memory = parts.loaded, parts.kv_size, device.memory
    plan, model, arena = opened.plan, loaded.model, loaded.arena
    return EngineInfo(
        **{each.name: getattr(plan.summary, each.name) for each in fields(plan.summary)},
        model_name=config.model_name or Path(config.model_path).name,
        architecture=opened.base.model_type,
        max_model_len=kv_size.max_model_len,
        eos_ids=opened.ends.ids,
        end_tokens=opened.ends.found,
        device=str(device.kernels.device),
        block_size=BLOCK_SIZE,
        num_kv_blocks=kv_size.num_blocks,
        kv_groups=len(kv_size.needs.windows),
        num_states=kv_size.num_states,
        num_windows=kv_size.num_windows,
        state_bytes=state_bytes(model.shape.caches),
        window_bytes=window_bytes(model.shape.caches),
        kv_bytes=kv_size.num_bytes,
        kv_host_block_bytes=block_bytes(model.shape.caches, plan.kv_dtype),
        arena_page_bytes=arena.layout.page_bytes,
        arena_pages=loaded.num_pages,
        adapter_cpu_bytes=host.num_bytes,
        max_adapter_rank=config.max_adapter_rank,
        max_num_seqs=kv_size.num_windows or config.max_num_seqs,
        max_waiting=config.max_waiting,
        max_num_batched_tokens=parts.max_step_tokens,
        base_fingerprint=opened.base.fingerprint,
        sites=(*arena.layout.site_names, *arena.layout.expert_site_names),
        hidden_size=model.hidden_size,
        four_bit_library=loaded.library,
        numerics=numerical_build(plan, loaded.library),
        recorded_decodes=parts.steps.recorded(prompts=False),
        recorded_prompts=parts.steps.recorded(prompts=True),
        memory=MemoryUse(
            weights=model.weight_bytes,
            arena=arena.num_bytes,
            kv=parts.kv.num_bytes,
            workspace=parts.workspace,
            others=others,
            free=None if memory is None else memory.free(),
            total=None if memory is None else memory.total(),
        ),
    )


def _tell_fallback(reason: str) -> None:
    _log.warning("torch's kernels are used, which are slower: %s", reason)
