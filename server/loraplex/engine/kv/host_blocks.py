"""The memory of blocks and states on the host."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np
import torch

from loraplex.engine.kv.cache import KVCache
from loraplex.engine.kv.prefix_keys import group_of
from loraplex.engine.types import BlockCopy, BlockKey
from loraplex.kernels.host_memory import untouched_zeros


class HostBlocks:
    """`num_slots` pieces of memory beside a KV cache, of the size of a block each, with a block's bytes or a part of a
    state's; pinned where the cache is on a GPU. `mark`: called at every copy, the heartbeat's. `keep`, where it is set:
    gets the bytes of each block that goes on to the disk; they are its own. `hand`: gets those of pieces that go to
    another engine."""

    def __init__(self, kv: KVCache, num_slots: int, mark: Callable[[], None]) -> None:
        self.num_slots = num_slots
        self.keep: Callable[[BlockKey, memoryview], None] | None = None
        self.hand: Callable[[BlockKey, bytes], None] = lambda key, payload: None
        self._mark = mark
        self._device_pools = kv.pools
        self._states = kv.states
        self._unused = kv.unused
        self._is_pinned = kv.tensor.device.type == "cuda"
        self._slot_bytes = sum(pool[:, 0].nbytes for pool in kv.pools)
        shape = (num_slots, self._slot_bytes)
        if self._is_pinned:
            self._memory = torch.empty(shape, dtype=torch.uint8, pin_memory=True)
        else:
            self._memory = untouched_zeros(shape, torch.uint8)
        self._on_way: dict[int, tuple[BlockKey, tuple[slice, ...]]] = {}
        """The blocks that a GPU still copies, and that go on to the disk, by their slots. And the bytes there that are
        none of theirs: they may be another tenant's."""

    @property
    def slot_bytes(self) -> int:
        return self._slot_bytes

    @property
    def state_slots(self) -> int:
        """The slots that a state takes; 0: no layer keeps one."""
        return -(-self._states.shape[1] // self._slot_bytes)

    @property
    def has_on_way(self) -> bool:
        """Whether `copy` is to be called again, if only to hand blocks on."""
        return bool(self._on_way)

    def copy(self, copies: Iterable[BlockCopy]) -> None:
        """Copy whole blocks, in this order. On a GPU on the stream of the steps."""
        self._hand_on()
        for one in copies:
            self._mark()
            if one.payload is not None:
                self._fill(one, one.payload)
                continue
            if one.to_host and one.key is not None and (one.block < 0 or one.slot < 0):
                self.hand(one.key, self._read_out(one))
                continue
            if one.to_host and one.slot in self._on_way:
                self._hand_on()
            num_bytes = 0
            for on_device, on_host in self._pairs(one):
                num_bytes += on_host.nbytes
                if one.to_host:
                    on_host.copy_(on_device, non_blocking=True)
                else:
                    on_device.copy_(on_host, non_blocking=True)
            if one.to_host and one.key is not None:
                is_block = one.part is None
                foreign = self._unused[group_of(one.key)] if is_block else (slice(num_bytes, None),)
                self._on_way[one.slot] = one.key, foreign
                if not self._is_pinned:
                    self._hand_on()

    def _read_out(self, one: BlockCopy) -> bytes:
        """The content of a slot, or of a block or a part of a state; zeros behind what a part has."""
        if self._is_pinned:
            torch.cuda.current_stream().synchronize()
        if one.slot >= 0:
            left = (
                self._slot_bytes if one.part is None else self._states.shape[1] - one.part * self._slot_bytes
            )
            pieces = [self._memory[one.slot, :left]]
        elif one.part is not None:
            pieces = [self._part(one.block, one.part)]
        else:
            pieces = [pool[:, one.block].contiguous().view(torch.uint8) for pool in self._device_pools]
        return b"".join(each.cpu().numpy().tobytes() for each in pieces).ljust(self._slot_bytes, b"\0")

    def _pairs(self, one: BlockCopy) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Views of the device's memory and of the host's that have the same content, of one shape and dtype each."""
        slot = self._memory[one.slot]
        if one.part is not None:
            part = self._part(one.block, one.part)
            yield part, slot[: part.nbytes]
            return
        begin = 0
        for pool in self._device_pools:
            on_device = pool[:, one.block]
            end = begin + on_device.nbytes
            yield on_device, slot[begin:end].view(pool.dtype).view(on_device.shape)
            begin = end

    def _part(self, state: int, part: int) -> torch.Tensor:
        """[bytes] uint8 of a state, at most as many as a block has. A view."""
        return self._states[state, part * self._slot_bytes :][: self._slot_bytes]

    def _hand_on(self) -> None:
        """Give away the bytes of the blocks that go to the disk. On a GPU wait for their copies first."""
        if not self._on_way:
            return
        if self._is_pinned:
            torch.cuda.current_stream().synchronize()
        for slot, (key, foreign) in self._on_way.items():
            if self.keep is not None:
                payload = self._memory[slot].clone()  # queued copies may use the slot itself
                for part in foreign:
                    payload[part].zero_()
                self.keep(key, payload.numpy().data)
        self._on_way.clear()

    def _fill(self, one: BlockCopy, payload: bytes) -> None:
        """Copy a block of the disk to the pool, or a part of a state."""
        begin = 0
        pools = [pool[:, one.block] for pool in self._device_pools]
        for target in pools if one.part is None else [self._part(one.block, one.part)]:
            on_device = target.view(torch.uint8)
            source = np.frombuffer(payload, np.uint8, on_device.numel(), begin).reshape(on_device.shape)
            if self._is_pinned:
                staged = torch.empty(on_device.shape, dtype=torch.uint8, pin_memory=True)
                staged.numpy()[:] = source
                on_device.copy_(staged, non_blocking=True)
            else:
                on_device.numpy()[:] = source
            begin += on_device.numel()
