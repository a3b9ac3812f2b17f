"""From an `EngineConfig` to an engine that runs: the one place where the parts are put together."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from loraplex.adapters.admission.base_model import load_base_spec
from loraplex.adapters.cache.adapter_cache import AdapterCache
from loraplex.adapters.device.arena import AdapterArena
from loraplex.adapters.device.host_image import HostImage
from loraplex.adapters.device.host_slab import HostSlab
from loraplex.adapters.device.image_files import ImageFiles, image_key
from loraplex.adapters.device.layout import ArenaLayout
from loraplex.adapters.device.transport import ThreadedTransport
from loraplex.adapters.errors import LoraplexError
from loraplex.adapters.store.open_store import open_store
from loraplex.engine.config import BLOCK_SIZE, EngineConfig, SchedulerConfig
from loraplex.engine.core.engine_core import EngineCore
from loraplex.engine.execution.device_memory import CudaMemory, DeviceMemory
from loraplex.engine.execution.executor import Executor
from loraplex.engine.execution.inputs import Recorder, StepLimits
from loraplex.engine.execution.kv_cache import (
    KVSize,
    WatchedKVCache,
    available_memory,
    block_bytes,
    blocks_of,
    free_host_memory,
    size_kv_cache,
)
from loraplex.engine.execution.runner import ModelRunner
from loraplex.engine.execution.site_probe import SiteProbe
from loraplex.engine.execution.step_preparation import StepPreparation
from loraplex.engine.execution.threads import set_threads
from loraplex.engine.grammar.masks import MaskMaker
from loraplex.engine.grammar.matchers import GrammarMatchers
from loraplex.engine.grammar.tokenizer import load_grammar_tokenizer
from loraplex.engine.grammar.vocabulary import GrammarVocabulary
from loraplex.engine.heartbeat import StepHeartbeat
from loraplex.engine.model.base import KVCache, Model
from loraplex.engine.model.fused import FusedDecoder
from loraplex.engine.model.loading import eos_token_ids, load_model, no_same_bits
from loraplex.engine.model.plans import KeptPlans
from loraplex.engine.numerics import numerical_build, obstacle_to_same_bits
from loraplex.engine.reports import EngineInfo, MemoryUse
from loraplex.engine.sampling.sampler import make_sampler
from loraplex.engine.sizing import (
    adapter_budget,
    arena_size,
    host_budget,
    most_recorded_rows,
    most_sequences,
    most_tokens,
    require_room,
    row_bytes,
    too_large_pools,
)
from loraplex.kernels.backend import (
    Backend,
    BackendUnavailable,
    best_backend,
    describe_failure,
    obstacle_to,
    resolve_backend,
)

_log = logging.getLogger(__name__)
LOADER_THREADS = 2
_MAX_SCORED_BYTES = 64 << 20
"""Of a step's logits that are kept for the log probabilities of prompts, as float32."""


class DeviceUnavailable(LoraplexError):
    """The device that was asked for is not there, or can't run the kernels that were."""

    code = "device_unavailable"


class _CompilationFailed(Exception):
    """The kernels cannot be compiled for this processor."""


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """A core that is ready for its step thread. `close` ends its worker and loader threads."""

    core: EngineCore
    info: EngineInfo
    heartbeat: StepHeartbeat
    runner: ModelRunner
    transport: ThreadedTransport
    grammars: GrammarMatchers

    def close(self) -> None:
        self.grammars.close()
        self.transport.close()
        self.runner.close()


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
    set_threads(config.num_threads)
    device, backend = resolve_kernels(config.device, config.kernels)
    if config.kernels == "auto" and backend == "torch":
        _tell_fallback(obstacle_to(best_backend(device), device) or "")
    # On a CPU all parallel work is the worker's: each thread that does any gets a team of threads of its own, and where
    # teams have more threads than there are cores OpenMP puts them to sleep between any two operations.
    executor = Executor()
    try:
        try:
            return _build(config, wake, on_stage, executor, device, backend, wrap_model, recorder, memory)
        except _CompilationFailed as error:
            if config.kernels != "auto":
                raise DeviceUnavailable(
                    f"--kernels {config.kernels}: {error}; choose auto or torch"
                ) from error
            _tell_fallback(str(error))
        plain = replace(config, kernels="torch")
        return _build(plain, wake, on_stage, executor, device, "torch", wrap_model, recorder, memory)
    except BaseException:
        executor.close()
        raise


