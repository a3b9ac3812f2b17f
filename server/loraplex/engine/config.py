"""The engine's settings: frozen, validated once, passed down."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from loraplex.engine.kv.layers import BlockNeeds

DEFAULT_SEQUENCES = {"cpu": 64, "cuda": 256}
"""Sequences of a step where no setting says, by device."""
MAX_RECORDED_ROWS = 1024
"""Most rows of a recorded step with prompt chunks: larger ones take a GPU longer than the host takes to launch them."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The configuration of an engine process. Sizes are in bytes, tokens or sequences as named; 0 means "choose from
    the machine" where a field says so (see `sizing`)."""

    model_path: str
    """The directory of the base model."""
    artifact_dir: str
    """A store's folder, or the cache of the bucket that `artifact_url` names."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """"auto": a GPU where torch finds one."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """The model's dtype. "auto": the checkpoint's own, where the device computes it."""
    quantise: Literal["none", "int8"] = "none"
    """"int8" serves the base's linears as 8-bit codes."""
    kv_cache_dtype: Literal["auto", "int8"] = "auto"
    """"int8" keeps keys and values as 8-bit codes, "auto" in the model's dtype."""
    max_model_len: int = 0
    """Most positions of a sequence. 0: as many as the model allows."""
    max_num_seqs: int = 0
    """Most sequences of a step. 0: chosen from the machine."""
    max_num_batched_tokens: int = 0
    """Most tokens of a step. 0: chosen from the machine."""
    max_waiting: int = 1024
    """Most requests that wait."""
    kv_cache_memory: int = 0
    """Memory for blocks of keys and values, and for states. 0: chosen from the machine."""
    kv_host_memory: int = 0
    """Host memory for blocks that `kv_cache_memory` has no room for any more. 0: none."""
    kv_disk_dir: str | None = None
    """A folder for blocks behind those in host memory, which outlive the engine; each engine that shares it takes a
    folder in it. None: none."""
    kv_disk_number: int = 0
    """The folder in it that this engine takes if no other has it."""
    kv_disk_bytes: int = 0
    """Most bytes there."""
    kv_disk_key_file: str | None = None
    """The file of the secret by which these blocks are encrypted. None: they are not."""
    state_cache: int = 0
    """The part of `kv_cache_memory` for states. 0: chosen from the model."""
    adapter_memory: int = 0
    """Device memory for adapters. 0: chosen from the machine."""
    adapter_cpu_memory: int = 0
    """Host memory for adapters. 0: chosen from the machine."""
    max_adapter_rank: int = 64
    """The largest rank of an adapter's site."""
    lookahead: Literal[-1, 0, 1] = -1
    """Steps that are planned while one runs. -1: 1 on a GPU and 0 elsewhere."""
    speculation: Literal["auto", "off"] = "auto"
    """"auto" drafts tokens where the start can measure what steps cost."""
    max_step_ms: float = -1.0
    """A bound of a step's time while several tenants are served. 0: none; -1: by what a step of one row takes."""
    num_threads: int = 0
    """Threads of a CPU's kernels. 0: one for each core that the process may use."""
    kernels: Literal["auto", "torch", "numba", "triton"] = "auto"
    """"auto": the best kernels that the device runs."""
    attention: Literal["auto", "triton", "torch"] = "auto"
    """"auto": the attention that goes with the kernels (`loraplex.kernels.attention.choice`)."""
    batch_invariant: bool = False
    """A promise to keep or to refuse (`loraplex.engine.numerics`)."""
    recorded_prompt_rows: int = -1
    """Rows of the largest step with prompt chunks that a GPU records. -1: by the GPU and the model."""
    adapter_load_timeout: float = 60.0
    """Seconds after which a load has failed."""
    cache_dir: str | None = None
    """Keeps results about a base model's weights that take long to find."""
    plan_dir: str | None = None
    """Keeps the plan made of the base's config."""
    image_dir: str | None = None
    """Keeps laid-out adapters."""
    adapter_image_cache: int = 0
    """Most bytes in `image_dir`."""
    num_sharing: int = 1
    """Engines that start together on this machine. Each takes an equal part of what is chosen from it."""
    artifact_url: str = ""
    """The bucket of artifacts. Empty: they are in `artifact_dir`."""
    artifact_cache_bytes: int = 10 << 30
    """Most bytes of a bucket's cache."""
    model_name: str = ""
    """The served name of the base, for messages."""
    turn_ends: tuple[str, ...] = ()
    """The tokens that the model's chat template writes behind an answer."""


@dataclass(frozen=True, slots=True)
class Charges:
    """The prices of the fair queue, in units of service: a prompt token on the base model is one. Whatever was
    computed before and had to be computed again is free. The last two were measured on a CPU
    (SmolLM2-135M: 0.004 to 0.006, and 0.74; there an output token costs 2.2).
    """

    prefill: float = 1.0
    """A prompt token that was computed."""
    decode: float = 2.0
    """An output token."""
    cached: float = 0.1
    """A prompt token whose KV was found in the prefix cache: it takes memory, hardly any work."""
    per_rank: float = 0.005
    """The price of a rank of its adapter, as a share of the token."""
    load_per_rank: float = 0.75
    """Bringing an adapter to the device, for each of its ranks."""

    def price(self, rank: int) -> float:
        """The price of a token on an adapter of this rank (0: the base model), as a multiple of one on the base."""
        return 1.0 + self.per_rank * rank


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """The limits that the scheduler itself works under. `num_blocks` is the KV pool's size in blocks."""

    num_blocks: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_waiting: int
    lookahead: Literal[0, 1] = 0
    max_scored_tokens: int = 128
    """Prompt positions of one step whose logits are kept for log probabilities, [positions, vocabulary] float32. Each
    sequence that asks for them gets one at least."""
    adapter_wait_aging_s: float = 3.0
    """After so long a wait for room on the device, a request's adapter goes before all others."""
    charges: Charges = Charges()
    windows: tuple[int | None, ...] = (None,)
    """Positions that the layers of each group see; None: all. See `loraplex.engine.kv.layers`."""
    num_states: int = 0
    """States, of a model with layers that keep one (`loraplex.engine.kv.states`)."""
    num_host_blocks: int = 0
    """Blocks in host memory, or parts of states (`loraplex.engine.kv.host_tier`)."""
    state_slots: int = 0
    """Those of them whose place a state takes."""
    most_restored_blocks: int = 1
    """Those that come back from there in a step, at most; a state that takes more comes alone."""
    lacks_disk: bool = False
    """Whether there should be a disk behind them, which could not be used."""
    num_windows: int = 0
    """Windows behind states, one for each running sequence; 0: no layer keeps a state."""

    @property
    def block_needs(self) -> BlockNeeds:
        return BlockNeeds(self.windows, (1 + self.lookahead) * self.max_num_batched_tokens)
