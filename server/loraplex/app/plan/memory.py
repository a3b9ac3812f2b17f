"""How a device's memory is divided: by the functions that a start of the server calls."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from loraplex.adapters.device.layout import ArenaLayout
from loraplex.adapters.errors import LoraplexError
from loraplex.app.plan.devices import MIB, PlannedDevice
from loraplex.app.plan.expert_forms import ExpertPlan, obstacle_to_experts, plan_experts, whole_adapter
from loraplex.engine.devices import choose_lookahead
from loraplex.engine.execution.device_memory import headroom
from loraplex.engine.execution.kv_cache import KVSize, host_slots, size_kv_cache
from loraplex.engine.kv.cache import block_bytes
from loraplex.engine.kv.layers import BlockNeeds, block_needs
from loraplex.engine.kv.states import slot_bytes, state_bytes, window_bytes
from loraplex.engine.model.outline import ModelOutline
from loraplex.engine.sizing import (
    MAX_SLOTS,
    adapter_layout,
    arena_bytes,
    arena_size,
    host_budget,
    most_recorded_rows,
    most_sequences,
    most_tokens,
    page_cost,
    row_bytes,
    table_bytes,
)
from loraplex.kernels.lora.site_groups import EMBEDDING, HEAD

RESERVES = {"cuda": 1536 * MIB, "cpu": 1024 * MIB}
"""An allowance, not a computation: on a GPU the CUDA context, the libraries' workspaces and the CUDA graphs; on a CPU
the processes with their libraries."""
_SCORED_BYTES = 64 * MIB
_CONTEXTS = tuple(512 << step for step in range(10))


class PlanDoesNotFit(LoraplexError):
    """The message says what does not fit, and what would."""

    code = "plan_does_not_fit"


@dataclass(frozen=True, slots=True)
class Wanted:
    """The memory that the operator asks for: `adapters` of the server, on the device or in host memory. `sites` empty:
    every linear of a layer. `experts`: the form in which they are on routed experts too, of `EXPERT_FORMS`;
    "none": they are not. Sizes in tokens; 0: chosen. `kv_cache_dtype`, `state_cache` and `kv_host_memory`: the settings
    of these names."""

    adapters: int
    rank: int
    sites: tuple[str, ...] = ()
    experts: str = "none"
    context: int = 1024
    max_model_len: int = 0
    max_num_seqs: int = 0
    kv_cache_dtype: str = "auto"
    state_cache: int = 0
    kv_host_memory: int = 0


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """How the memory is divided. Sizes in bytes."""

    wanted: Wanted
    sites: tuple[str, ...]
    weights: int
    reserve: int
    activations: int
    arena: int
    """Device memory for adapters."""
    arena_tables: int
    """The part of it that says where adapters on routed experts lie."""
    arena_pages: int
    page: int
    adapter: int
    """One adapter of the wanted rank."""
    adapter_on_experts: int
    """The part of those bytes on routed experts."""
    resident: int
    """Such adapters that fit on the device."""
    in_host: int
    """Such adapters that fit into `host`."""
    host: int
    """Host memory for adapters; 0 where the host is not known and no adapter waits."""
    waiting: int
    """Wanted adapters that are in host memory alone."""
    kv: int
    """Blocks, and states and windows where layers keep them."""
    kv_setting: int
    """The setting. Sequences may use less of it."""
    kv_blocks: int
    kv_host_blocks: int
    """Blocks of prefixes in host memory, and those of them whose place a state takes."""
    kv_host_state: int
    block: int
    states: int
    """Those of running sequences, and those that prefixes are found by."""
    state: int
    windows: int
    """One for each running sequence."""
    window: int
    needs: BlockNeeds
    max_model_len: int
    total: int
    free: int
    places: tuple[tuple[int, int], ...]
    """(Context length, sequences that run at once)."""
    experts: ExpertPlan | None = None
    """None where the model has no routed experts."""
    settings: dict[str, str | int] = field(default_factory=dict)


def divide_memory(
    model: ModelOutline, device: PlannedDevice, wanted: Wanted, host_free: int | None
) -> MemoryPlan:
    """`host_free`: host memory behind the weights and the processes, None where it is not known. Raises PlanDoesNotFit
    and what a start raises: KVMemoryTooSmall, SequenceTooLong, AdapterMemoryTooSmall."""
    target = torch.device(device.kind)
    block, slot = block_bytes(model.shape.caches, model.kv_dtype), slot_bytes(model.shape.caches)
    wanted = replace(wanted, max_num_seqs=most_sequences(wanted.max_num_seqs, device.kind))
    layout = adapter_layout(model, _max_rank(wanted))
    sites = _sites(model, layout, wanted)
    adapter, on_experts = _adapter_sizes(model, layout, wanted, sites)
    reserve, weights = RESERVES[device.kind], model.weight_bytes
    tokens = most_tokens(0, device.kind, row_bytes(model.site_groups, model.dtype.itemsize), device.memory)
    recorded = most_recorded_rows(-1, device.capability, model.shape.num_layers, model.num_weights)
    activations = _activations(model, tokens, min(recorded, tokens), wanted.max_num_seqs)
    prefixes = wanted.kv_host_memory if device.kind == "cpu" else 0  # a CPU has one memory for both
    free = device.memory - reserve - weights - prefixes
    if free <= activations:
        raise PlanDoesNotFit(
            f"the weights take {_gib(weights)}, and {device.name} has {_gib(device.memory)}, of them "
            f"{_gib(reserve + activations + prefixes)} for the rest of a server: a device of at least "
            f"{_gib(weights + reserve + activations + prefixes + adapter + block + slot)} is needed."
        )
    most_ahead = tokens * (1 + choose_lookahead(-1, target))
    needs = block_needs(model.shape.caches, most_ahead)
    needed = needs.of(max(wanted.context, wanted.max_model_len)) * block + slot
    if host_free is not None:
        host_free = max(0, host_free - prefixes)
    on_device, host = _share(device, wanted, layout, adapter, free - activations, needed, host_free)
    wanted_pages = max(on_device * adapter, layout.smallest_full_bytes) // layout.page_bytes
    budget = _whole_mib(wanted_pages * page_cost(layout), layout.page_bytes)
    pages, slots = arena_size(budget, layout)
    arena = arena_bytes(pages, layout)
    size, kv_budget = _kv_size(model, wanted, target, free - arena, device, activations, most_ahead)
    if host is not None:
        host = _whole_mib(max(host, layout.smallest_full_bytes), 1)
    settings: dict[str, str | int] = {
        "device": device.kind,
        "dtype": str(model.dtype).removeprefix("torch."),
        "adapter_memory": f"{budget // MIB}MiB",
        "kv_cache_memory": f"{kv_budget // MIB}MiB",
        "max_num_seqs": wanted.max_num_seqs,
        "max_adapter_rank": _max_rank(wanted),
    }
    if host is not None:
        settings["adapter_cpu_memory"] = f"{host // MIB}MiB"
    settings |= _asked(wanted)
    return MemoryPlan(
        wanted=wanted,
        sites=sites,
        weights=weights,
        reserve=reserve,
        activations=activations,
        arena=arena,
        arena_tables=table_bytes(pages, layout),
        arena_pages=pages,
        page=layout.page_bytes,
        adapter=adapter,
        adapter_on_experts=on_experts,
        resident=min(pages * layout.page_bytes // adapter, slots),
        in_host=(host or 0) // adapter,
        host=host or 0,
        waiting=wanted.adapters - on_device,
        kv=size.num_bytes,
        kv_setting=kv_budget,
        kv_blocks=size.num_blocks,
        **_on_host(model, wanted),
        block=block,
        states=size.num_states,
        state=state_bytes(model.shape.caches),
        windows=size.num_windows,
        window=window_bytes(model.shape.caches),
        needs=size.needs,
        max_model_len=size.max_model_len,
        total=device.memory,
        free=free - arena - size.num_bytes - activations,
        places=_places(size, size.num_windows or wanted.max_num_seqs),
        experts=plan_experts(model, layout, wanted.rank, sites, (pages, slots)),
        settings=settings,
    )


def _asked(wanted: Wanted) -> dict[str, str | int]:
    """The settings that are as the operator asked."""
    asked: dict[str, str | int] = {"state_cache": wanted.state_cache, "max_model_len": wanted.max_model_len}
    asked["kv_host_memory"] = wanted.kv_host_memory
    if wanted.kv_cache_dtype != "auto":
        asked["kv_cache_dtype"] = wanted.kv_cache_dtype
    return {name: value for name, value in asked.items() if value}


def _share(
    device: PlannedDevice,
    wanted: Wanted,
    layout: ArenaLayout,
    adapter: int,
    free: int,
    needed: int,
    host_free: int | None,
) -> tuple[int, int | None]:
    """Adapters on the device, and bytes of host memory for adapters (None: unknown). `free` bytes are for adapters and
    KV cache, `needed` of them for one sequence.

    All are on the device where they fit beside it. Else adapters take half of what is free, and host memory has a copy
    of each, because those that were used last keep theirs. Raises PlanDoesNotFit."""
    unit = max(MIB, layout.page_bytes)

    def fit(num_bytes: int) -> int:
        whole = (num_bytes - layout.page_bytes) // unit * unit // page_cost(layout) * layout.page_bytes
        return whole // adapter if whole >= layout.smallest_full_bytes else 0

    most = fit(free - needed)
    if wanted.adapters <= min(most, MAX_SLOTS):
        return wanted.adapters, None if host_free is None else host_budget(host_free)
    host = wanted.adapters * adapter
    room = free if host_free is None else free - host  # a CPU has one memory for both
    on_device = min(max(1, fit(room // 2)), fit(room - needed), MAX_SLOTS)
    if on_device > 0:
        return on_device, host
    fewer = min(most, wanted.adapters - 1)
    remedy = f"{fewer} adapters of rank {wanted.rank} fit" if fewer > 0 else "a shorter --context may fit"
    raise PlanDoesNotFit(
        f"{wanted.adapters} adapters of rank {wanted.rank} take {_gib(host)}, and leave {_gib(max(0, free - host))} of "
        f"{device.name}'s {_gib(device.memory)} for the KV cache; one sequence of "
        f"{max(wanted.context, wanted.max_model_len)} tokens needs {_gib(needed)}: {remedy}."
    )


def _kv_size(
    model: ModelOutline,
    wanted: Wanted,
    target: torch.device,
    kv_free: int,
    device: PlannedDevice,
    activations: int,
    most_ahead: int,
) -> tuple[KVSize, int]:
    """The KV cache that a start would choose of `kv_free` bytes, less if the activations need more than that leaves;
    and the setting, in whole MiB, that gives it."""
    least = block_bytes(model.shape.caches, model.kv_dtype) + slot_bytes(model.shape.caches)
    # A start measures what is an estimate here.
    left = max(least, kv_free - activations - headroom(device.memory))

    def sized(budget: int) -> KVSize:
        return size_kv_cache(
            model.shape,
            model.kv_dtype,
            target,
            kv_cache_memory=budget,
            state_cache=wanted.state_cache,
            max_model_len=wanted.max_model_len,
            max_num_seqs=wanted.max_num_seqs,
            budget=left if target.type == "cuda" else None,
            available=kv_free,
            most_ahead=most_ahead,
        )

    chosen = min(sized(0).num_bytes, kv_free - activations)
    budget = chosen // MIB * MIB
    return sized(budget), budget


def _on_host(model: ModelOutline, wanted: Wanted) -> dict[str, int]:
    """Blocks in host memory, and the size of a state in blocks; a start refuses what this refuses."""
    if not wanted.kv_host_memory:
        return {"kv_host_blocks": 0, "kv_host_state": 0}
    num_slots, of_state = host_slots(wanted.kv_host_memory, model.shape.caches, model.kv_dtype)
    return {"kv_host_blocks": num_slots, "kv_host_state": of_state}


def _sites(model: ModelOutline, layout: ArenaLayout, wanted: Wanted) -> tuple[str, ...]:
    known = layout.site_names
    if not wanted.sites:
        return tuple(site for site in known if site not in (HEAD, EMBEDDING))
    unknown = [site for site in wanted.sites if site not in known]
    if unknown:
        raise PlanDoesNotFit(
            f"--target-modules {','.join(unknown)}: a {model.model_type} has {', '.join(known)}."
        )
    return wanted.sites


def _adapter_sizes(
    model: ModelOutline, layout: ArenaLayout, wanted: Wanted, sites: tuple[str, ...]
) -> tuple[int, int]:
    """Bytes of a wanted adapter, and its part on routed experts. Raises PlanDoesNotFit."""
    if wanted.experts != "none" and (obstacle := obstacle_to_experts(model)):
        raise PlanDoesNotFit(f"--experts {wanted.experts}: {obstacle}.")
    adapter = whole_adapter(layout, wanted.rank, sites, wanted.experts)
    return adapter, adapter - whole_adapter(layout, wanted.rank, sites, "none")


def _max_rank(wanted: Wanted) -> int:
    return max(64, wanted.rank)


def _activations(model: ModelOutline, tokens: int, recorded: int, sequences: int) -> int:
    """An estimate of the largest step's tensors: a layer's, also of the largest recorded step, whose memory is its own,
    and the logits with what the sampler makes of them."""
    layer = (tokens + recorded) * (6 * model.hidden_size + 3 * model.inner_size) * model.dtype.itemsize
    logits = sequences * model.shape.vocab_size * (model.dtype.itemsize + 2 * 4)
    return layer + logits + _SCORED_BYTES


def _places(size: KVSize, max_num_seqs: int) -> tuple[tuple[int, int], ...]:
    contexts = [length for length in _CONTEXTS if length < size.max_model_len]
    return tuple(
        (length, min(max_num_seqs, size.needs.at_once(length, size.num_blocks)))
        for length in (*contexts, size.max_model_len)
    )


def _whole_mib(num_bytes: int, unit: int) -> int:
    """The least size of `num_bytes` or more in whole MiB and whole units (a power of two)."""
    step = max(MIB, unit)
    return -(-num_bytes // step) * step


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.2f} GiB"
