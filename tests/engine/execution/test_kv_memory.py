"""The KV cache's memory."""

from __future__ import annotations

import ctypes
import mmap
import threading
from pathlib import Path

import pytest
import torch

from loraplex.engine.execution.first_touch import FirstTouch
from loraplex.engine.execution.kv_cache import WatchedKVCache, size_kv_cache
from loraplex.engine.heartbeat import StepHeartbeat
from loraplex.engine.kv.cache import KVCache, block_bytes
from loraplex.engine.kv.layers import CacheKind
from loraplex.engine.model.base import ModelShape


def resident_mib() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 >> 20


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="it is Linux that tells")
def test_a_cache_takes_memory_as_it_is_written() -> None:
    before = resident_mib()
    cache = KVCache((CacheKind(4, 64),) * 4, 1 << 13, torch.bfloat16, torch.device("cpu"))
    assert cache.tensor.nbytes == 1 << 29
    assert resident_mib() - before < 64
    assert cache.tensor.data_ptr() % 64 == 0
    assert cache.tensor.is_contiguous()
    for layer in range(4):
        assert not cache.layer(layer)[5000].any()
    cache.layer(2)[5000] = 1.5
    assert cache.layer(2)[4999:5002].float().sum() == 1.5 * 16 * 2 * 4 * 64
    cache.clear_blocks(torch.tensor([5000]))
    assert not cache.layer(2)[4999:5002].any()


def test_a_pool_holds_nearly_twice_the_sequences_as_codes() -> None:
    for head_dim, times in ((64, 1.93), (128, 1.96), (256, 1.98)):
        shape = ModelShape((CacheKind(2, head_dim),) * 4, 100, 1 << 17)
        blocks = {}
        for dtype in (torch.bfloat16, torch.int8):
            size = size_kv_cache(
                shape,
                dtype,
                torch.device("cpu"),
                kv_cache_memory=1 << 30,
                max_model_len=1024,
                max_num_seqs=1 << 20,
            )
            blocks[dtype] = size.num_blocks
            cache = KVCache(shape.caches, 3, dtype, torch.device("cpu"))
            assert cache.tensor.nbytes == 3 * block_bytes(shape.caches, dtype)
            assert size.num_blocks * block_bytes(shape.caches, dtype) <= 1 << 30
        assert blocks[torch.int8] >= times * blocks[torch.bfloat16]


