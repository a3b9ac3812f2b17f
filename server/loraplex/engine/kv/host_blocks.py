"""The tensors of blocks in host memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from loraplex.engine.kv.cache import KVCache
from loraplex.engine.types import BlockCopy
from loraplex.kernels.host_memory import untouched_zeros


class HostBlocks:
    """`num_slots` blocks beside those of a KV cache, with its dtype and layout; pinned where the cache is on a GPU.
    `mark`: called at every copy, the heartbeat's."""

    def __init__(self, kv: KVCache, num_slots: int, mark: Callable[[], None]) -> None:
        self.num_slots = num_slots
        self._mark = mark
        self._device_pools = kv.pools
        self._pools: list[torch.Tensor] = []
        for pool in kv.pools:
            shape = (pool.shape[0], num_slots, pool.shape[2])
            if pool.device.type == "cpu":
                self._pools.append(untouched_zeros(shape, pool.dtype))
            else:
                self._pools.append(torch.empty(shape, dtype=pool.dtype, pin_memory=True))

    def copy(self, copies: Iterable[BlockCopy]) -> None:
        """Copy whole blocks, in this order. On a GPU on the stream of the steps."""
        for one in copies:
            self._mark()
            for device, host in zip(self._device_pools, self._pools, strict=True):
                on_device, on_host = device[:, one.block], host[:, one.slot]
                if one.to_host:
                    on_host.copy_(on_device, non_blocking=True)
                else:
                    on_device.copy_(on_host, non_blocking=True)