def _build(
    config: EngineConfig,
    wake: Callable[[], None],
    on_stage: Callable[[str], None],
    executor: Executor,
    device: torch.device,
    backend: Backend,
    wrap_model: Callable[[Model], Model] | None,
    recorder: Recorder | None,
    memory: DeviceMemory | None,
) -> BuiltEngine:
    if memory is None and device.type == "cuda":
        memory = CudaMemory(device)
    config = replace(config, max_num_seqs=most_sequences(config.max_num_seqs, device.type))
    others = None if memory is None else memory.total() - memory.free()
    model_dir = Path(config.model_path)
    base = load_base_spec(model_dir, cache_dir=None if config.cache_dir is None else Path(config.cache_dir))
    plans = None if config.plan_dir is None else KeptPlans(Path(config.plan_dir))
    model = executor.submit(
        lambda: load_model(
            model_dir,
            device,
            config.dtype,
            max_model_len=config.max_model_len,
            kernels=config.kernels,
            attention=config.attention,
            plans=plans,
            batch_invariant=config.batch_invariant,
        )
    ).result()
    obstacle = obstacle_to_same_bits(backend, model.dtype, batch_invariant=config.batch_invariant)
    if not isinstance(model, FusedDecoder):
        obstacle = no_same_bits(base.model_type)
    if obstacle is not None and config.batch_invariant:
        raise refuse_bits(obstacle)
    if obstacle is not None and device.type == "cpu":
        _log.warning("answers may depend on what is computed beside them: %s", obstacle)
    layout = ArenaLayout(
        model.site_groups,
        model.num_layers,
        model.dtype,
        max_rank=config.max_adapter_rank,
        head=model.head_group,
        embedding=model.embedding_shape,
    )
    num_pages, num_slots = arena_size(
        config.adapter_memory or adapter_budget(available_memory(device), device.type), layout
    )
    host_bytes = config.adapter_cpu_memory or host_budget(available_memory(torch.device("cpu")))
    require_room("--adapter-cpu-memory", host_bytes, layout)
    free = free_host_memory()
    host = HostSlab(host_bytes, layout.page_bytes, pinned=device.type == "cuda")
    arena = executor.submit(
        lambda: AdapterArena(layout, num_pages, num_slots, device, kernels=config.kernels)
    ).result()
    if backend == "numba":
        from loraplex.kernels import numba_warm_up  # takes a second to import
        from loraplex.kernels.numba_runtime.cache import KERNELS

        kind = str(model.dtype).removeprefix("torch.")
        if not KERNELS.is_compiled(kind):
            on_stage(
                "compiling kernels for this processor (once; 10 to 20 s, minutes where the machine is slow)"
            )
        compiling = executor.submit(lambda: KERNELS.compile(kind, lambda: numba_warm_up.warm_up(model.dtype)))
        try:
            compiling.result()
        except Exception as error:  # of any kind: what is compiled depends on the processor
            raise _CompilationFailed(describe_failure("numba", error)) from error
        on_stage("loading")
    heartbeat = StepHeartbeat()
    max_step_tokens = most_tokens(
        config.max_num_batched_tokens,
        device.type,
        row_bytes(model.site_groups, model.dtype.itemsize),
        0 if memory is None else memory.total(),
    )
    blocks_ahead = 2 * -(-max_step_tokens // BLOCK_SIZE)

    def make_kv(num_blocks: int) -> KVCache:
        return executor.submit(
            lambda: WatchedKVCache(
                model.shape, num_blocks, model.dtype, device, heartbeat, blocks_ahead=blocks_ahead
            )
        ).result()

    def size_kv(budget: int | None) -> KVSize:
        return size_kv_cache(
            model.shape,
            model.dtype,
            device,
            kv_cache_memory=config.kv_cache_memory,
            max_model_len=config.max_model_len,
            max_num_seqs=config.max_num_seqs,
            budget=budget,
        )

    images = None
    if config.image_dir is not None and config.adapter_image_cache:
        key = image_key(layout, base.fingerprint)
        images = ImageFiles(Path(config.image_dir), key, config.adapter_image_cache)
    store = open_store(
        config.artifact_url, Path(config.artifact_dir), cache_bytes=config.artifact_cache_bytes
    )
    transport = ThreadedTransport(store, base, arena, host, wake=wake, threads=LOADER_THREADS, images=images)
    cache: AdapterCache[HostImage] = AdapterCache(
        transport=transport,
        num_pages=num_pages,
        num_slots=num_slots,
        host_bytes=host.num_bytes,
        load_timeout_s=config.adapter_load_timeout,
        clock=time.monotonic,
        max_loads=LOADER_THREADS,
    )
    eos_ids = eos_token_ids(model_dir)
    served = model if wrap_model is None else wrap_model(model)
    sampler = make_sampler(
        backend, vocab_size=model.shape.vocab_size, max_rows=config.max_num_seqs, device=device
    )
    vocab_size = model.shape.vocab_size
    grammars = GrammarMatchers(
        lambda: GrammarVocabulary(load_grammar_tokenizer(model_dir, eos_ids), vocab_size), wake
    )
    lookahead = _lookahead(config, device)
    masks = MaskMaker(grammars, vocab_size, lookahead=lookahead > 0)
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    max_scored = max(1, _MAX_SCORED_BYTES // (4 * vocab_size))
    steps = StepPreparation(
        served,
        arena,
        executor,
        sampler,
        recorder=recorder,
        max_scored=max_scored,
        prompt_rows=most_recorded_rows(
            config.recorded_prompt_rows,
            capability,
            model.num_layers,
            model.weight_bytes // model.dtype.itemsize,
        ),
        batch_invariant=config.batch_invariant,
    )
    limits = StepLimits(max_step_tokens, config.max_num_seqs, 0)
    workspace = None
    if memory is None:
        size = size_kv(None)
        pools = {
            "--kv-cache-memory": size.num_blocks * block_bytes(model.shape, model.dtype),
            "--adapter-memory": arena.num_bytes,
            "--adapter-cpu-memory": host_bytes,
        }
        _warn_of_memory(pools, free)
        kv = make_kv(size.num_blocks)
        steps.begin(kv, replace(limits, max_blocks=blocks_of(size.max_model_len)))
    else:
        _warn_of_memory({"--adapter-cpu-memory": host_bytes}, free)
        longest = config.max_model_len or model.shape.max_positions
        limits = replace(limits, max_blocks=blocks_of(longest))
        workspace, budget = steps.measure(memory, make_kv, limits)
        if config.kv_cache_memory > budget:
            _log.warning("--kv-cache-memory leaves less than is needed for the steps: %d bytes would", budget)
        size = size_kv(budget)
        kv = make_kv(size.num_blocks)
        steps.record_again(kv)
    runner = ModelRunner(
        served,
        kv,
        executor,
        eos_ids=eos_ids,
        lora=arena,
        inputs=steps.inputs,
        sampler=sampler,
        masks=masks,
        probe=SiteProbe(arena, served.dtype, served.device),
    )
    if memory is None:
        steps.warm_up(runner)
    else:
        steps.run_largest(runner)
    core = EngineCore(
        SchedulerConfig(
            num_blocks=size.num_blocks,
            max_model_len=size.max_model_len,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=max_step_tokens,
            max_waiting=config.max_waiting,
            max_scored_tokens=max_scored,
            lookahead=lookahead,
        ),
        runner,
        cache,
        eos_ids=eos_ids,
        clock=time.monotonic,
        heartbeat=heartbeat,
        grammars=grammars,
    )
    info = EngineInfo(
        model_name=config.model_name or model_dir.name,
        architecture=base.model_type,
        max_model_len=size.max_model_len,
        vocab_size=model.shape.vocab_size,
        eos_ids=tuple(sorted(eos_ids)),
        device=str(device),
        dtype=str(model.dtype).removeprefix("torch."),
        block_size=BLOCK_SIZE,
        num_kv_blocks=size.num_blocks,
        kv_bytes=size.num_blocks * block_bytes(model.shape, model.dtype),
        arena_page_bytes=layout.page_bytes,
        arena_pages=num_pages,
        adapter_cpu_bytes=host.num_bytes,
        max_adapter_rank=config.max_adapter_rank,
        max_num_seqs=config.max_num_seqs,
        max_waiting=config.max_waiting,
        max_num_batched_tokens=max_step_tokens,
        decoder="fused" if isinstance(model, FusedDecoder) else "transformers",
        attention=model.attention.name,
        attention_reason=model.attention_reason,
        base_fingerprint=base.fingerprint,
        sites=layout.site_names,
        hidden_size=model.hidden_size,
        same_bits=obstacle is None,
        numerics=numerical_build(model, backend, batch_invariant=config.batch_invariant),
        recorded_decodes=steps.recorded(prompts=False),
        recorded_prompts=steps.recorded(prompts=True),
        memory=MemoryUse(
            weights=model.weight_bytes,
            arena=arena.num_bytes,
            kv=kv.tensor.nbytes,
            workspace=workspace,
            others=others,
            free=None if memory is None else memory.free(),
            total=None if memory is None else memory.total(),
        ),
    )
    return BuiltEngine(core, info, heartbeat, runner, transport, grammars)


def resolve_kernels(device: str, kernels: str) -> tuple[torch.device, Backend]:
    """Where and with which kernels an engine runs that is asked for these. Raises DeviceUnavailable."""
    found = resolve_device(device)
    try:
        return found, resolve_backend(kernels, found)
    except BackendUnavailable as error:
        raise DeviceUnavailable(f"--kernels {kernels}: {error}") from error


def refuse_bits(obstacle: str) -> DeviceUnavailable:
    """For --batch-invariant where the kernels cannot promise the same bits."""
    return DeviceUnavailable(
        f"--batch-invariant: {obstacle}; serve without it, or with other --kernels or another --dtype"
    )


def _warn_of_memory(pools: Mapping[str, int], free: int | None) -> None:
    """`pools`: bytes of host memory by the option that sets them. They fill up as they are used for the first time: a
    start that takes more than there is goes well, and the process is killed hours later."""
    reason = too_large_pools(pools, free)
    if reason is not None:
        _log.warning(reason)


def _tell_fallback(reason: str) -> None:
    _log.warning("torch's kernels are used, which are slower: %s", reason)


def resolve_device(asked: str) -> torch.device:
    """Raises DeviceUnavailable."""
    if asked == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if asked == "cuda" and not torch.cuda.is_available():
        raise DeviceUnavailable("--device cuda: torch finds no CUDA device here; use --device cpu or auto")
    return torch.device(asked)


def _lookahead(config: EngineConfig, device: torch.device) -> Literal[0, 1]:
    if config.lookahead == -1:
        return 1 if device.type == "cuda" else 0
    return config.lookahead
