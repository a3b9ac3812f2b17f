"""The number of KV blocks that fit into memory, and a KV cache that marks the heartbeat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch

from loraplex.adapters.errors import LoraplexError
from loraplex.engine.control_groups import ControlGroups
from loraplex.engine.execution.first_touch import FirstTouch
from loraplex.engine.heartbeat import StepHeartbeat
from loraplex.engine.kv.cache import KVCache, block_bytes
from loraplex.engine.kv.host_tier import most_of_tenant
from loraplex.engine.kv.layers import BlockNeeds, CacheKind, block_needs
from loraplex.engine.kv.states import most_places, num_snapshots, slot_bytes, state_bytes
from loraplex.engine.model.base import ModelShape
from loraplex.kernels.attention import BLOCK_SIZE

_CPU_FRACTION = 0.3
_CPU_LIMIT = 4 << 30
_USEFUL_STATES = 8
"""The states of one tenant that the recommended host memory has room for, each with a block."""


class SequenceTooLong(LoraplexError):
    """The model was not made for sequences that long."""

    code = "sequence_too_long"


class KVMemoryTooSmall(LoraplexError):
    """The KV cache can't hold what was asked for."""

    code = "kv_memory_too_small"


class KVHostRefused(LoraplexError):
    """Prefixes cannot be kept as the configuration says."""

    code = "kv_host_refused"


def host_slots(num_bytes: int, caches: Sequence[CacheKind], dtype: torch.dtype) -> tuple[int, int]:
    """The slots of a block's size for prefixes in `num_bytes` bytes of host memory, and how many of them a state takes
    (0: no layer keeps one). Raises KVMemoryTooSmall where no block fits, or no state into what one tenant may take."""
    one, state = block_bytes(caches, dtype), state_bytes(caches)
    num_slots, state_slots = num_bytes // one, -(-state // one)
    if not num_slots:
        raise KVMemoryTooSmall(
            f"--kv-host-memory of {num_bytes} bytes holds no block of {one} bytes; raise it"
        )
    if state and state_slots >= most_of_tenant(num_slots):
        raise KVMemoryTooSmall(
            f"--kv-host-memory of {num_bytes} bytes, half of it for one tenant at most, holds no state of {state} "
            f"bytes beside a block; for {_USEFUL_STATES} of them raise it to "
            f"{2 * _USEFUL_STATES * (state_slots + 1) * one}"
        )
    return num_slots, state_slots


@dataclass(frozen=True, slots=True)
class KVSize:
    """The sizes of cache and scheduler."""

    num_blocks: int
    max_model_len: int
    needs: BlockNeeds
    num_states: int
    num_windows: int
    """The sequences that may run at once by their states; 0: no layer keeps one, as many as one likes."""
    num_bytes: int
    """Blocks, states and windows together."""


class WatchedKVCache(KVCache):
    """A KV cache that leaves a sign of life for each layer: whatever decoder runs, it turns to every layer's KV once a
    pass. (On a GPU, that is when the layer's work is queued.) On a CPU its memory is touched ahead of the steps."""

    def __init__(
        self,
        caches: Sequence[CacheKind],
        num_blocks: int,
        dtype: torch.dtype,
        device: torch.device,
        heartbeat: StepHeartbeat,
        *,
        blocks_ahead: int,
        num_states: int = 0,
        num_windows: int = 0,
    ) -> None:
        """`blocks_ahead`: of each group of layers; see `FirstTouch`."""
        super().__init__(caches, num_blocks, dtype, device, num_states, num_windows)
        self._heartbeat = heartbeat
        memory = tuple(chain.from_iterable(self.pools))
        self._first_touch = (
            FirstTouch(memory, blocks_ahead * self.num_groups) if device.type == "cpu" else None
        )
        if self._first_touch is not None:
            self._first_touch.expect(0)

    def layer(self, index: int) -> torch.Tensor:
        self._heartbeat.mark()
        return super().layer(index)

    def expect(self, blocks: torch.Tensor) -> None:
        if self._first_touch is not None and blocks.shape[0]:
            self._first_touch.expect(int(blocks.max()))


