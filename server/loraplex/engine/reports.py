"""Reports of an engine: its sizes at the start, its gauges and counters, its adapters."""

from __future__ import annotations

from dataclasses import dataclass, field

from loraplex.adapters.cache.residency import CacheUsage
from loraplex.adapters.cache.tenant_memory import TenantBytes
from loraplex.adapters.end_tokens import EndToken
from loraplex.adapters.pooled import Head

STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384)
"""The sizes by which `EngineStats` counts steps: the bounds of vLLM's vllm:iteration_tokens_total."""

EXPERTS_TOUCHED = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
EXPERT_IMBALANCE = (1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 16.0, 32.0)
"""The bounds by which `ExpertStats` counts steps."""

DRAFT_SOURCES = ("own", "history")
"""The sources of drafted tokens: the sequence itself, and earlier answers of the same tenant and version."""


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes of the device's memory by what takes them, as the start left it. `workspace`: recordings, inputs, and the
    tensors of the largest step. `others`: what other processes and the driver had before. On a CPU the pools may take
    their memory later, and what is None is not known."""

    weights: int
    arena: int
    kv: int
    workspace: int | None = None
    others: int | None = None
    free: int | None = None
    total: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSummary:
    """The part of a `ModelPlan` that needs no torch to be read."""

    vocab_size: int
    dtype: str
    decoder: str = ""
    """Which implementation runs the model: "fused" or "transformers"."""
    attention: str = ""
    """The kernel of its attention, by the name of the setting's choices or "numba"."""
    attention_reason: str = ""
    """Why, in words."""
    quantise: str = "none"
    """The setting of this name: how the base's linears are kept."""
    kv_cache_dtype: str = ""
    """The dtype of keys and values; "int8" is that of codes with scales."""
    stored_codes: str = ""
    """The format of a checkpoint that is quantised itself, for example "gptq int4"."""
    activations: str = ""
    """The form of what its linears of codes are multiplied with: "int8", in groups of 32, or empty for the dtype."""
    same_bits: bool = False
    """Whether a request's tokens are promised not to depend on what is computed beside it."""
    head: Head | None = None
    """The head of a checkpoint that classifies itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo(ModelSummary):
    """The properties of a started engine. Sizes in bytes, tokens, blocks or pages as named."""

    model_name: str
    architecture: str
    max_model_len: int
    eos_ids: tuple[int, ...]
    device: str
    block_size: int
    num_kv_blocks: int
    """Blocks of `block_size` tokens in one of `kv_groups` groups of layers."""
    kv_bytes: int
    """The KV blocks, the states and their windows."""
    arena_page_bytes: int
    arena_pages: int
    adapter_cpu_bytes: int
    max_adapter_rank: int
    max_num_seqs: int
    max_waiting: int
    kv_groups: int = 1
    max_num_batched_tokens: int = 0
    num_states: int = 0
    """States of `state_bytes` each, of a model with layers that keep one; each running sequence has one at least."""
    num_windows: int = 0
    """Windows of `window_bytes` each behind states that are found again: one for each running sequence."""
    state_bytes: int = 0
    window_bytes: int = 0
    kv_host_block_bytes: int = 0
    """Bytes of a block in host memory."""
    prefix_form: str = ""
    """Prefixes are handed on between engines that have the same; empty: between no others and this one."""
    base_fingerprint: str = ""
    four_bit_library: str = ""
    """The library, with its version, that multiplies with those of its form; empty for the engine's own kernels."""
    sites: tuple[str, ...] = ()
    """Module names that adapters may target, for example "q_proj"."""
    hidden_size: int | None = None
    """Numbers in an embedding; None where the model gives none."""
    numerics: str = ""
    """The digest of `loraplex.engine.numerics.numerical_build`."""
    recorded_decodes: tuple[int, ...] = ()
    """Numbers of rows that decoding steps are recorded for on a GPU, and steps with prompt chunks."""
    recorded_prompts: tuple[int, ...] = ()
    speculation: bool = False
    """Whether tokens are drafted, and verified several a step."""
    speculation_reason: str = ""
    """Why not, in words."""
    max_step_ms: float = 0.0
    """Milliseconds that a step may take while several tenants are served, as predicted; 0: there is no bound."""
    memory: MemoryUse | None = None
    end_tokens: tuple[EndToken, ...] = ()
    """The tokens of `eos_ids`, and who says that they end a turn."""


