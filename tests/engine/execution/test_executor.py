"""One worker, in order, that survives what it runs; and how large a KV cache becomes."""

from __future__ import annotations

import threading

import pytest
import torch

from loraplex.engine.execution.executor import Executor
from loraplex.engine.execution.kv_cache import (
    KVMemoryTooSmall,
    SequenceTooLong,
    available_memory,
    size_kv_cache,
)
from loraplex.engine.kv.cache import block_bytes
from loraplex.engine.kv.layers import CacheKind
from loraplex.engine.model.base import ModelShape

SHAPE = ModelShape((CacheKind(kv_heads=3, head_dim=64),) * 30, vocab_size=49152, max_positions=8192)
CPU = torch.device("cpu")
ONE = 16 * 30 * 2 * 3 * 64 * 2


def test_work_runs_in_order_on_one_thread_that_is_not_ours():
    executor, ran = Executor(), []
    futures = [executor.submit(lambda i=i: ran.append((i, threading.get_ident()))) for i in range(50)]
    for future in futures:
        future.result()
    assert [i for i, _ in ran] == list(range(50))
    assert {thread for _, thread in ran}.isdisjoint({threading.get_ident()})
    assert len({thread for _, thread in ran}) == 1
    executor.close()


def test_an_exception_belongs_to_its_work():
    executor = Executor()

    def leave():
        raise SystemExit("not the worker")

    bad, good = executor.submit(leave), executor.submit(lambda: 5)
    with pytest.raises(SystemExit):
        bad.result()
    assert good.result() == 5
    executor.close()
    with pytest.raises(RuntimeError):
        executor.submit(lambda: 5)


def size(**options):
    return size_kv_cache(SHAPE, torch.bfloat16, CPU, **options)


def test_blocks_from_an_asked_size():
    assert block_bytes(SHAPE.caches, torch.bfloat16) == ONE
    got = size(kv_cache_memory=600 * ONE + 5, max_model_len=1024)
    assert (got.num_blocks, got.max_model_len) == (600, 1024)


def test_never_more_than_the_sequences_can_use():
    assert size(kv_cache_memory=1 << 40, max_model_len=100, max_num_seqs=3).num_blocks == 3 * 7


def test_a_bounded_share_of_what_is_free():
    assert size(available=1 << 30).num_blocks == int((1 << 30) * 0.3) // ONE
    assert size(available=1 << 40).num_blocks == (4 << 30) // ONE
    assert 0 < available_memory(CPU) < 1 << 50


def test_a_length_that_nobody_asked_for_shrinks_to_what_fits():
    assert size(kv_cache_memory=10 * ONE).max_model_len == 160


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kv_cache_memory": 10 * ONE, "max_model_len": 161}, "raise kv_cache_memory or lower max_model_len"),
        ({"kv_cache_memory": ONE - 1}, "raise kv_cache_memory"),
        ({"available": ONE, "max_model_len": 16}, "free memory"),
    ],
)
def test_too_small_says_what_to_do(options, words):
    with pytest.raises(KVMemoryTooSmall, match=words):
        size(**options)


def test_a_length_beyond_the_model_is_refused():
    with pytest.raises(SequenceTooLong, match="8192 positions"):
        size(max_model_len=8193)