def size_kv_cache(
    shape: ModelShape,
    dtype: torch.dtype,
    device: torch.device,
    *,
    kv_cache_memory: int = 0,
    state_cache: int = 0,
    max_model_len: int = 0,
    max_num_seqs: int = 64,
    budget: int | None = None,
    available: int | None = None,
    num_sharing: int = 1,
    most_ahead: int = 1,
) -> KVSize:
    """The number of blocks of a KV cache in `dtype` for `kv_cache_memory` bytes (0: for `budget` bytes; None: a
    share of the `available` bytes; None: of what is free now, for one of `num_sharing` engines), never more than
    `max_num_seqs` sequences can use. Where layers keep states, a state and a window for each of these sequences come
    first, fewer where they would take more than half, and then states for the prefix cache, in `state_cache` bytes (0:
    chosen).

    `most_ahead`: positions of one sequence that steps in flight compute. `max_model_len` 0 means what the model's
    positions and the memory allow. Raises KVMemoryTooSmall where one sequence of an asked `max_model_len` does not fit,
    and where not even one block does; SequenceTooLong for an asked length beyond what the model was made for.
    """
    if max_model_len > shape.max_positions:
        raise SequenceTooLong(
            f"max_model_len {max_model_len} is beyond the {shape.max_positions} positions of the model; lower it"
        )
    one, slot = block_bytes(shape.caches, dtype), slot_bytes(shape.caches)
    if kv_cache_memory or budget is None:
        budget = kv_cache_memory or _choose_budget(device, available, num_sharing)
    wanted = max_model_len or shape.max_positions
    needs = block_needs(shape.caches, most_ahead)
    least = needs.of(max_model_len or 1) * one
    num_windows = most_places(max_num_seqs, slot, budget, least)
    rest, state = budget - num_windows * slot, state_bytes(shape.caches)
    snapshots = num_snapshots(state, rest, least, state_cache) if num_windows else 0
    num_blocks = max(0, rest - snapshots * state) // one
    per_sequence = needs.of(wanted)
    longest = wanted if per_sequence <= num_blocks else needs.longest(num_blocks)
    if longest < (wanted if max_model_len else 1):
        need = max_model_len or 1
        origin = "kv_cache_memory" if kv_cache_memory else "the memory that is free for it"
        remedy = "raise kv_cache_memory" if kv_cache_memory else "free memory, or set kv_cache_memory"
        raise KVMemoryTooSmall(
            f"the KV cache has room for {longest} tokens ({origin}: {_mib(budget)}), a sequence "
            f"of {-(-need // BLOCK_SIZE) * BLOCK_SIZE} needs {_mib(needs.of(need) * one + slot + state)}; {remedy}"
            + (" or lower max_model_len" if max_model_len else "")
        )
    num_blocks = min(num_blocks, (num_windows or max_num_seqs) * per_sequence)
    num_bytes = num_blocks * one + num_windows * slot + snapshots * state
    return KVSize(num_blocks, longest, needs, num_windows + snapshots, num_windows, num_bytes)


def available_memory(device: torch.device) -> int:
    """Bytes that may still be taken on a device; on the CPU, by the machine and by the limits of this process's
    control group."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    known = free_host_memory()
    if known is None:
        raise KVMemoryTooSmall("the free memory of this machine is unknown; set kv_cache_memory")
    return known


def free_host_memory() -> int | None:
    """Bytes that this process may still take of the host's memory; None where that is unknown."""
    limits = (_mem_available(), ControlGroups().free_memory())
    return min((value for value in limits if value is not None), default=None)


def _choose_budget(device: torch.device, available: int | None, num_sharing: int) -> int:
    free = available_memory(device) // num_sharing if available is None else available
    return min(int(free * _CPU_FRACTION), _CPU_LIMIT)


def _mem_available() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text("ascii").splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):.1f} MiB"
