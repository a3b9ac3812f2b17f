"""The KV cache's memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from loraplex.engine.model.base import KVCache, ModelShape


def resident_mib() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 >> 20


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="it is Linux that tells")
def test_a_cache_takes_memory_as_it_is_written() -> None:
    before = resident_mib()
    cache = KVCache(ModelShape(4, 4, 64, 100, 8192), 1 << 13, torch.bfloat16, torch.device("cpu"))
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
