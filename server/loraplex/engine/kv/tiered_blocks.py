"""The pools of blocks and states, and the tiers behind them, host memory and a disk, which find what they forget."""

from __future__ import annotations

from collections.abc import Sequence as Row

from loraplex.engine.kv import prefix_keys
from loraplex.engine.kv.blocks import BlockManager
from loraplex.engine.kv.disk_tier import DiskTier
from loraplex.engine.kv.host_tier import HostTier
from loraplex.engine.kv.layers import STATE_GROUP
from loraplex.engine.kv.sequence_states import SequenceStates
from loraplex.engine.types import BlockCopy, BlockKey, Namespace


class TieredBlocks(BlockManager):
    """The pool of `num_blocks` blocks, and that of `num_states` states where sequences have windows. `num_host_blocks`:
    slots in host memory for what they forget; a state takes `state_slots` of them. `most_restored` of them at most come
    back in a step, and a larger state alone. `disk`: behind host memory; there each part of a state, as large as a
    block, has a name of its own."""

    def __init__(
        self,
        num_blocks: int,
        num_states: int,
        num_windows: int,
        num_host_blocks: int,
        most_restored: int,
        disk: DiskTier | None,
        state_slots: int,
    ) -> None:
        super().__init__(num_blocks)
        self.states = SequenceStates(num_states, num_windows, self._forget_state) if num_windows else None
        self.host = HostTier(num_host_blocks, state_slots) if num_host_blocks else None
        self.disk = disk
        self._state_slots = state_slots
        self.copies: list[BlockCopy] = []
        """Those of the next step."""
        self._most_restored = most_restored
        self._num_restored = 0  # by the copies of the next step
        # Blocks that are on the disk, or on their way: their names are costly to look up.
        self._kept: set[int] = set()
        self._num_kept = 0  # by the copies of the next step: blocks that were found and go to the disk
        self._erased: set[str] = set()  # digests of deleted versions that requests still ran on
        # The block before each that is in the pool or in host memory, None before the first: no name tells.
        self._before: dict[BlockKey, BlockKey | None] = {}
        if self.host is not None:
            self.host.on_removed = self._left_host

    @property
    def num_states_used(self) -> int:
        """States that sequences hold."""
        return 0 if self.states is None else self.states.num_used

    def on_forgotten(self, block: int, key: BlockKey) -> None:
        if self._takes(key):
            self._to_host(block, key, is_for_disk=self.disk is not None and self.disk.reserve(key))

    def _forget_state(self, state: int, key: BlockKey) -> None:
        if self._takes(key):
            self._state_to_host(state, key)

    def _state_to_host(self, state: int, key: BlockKey) -> None:
        """Copy a state to host memory, unless it is there, and on to the disk what that lacks of it."""
        assert self.host is not None, "nothing is in host memory"
        name = prefix_keys.of_state(key)
        written = self.host.write(name)
        slots = written or (self.host.read(name) if self.disk is not None else ())
        parts = self._state_parts(name) if slots and self.disk is not None else []
        for_disk = frozenset(self.disk.reserve_state(parts) if self.disk is not None and parts else ())
        for part, slot in enumerate(slots):
            on_disk = parts[part] if parts and parts[part] in for_disk else None
            if written or on_disk is not None:
                self.copies.append(BlockCopy(state, slot, True, on_disk, part=part))

    def _takes(self, key: BlockKey) -> bool:
        """Whether host memory takes what is forgotten."""
        if self.host is not None and key[0][1] in self._erased:
            self.host.counts.refused += 1
            return False
        return self.host is not None

    def _to_host(self, block: int, key: BlockKey, *, is_for_disk: bool) -> None:
        """Copy a block to host memory, unless it is there, and on to the disk from there."""
        assert self.host is not None, "nothing is in host memory"
        slots = self.host.write(key)
        if not slots and is_for_disk:
            slots = self.host.read(key)
        if slots:
            self.copies.append(BlockCopy(block, slots[0], to_host=True, key=key if is_for_disk else None))

    def _may_restore(self, count: int) -> bool:
        return not self._num_restored or self._num_restored + count <= self._most_restored

    def _is_here(self, key: BlockKey, group: int) -> bool:
        """Whether the pool has a group's block of this key, or that of states the state behind it."""
        if group == STATE_GROUP:
            return self.states is not None and bool(self.states.lookup((key,)))
        return prefix_keys.of_group(key, group) in self._block_of

    def _is_near(self, key: BlockKey, group: int) -> bool:
        """Whether it is in a pool, in host memory, or read from the disk."""
        return self._is_here(key, group) or self._is_behind(prefix_keys.of_group(key, group))

    def _is_anywhere(self, key: BlockKey, group: int) -> bool:
        if self._is_here(key, group):
            return True
        name = prefix_keys.of_group(key, group)
        return (self.host is not None and name in self.host) or self._is_on_disk(name)

    def _is_behind(self, name: BlockKey) -> bool:
        """Whether this block or state is in host memory, or read from the disk."""
        if self.host is not None and name in self.host:
            return True
        if prefix_keys.is_of_state(name):
            return bool(self._state_read(name))
        return self.disk is not None and self.disk.payload(name) is not None

    def _is_on_disk(self, name: BlockKey) -> bool:
        if prefix_keys.is_of_state(name):
            return self._state_on_disk(name)
        return self.disk is not None and name in self.disk

    def _state_parts(self, name: BlockKey) -> list[BlockKey]:
        return [prefix_keys.part_of_state(name, part) for part in range(self._state_slots)]

    def _state_read(self, name: BlockKey) -> list[tuple[BlockKey, bytes]]:
        """The parts of a state that were read from the disk; none where one of them was not."""
        found: list[tuple[BlockKey, bytes]] = []
        for number in range(0 if self.disk is None else self._state_slots):
            assert self.disk is not None
            part = prefix_keys.part_of_state(name, number)
            if (payload := self.disk.payload(part)) is None:
                return []
            found.append((part, payload))
        return found

    def _state_on_disk(self, name: BlockKey) -> bool:
        """Whether the disk has all parts of a state. The first that it lacks ends the search: their names are
        costly."""
        disk = self.disk
        return disk is not None and all(
            prefix_keys.part_of_state(name, number) in disk for number in range(self._state_slots)
        )

    def erase(self, digest: str, *, is_used: bool) -> None:
        """A version was deleted: where there is host memory, no block of it is found any more, on a disk neither.
        `is_used`: requests still run on it: their blocks are not copied to host memory."""
        if self.host is None:
            return
        self.host.erase(digest)
        if self.disk is not None:
            self.disk.erase_version(digest)
        self.disown(self.keys_of(digest))
        if self.states is not None:
            self.states.disown(self.states.keys_of(digest))
        if is_used:
            self._erased.add(digest)

    def erase_tenant(self, tenant_id: str) -> None:
        """No block of a tenant is found any more, on the base or an adapter, in the pool or a tier behind it."""
        self.disown(self.keys_of_tenant(tenant_id))
        if self.states is not None:
            self.states.disown(self.states.keys_of_tenant(tenant_id))
        if self.host is not None:
            self.host.disown(self.host.keys_of_tenant(tenant_id))
        if self.disk is not None:
            self.disk.erase_tenant(tenant_id)

    def owners(self) -> set[Namespace]:
        """Tenants and versions (None: the base) of the blocks behind the pool."""
        found = set() if self.host is None else self.host.owners()
        return found if self.disk is None else found | self.disk.store.owners()

    def note_chain(self, keys: Row[BlockKey], start: int, end: int) -> None:
        """Remember which block comes before each of keys[start:end], of one prefix, that is in the pool."""
        for number in range(start, end if self.host is not None else start):
            if keys[number] in self._block_of:
                self._before[keys[number]] = keys[number - 1] if number else None

    def _drop_key(self, block: int) -> None:
        key = self._key_of[block]
        super()._drop_key(block)
        self._kept.discard(block)
        if key is not None and self.host is not None and key not in self.host:
            self._before.pop(key, None)

    def _left_host(self, key: BlockKey) -> None:
        if key not in self._block_of:
            self._before.pop(key, None)

    def take_copies(self) -> tuple[BlockCopy, ...]:
        """The copies for the step that is submitted next."""
        taken, self.copies, self._num_restored, self._num_kept = tuple(self.copies), [], 0, 0
        return taken

    def set_resident(self, digest: str, is_resident: bool) -> None:
        super().set_resident(digest, is_resident)
        if is_resident:
            self._erased.discard(digest)
        if self.states is not None:
            self.states.set_resident(digest, is_resident)
