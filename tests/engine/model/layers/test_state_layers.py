"""States and windows of layers: their sizes, their views, and how a step lays them out."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from loraplex.engine.execution.batch import StepRows
from loraplex.engine.execution.inputs import PlainInputs
from loraplex.engine.execution.kv_cache import KVMemoryTooSmall, KVSize, size_kv_cache
from loraplex.engine.kv.cache import KVCache, block_bytes
from loraplex.engine.kv.layers import CacheKind, layer_groups
from loraplex.engine.kv.states import slot_bytes, state_bytes
from loraplex.engine.model.base import ModelShape
from loraplex.engine.types import EngineRequest, SamplingParams, ScheduledSequence, StepPlan
from loraplex.kernels.attention.torch_attention import TorchAttention

VOCAB = 61
CPU = torch.device("cpu")
CACHES = (
    CacheKind(1, 8, state_bytes=8, window_bytes=70),
    CacheKind(1, 8),
    CacheKind(0, 0, state_bytes=4, window_bytes=4),
)
"""A layer with blocks and a state, one with blocks, one with a state."""


def test_a_layer_has_its_part_of_each_state_and_blocks_where_it_keeps_keys() -> None:
    kv = KVCache(CACHES, 3, torch.float32, CPU, num_states=4, num_windows=2)
    assert [tuple(kv.state(index).shape) for index in range(3)] == [(4, 64), (4, 0), (4, 64)]
    assert [tuple(kv.window(index).shape) for index in range(3)] == [(2, 128), (2, 0), (2, 64)]
    assert layer_groups(CACHES)[0].layers == (0, 1)
    assert kv.num_bytes == 3 * block_bytes(CACHES, torch.float32) + 4 * 128 + 2 * 192
    kv.state(0).fill_(1)
    kv.state(2)[1::2].fill_(2)
    assert kv.states.sum(1).tolist() == [64, 64 * 3, 64, 64 * 3]
    assert KVCache(CACHES[1:2], 3, torch.float32, CPU).states.numel() == 0


def test_places_are_sized_beside_the_blocks() -> None:
    shape = ModelShape(
        (CacheKind(2, 8), CacheKind(0, 0, state_bytes=1 << 19, window_bytes=1 << 19)), VOCAB, 1 << 15
    )
    block, slot, state = 16 * 2 * 2 * 8 * 4, 1 << 20, 1 << 19
    assert (block_bytes(shape.caches, torch.float32), slot_bytes(shape.caches)) == (block, slot)
    assert state_bytes(shape.caches) == state

    def size(memory: int, **asked: int) -> tuple[int, int, int]:
        found = size_kv_cache(
            shape,
            torch.float32,
            CPU,
            kv_cache_memory=memory,
            max_num_seqs=8,
            most_ahead=64,
            state_cache=1,
            **asked,
        )
        assert found.num_states == found.num_windows + 1
        assert found.num_bytes == found.num_blocks * block + found.num_windows * slot + state <= memory
        return found.num_windows, found.num_blocks, found.max_model_len

    assert size(100 << 20) == (8, 8 * (1 << 15) // 16, 1 << 15)
    assert size(8 << 20) == (4, (7 << 19) // block, 16 * ((7 << 19) // block))  # not more than half
    assert size(2 << 20) == (1, (1 << 19) // block, 16 * ((1 << 19) // block))
    need = 1024 // 16 * block + slot + state
    assert size(need, max_model_len=1024) == (1, 64, 1024)
    with pytest.raises(KVMemoryTooSmall, match=f"a sequence of 1024 needs {need / (1 << 20):.1f} MiB"):
        size(need - 1, max_model_len=1024)
    with pytest.raises(KVMemoryTooSmall, match="room for 0 tokens"):
        size(slot - 1)


def test_windows_and_snapshots_are_sized_beside_the_blocks() -> None:
    shape = ModelShape(
        (CacheKind(2, 8), CacheKind(0, 0, state_bytes=1 << 20, window_bytes=64)), VOCAB, 1 << 10
    )

    def size(state_cache: int) -> KVSize:
        return size_kv_cache(
            shape, torch.float32, CPU, kv_cache_memory=40 << 20, state_cache=state_cache, max_num_seqs=8,
            max_model_len=1024, most_ahead=64,
        )  # fmt: skip

    for asked, snapshots in ((1, 1), (5 << 20, 5), (1 << 40, 31)):
        assert size(asked).num_states == 8 + snapshots, asked
    found = size(0)
    block = block_bytes(shape.caches, torch.float32)
    assert (found.num_windows, found.num_states) == (8, 8 + 7)  # a quarter of what is left
    assert found.num_bytes == found.num_blocks * block + 15 * (1 << 20) + 8 * 64 <= 40 << 20
    kv = KVCache(shape.caches, 3, torch.float32, CPU, found.num_states, found.num_windows)
    assert (kv.state(1).shape, kv.window(1).shape) == ((15, 1 << 20), (8, 64))
    assert kv.num_bytes == 3 * block + 15 * (1 << 20) + 8 * 64


def test_two_slices_of_a_sequence_are_one_unit() -> None:
    def part(
        name: str, start: int, count: int, slot: int, state: int, targets: tuple[int, ...]
    ) -> ScheduledSequence:
        request = EngineRequest(name, "t", (1,) * 40, SamplingParams(4))
        return ScheduledSequence(
            request, 0, 0, start, count, (1,) * count, (0, 1, 2), slot, False, False, 0,
            window_slot=ord(name) - ord("a"), state=state, state_targets=targets,
        )  # fmt: skip

    plan = StepPlan(
        1, (part("a", 0, 18, -1, 4, (5,)), part("b", 20, 1, -1, 2, ()), part("a", 18, 15, 0, 5, (6,)))
    )
    inputs = PlainInputs(CPU, TorchAttention(1, 8, torch.float32, CPU), NoAdapters())
    recurrent = StepRows(plan, VOCAB).send(inputs).recurrent
    assert recurrent is not None
    first, second = recurrent.units
    assert (first.rows, first.start, first.window, first.state) == ((*range(18), *range(19, 34)), 0, 0, 4)
    assert (tuple(first.targets), list(second.rows), second.start) == ((5, 6), [18], 20)


class NoAdapters:
    """An arena without an adapter."""

    def lora_pass(self, segments: Any, num_rows: int) -> None:
        return None

    head_pass = expert_pass = lora_pass

    def token_pass(self, *given: Any) -> None:
        return None