def is_resident(tensor: torch.Tensor) -> bool:
    """Whether all pages are in memory."""
    first = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    size = tensor.data_ptr() + tensor.nbytes - first
    pages = ctypes.create_string_buffer(-(-size // mmap.PAGESIZE))
    assert not ctypes.CDLL(None).mincore(ctypes.c_void_p(first), ctypes.c_size_t(size), pages)
    return all(byte & 1 for byte in pages.raw)


def test_memory_is_touched_ahead_of_the_highest_block_in_use() -> None:
    probe = mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        probe.madvise(23)  # MADV_POPULATE_WRITE
    except OSError:
        pytest.skip("this kernel touches no memory on request")
    blocks = 2048  # of 16 KiB in a layer
    cache = KVCache((CacheKind(4, 64),) * 3, blocks, torch.bfloat16, torch.device("cpu"))
    cache.layer(1)[100] = 2.0
    touch = FirstTouch(cache.pools[0], ahead=256)
    touch.expect(0)
    touch.wait()
    assert all(is_resident(cache.layer(layer)[:256]) for layer in range(3))
    assert not any(is_resident(cache.layer(layer)[1024:]) for layer in range(3))
    assert bool((cache.layer(1)[100] == 2.0).all())  # what was written stays
    assert not cache.layer(1)[99].any()
    touch.expect(1000)
    touch.wait()
    assert all(is_resident(cache.layer(layer)[:1256]) for layer in range(3))
    touch.expect(blocks - 1)
    touch.wait()
    assert all(is_resident(cache.layer(layer)) for layer in range(3))


def test_blocks_of_all_groups_are_touched_ahead() -> None:
    caches = (
        CacheKind(4, 64),
        *(CacheKind(4, 64, window=64),) * 3,
    )  # blocks of 16 KiB, 128 are touched at a time
    cache = WatchedKVCache(
        caches, 2048, torch.bfloat16, torch.device("cpu"), StepHeartbeat(), blocks_ahead=256
    )
    assert cache.num_groups == 4
    for thread in threading.enumerate():
        if thread.name == "first-touch":
            thread.join()
    touched = [is_resident(cache.layer(0)[block]) for block in (0, 4 * 256, 4 * 256 + 512)]
    assert touched in ([True, True, False], [False] * 3)  # the latter where the kernel has no such call


def test_layers_keep_blocks_of_their_own_sizes_in_one_piece_of_memory() -> None:
    """Heads of two sizes in turn, and a layer that reads another's."""
    small, large = CacheKind(2, 8), CacheKind(1, 32)
    caches = (small, large, small, CacheKind(1, 32, shares=1))
    cache = KVCache(caches, 5, torch.float32, torch.device("cpu"))
    assert [tuple(cache.layer(index).shape) for index in range(4)] == [
        (5, 16, 2, heads, dim) for heads, dim in ((2, 8), (1, 32), (2, 8), (1, 32))
    ]
    assert cache.tensor.nbytes == 5 * block_bytes(caches, torch.float32) == 5 * 16 * 2 * 4 * (2 * 2 * 8 + 32)
    assert cache.layer(3).data_ptr() == cache.layer(1).data_ptr()
    for index in range(3):
        assert cache.layer(index).is_contiguous()
        cache.layer(index).fill_(index + 1)
    for index in range(3):  # none lies in another's memory
        assert bool((cache.layer(index) == index + 1).all())
    cache.clear_blocks(torch.tensor([3]))
    assert all(not cache.layer(index)[3].any() and cache.layer(index)[2].all() for index in range(4))


def test_layers_of_different_groups_lie_in_the_same_memory() -> None:
    """Those of one group do not: a block belongs to one group at a time."""
    full, window = CacheKind(2, 8), CacheKind(2, 8, window=32)
    caches = (window, window, full, window, window, full)
    cache = KVCache(caches, 5, torch.float32, torch.device("cpu"))
    assert cache.group_of == (0, 0, 2, 1, 1, 2)
    first, second = (cache.layer(index).data_ptr() for index in (0, 1))
    places = [cache.layer(index).data_ptr() for index in range(6)]
    assert places == [first, second, first, first, second, second]
    assert cache.tensor.nbytes == 5 * block_bytes(caches, torch.float32) == 5 * 2 * 16 * 2 * 2 * 8 * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_a_place_holds_as_many_layers_of_a_smaller_size_as_fit(dtype: torch.dtype) -> None:
    """Heads of two sizes and counts, with a window and without: blocks of the two groups take the same memory."""
    full, window = CacheKind(1, 32), CacheKind(2, 8, window=32)
    cache = KVCache((window, full, window, window, full), 5, dtype, torch.device("cpu"))
    assert cache.group_of == (0, 1, 0, 0, 1)
    assert [len(pool) for pool in cache.pools] == ([2] if dtype is torch.float32 else [1, 1])
    blocks = {0: 1, 2: 1, 3: 1, 1: 2, 4: 2}  # of each layer's group
    for index, block in blocks.items():
        cache.layer(index)[block] = index + 1
    for index, block in blocks.items():  # neither another layer's memory nor another block's
        assert bool((cache.layer(index)[block] == index + 1).all())
    cache.clear_blocks(torch.tensor([2]))
    assert not any(cache.layer(index)[2].any() for index in (1, 4))
    assert all(bool((cache.layer(index)[1] == index + 1).all()) for index in (0, 2, 3))
    cache.clear_blocks(torch.tensor([1]))
    assert not cache.tensor.any()