@dataclass(frozen=True, slots=True)
class TenantStats:
    """One tenant's share as the fair queue sees it. `counter` is its virtual token counter."""

    running: int = 0
    waiting: int = 0
    counter: float = 0.0


@dataclass(frozen=True, slots=True)
class SpeculationCounts:
    """Drafted tokens that were verified, and those of them that were accepted, by source."""

    drafted: dict[str, int] = field(default_factory=dict)
    accepted: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class KVHostCounts:
    """Blocks of prefixes that were written to host memory and restored from there, that were evicted there, and that
    were not written since their version was deleted (with states); the seconds that requests waited for theirs; and
    states."""

    written: int = 0
    restored: int = 0
    evicted: int = 0
    refused: int = 0
    restore_s: float = 0.0
    states_written: int = 0
    states_restored: int = 0
    states_evicted: int = 0


@dataclass(frozen=True, slots=True)
class KVDiskCounts:
    """Blocks of prefixes that were written to the disk and restored from there, that were evicted there, that were not
    written (a full queue or disk, an error, an erased owner), and whose file was damaged; and requests that did not
    get theirs in time."""

    written: int = 0
    restored: int = 0
    evicted: int = 0
    refused: int = 0
    damaged: int = 0
    late: int = 0


@dataclass(frozen=True, slots=True)
class ExpertStats:
    """Steps of a mixture of experts by what its routers chose, as the mean over its layers; empty for other models.
    Steps are counted as `EngineStats.steps_by_tokens` counts them, and the numbers of all steps are summed."""

    touched: tuple[int, ...] = ()
    """Steps by the experts of a layer that got a row: of up to each of `EXPERTS_TOUCHED`."""
    touched_sum: float = 0.0
    imbalance: tuple[int, ...] = ()
    """Steps by the rows of a layer's busiest expert over the mean of those that got any: of up to each of
    `EXPERT_IMBALANCE`."""
    imbalance_sum: float = 0.0


@dataclass(frozen=True, slots=True)
class EngineStats(CacheUsage):
    """Gauges of this moment and counters since the engine process began, those of the adapter cache too. Prefix-cache
    figures in tokens."""

    num_running: int = 0
    num_waiting: int = 0
    num_waiting_for_grammar: int = 0
    """Those of them whose grammar is being built."""
    num_kv_blocks: int = 0
    num_kv_blocks_used: int = 0
    num_states_used: int = 0
    """States that sequences hold."""
    num_snapshots: int = 0
    """States that no sequence holds, by which prefixes are found."""
    num_kv_host_blocks: int = 0
    """Blocks in host memory, and those of them that hold a prefix."""
    num_kv_host_blocks_used: int = 0
    kv_host: KVHostCounts = KVHostCounts()
    kv_disk_bytes: int = 0
    """Bytes on the disk for prefixes, and those of them that are used."""
    kv_disk_bytes_used: int = 0
    num_kv_disks_off: int = 0
    """Engines whose disk is left alone for a while."""
    kv_disk: KVDiskCounts = KVDiskCounts()
    num_preemptions: int = 0
    num_out_of_memory: int = 0
    """Steps that did not fit into the device's memory."""
    num_steps: int = 0
    steps_by_tokens: tuple[int, ...] = ()
    """Steps that were computed, by tokens: of up to each of `STEP_TOKENS`, and above the bound before it; last, of
    more than all. A step's tokens are the prompt tokens that it computes and the output tokens that it draws."""
    num_step_tokens: int = 0
    """The tokens of those steps."""
    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    num_adapter_waits: int = 0
    """Ended sequences that waited in the queue for their adapter, and what they waited together."""
    adapter_wait_s: float = 0.0
    reserved_bytes: int = 0
    """Device memory that the reservations of the tenants seen so far ask for, and the most that they can be kept."""
    reservable_bytes: int = 0
    tenant_bytes: dict[str, TenantBytes] = field(default_factory=dict)
    """Bytes of each tenant's adapters."""
    running_adapters: tuple[str, ...] = ()
    """Digests of the adapters with a running sequence."""
    waiting_adapters: tuple[str, ...] = ()
    tenants: dict[str, TenantStats] = field(default_factory=dict)
    speculation: SpeculationCounts = SpeculationCounts()
    experts: ExpertStats = ExpertStats()
