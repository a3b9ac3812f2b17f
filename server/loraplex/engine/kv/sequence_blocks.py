"""The blocks of sequences: how many one needs, which it gives back, and which it finds in the prefix cache.

A sequence has a table of blocks for each group of layers. `Sequence.block_ids` has them side by side: of G groups, the
block of positions 16·i … 16·i+15 for group g is entry i·G + g.

A group whose layers see a window of w positions reads no block before the last ⌈(w - 1) / 16⌉ and those that are begun.
A sequence gives the others back when the rows that saw them have been computed, and GIVEN_BACK stands in their place.
What they hold stays in the prefix cache, for each group under a key of its own, until they are allocated again.

So a prefix of n blocks is found where each group that keeps all positions has all n, and each group with a window the
last ⌈(w - 1) / 16⌉ of them: position 16·n sees no more. Of several such n it is the largest.
"""

from __future__ import annotations

from collections.abc import Sequence as Row
from itertools import compress

from loraplex.engine.kv import prefix_keys
from loraplex.engine.kv.blocks import BlockManager
from loraplex.engine.kv.disk_tier import DiskTier
from loraplex.engine.kv.host_tier import HostTier
from loraplex.engine.kv.layers import BlockNeeds, blocks_for, blocks_unseen
from loraplex.engine.kv.sequence_states import SequenceStates
from loraplex.engine.kv.states import Places
from loraplex.engine.types import BlockCopy, BlockKey, Namespace, ScheduledSequence, Sequence
from loraplex.kernels.attention import BLOCK_SIZE

GIVEN_BACK = -1
"""Stands in a table for a block that the sequence has given back."""
_GROWTH = 1
"""Blocks of each group that are reserved for the growth of each running sequence before another one starts."""


def holds_blocks(seq: Sequence) -> bool:
    """Whether preempting a running sequence may free blocks at once: those of one whose last token is in flight become
    free by themselves, and one that is measured has none."""
    return seq.measured is None and not seq.all_sampled


class SequenceBlocks(BlockManager):
    """The pool of `num_blocks` blocks, as sequences with `needs` hold them, and their windows and states.
    `num_host_blocks`: in host memory, where forgotten blocks are found, of a model whose layers are one group that
    keeps all positions; `most_restored` of them at most come back in a step. `disk`: behind host memory."""

    def __init__(
        self,
        num_blocks: int,
        needs: BlockNeeds,
        num_states: int = 0,
        num_windows: int = 0,
        num_host_blocks: int = 0,
        most_restored: int = 1,
        disk: DiskTier | None = None,
    ) -> None:
        super().__init__(num_blocks)
        self.needs = needs
        self.places = Places(num_windows)
        """Those of windows."""
        self.states = SequenceStates(num_states, num_windows) if num_windows else None
        self.host = HostTier(num_host_blocks) if num_host_blocks else None
        self.disk = disk
        self.copies: list[BlockCopy] = []
        """Those of the next step."""
        self.restoring: dict[Sequence, float | None] = {}
        """Running sequences whose prefix is on its way from host memory: nothing of them is computed before. And up to
        when their waiting was counted, None before the first step."""
        self._most_restored = most_restored
        self._num_restored = 0  # by the copies of the next step
        self._kept: set[int] = (
            set()
        )  # blocks that are on the disk, or on their way: their names are costly to look up
        self._num_kept = 0  # by them: blocks that were found and go to the disk
        self._erased: set[str] = set()  # digests of deleted versions that requests still ran on
        self._num_groups = len(needs.windows)
        self._windows = [(group, window) for group, window in enumerate(needs.windows) if window is not None]

    @property
    def num_states_used(self) -> int:
        """States that sequences hold."""
        return 0 if self.states is None else self.states.num_used

    def lacks_place(self) -> bool:
        """Whether one sequence more finds no place, or, until a step in flight is collected, no state."""
        return self.places.lacks(1) or (self.states is not None and not self.states.num_free)

    def lacks_room(self, seq: Sequence, reserved: int, found: list[int]) -> bool:
        """Whether a waiting sequence cannot start now, beside the `reserved` blocks of others; `found` hold its
        beginning."""
        return self.lacks_place() or self.short(seq, reserved, found) > 0

    def missing_to(self, seq: Sequence, end: int) -> int:
        """Blocks that a sequence lacks to hold its positions below `end`."""
        return max(0, blocks_for(end) * self._num_groups - len(seq.block_ids))

    def missing(self, seq: Sequence) -> int:
        """Blocks that a running sequence still needs for the tokens that it has."""
        every = self.missing_to(seq, seq.num_tokens)
        if not every or not self._windows:
            return every
        # It gives nothing back for what is in flight until that is collected.
        ahead = seq.num_tokens - seq.blocks_done * BLOCK_SIZE
        return min(every, self.needs.of(seq.num_tokens, ahead) - seq.num_held)

    def lacks(self, seqs: Row[Sequence]) -> bool:
        """Whether these running sequences need more blocks than are free."""
        return self.num_free < len(seqs) * self._num_groups and self.num_free < sum(map(self.missing, seqs))

    def reserved(self, seq: Sequence) -> int:
        """Blocks that a running sequence still needs for its tokens, and more if it may outgrow them. Without that
        reserve a request could start in blocks that others are about to need; it would be preempted some steps later,
        and its work lost."""
        # Called for every running sequence in every step that may admit a request.
        missing, room = 0, len(seq.block_ids) // self._num_groups * BLOCK_SIZE
        if room < len(seq.token_ids) + seq.num_pending:
            missing = self.missing(seq)
            room = blocks_for(seq.num_tokens) * BLOCK_SIZE
        return missing + _GROWTH * self._num_groups if seq.most_computed > room else missing

    def wanted(self, seq: Sequence) -> int:
        """Blocks that a waiting sequence needs for the tokens that it has, and for its growth."""
        return self.needs.of(seq.num_tokens) + _GROWTH * self._num_groups

    def short(self, seq: Sequence, reserved: int, found: list[int]) -> int:
        """The number of blocks, if above 0, that a waiting sequence lacks to start beside the reserved ones. `found`
        hold its beginning."""
        ahead = seq.num_tokens - len(found) // self._num_groups * BLOCK_SIZE
        held = self.held(found)
        needed = self.needs.of(seq.num_tokens, ahead) - len(held)
        return needed and needed - (self.num_free - self.num_idle(held) - reserved)

    def held(self, block_ids: Row[int]) -> Row[int]:
        """The blocks of a table without those that were given back."""
        return [block for block in block_ids if block != GIVEN_BACK] if self._windows else block_ids

    def find(self, seq: Sequence) -> list[int]:
        """The table of the beginning of a waiting sequence, as far as the prefix cache has it."""
        keys = prefix_keys.extend_keys(seq)[: prefix_keys.findable_blocks(seq)]
        found = self._find(keys)
        if self.states is not None:
            while count := len(found) // self._num_groups:
                known = self.states.longest(keys[:count])
                if known == count:
                    return found
                found = self._find(keys[:known])
        return found

    def _find(self, keys: list[BlockKey]) -> list[int]:
        """The table of the longest run of these keys, from the first."""
        if self._num_groups == 1 and not self._windows:
            return self.lookup(keys)
        tables: list[list[int]] = []  # of each group, GIVEN_BACK where nothing is found
        for group, window in enumerate(self.needs.windows):
            own = [prefix_keys.of_group(key, group) for key in keys]
            tables.append(self.lookup(own) if window is None else self.lookup_all(own))
        size = min(map(len, tables))
        while (gap := self._last_gap(tables, size)) is not None:
            size = gap
        for group, window in self._windows:
            unseen = blocks_unseen(window, size)
            tables[group][:unseen] = [GIVEN_BACK] * unseen
        return [block for row in zip(*(table[:size] for table in tables), strict=True) for block in row]

    def _last_gap(self, tables: list[list[int]], size: int) -> int | None:
        """The last of the first `size` blocks that a group with a window lacks for the position behind them. A shorter
        prefix that has this block lacks it too."""
        for group, window in self._windows:
            for index in range(size - 1, blocks_unseen(window, size) - 1, -1):
                if tables[group][index] == GIVEN_BACK:
                    return index
        return None

    def begin(self, seq: Sequence, found: list[int]) -> None:
        """A waiting sequence starts behind these blocks."""
        held = self.held(found)
        self.share(held, is_spare=seq.request.batch)
        seq.block_ids = tuple(found)
        seq.num_given_back = len(found) - len(held)
        seq.blocks_done = len(found) // self._num_groups
        seq.num_computed = seq.blocks_done * BLOCK_SIZE
        if self.host is not None and seq.measured is None and not seq.request.is_shadow:
            self.restoring[seq] = None
        if self.states is None or seq.measured is not None:
            return
        seq.window_slot = self.places.take()
        keys = [] if seq.request.is_shadow else prefix_keys.extend_keys(seq)
        keys = keys[: prefix_keys.findable_blocks(seq)]
        self.states.begin(seq, seq.blocks_done, len(self._find(keys)) // self._num_groups)

    def restore(self, seq: Sequence, now: float) -> bool:
        """Bring what host memory has of a sequence's prefix, at most what is left to the next step. Returns whether the
        sequence waits for no more.

        The index is asked again in each step: what was erased meanwhile does not come. A block is found by others at
        once, since its copy is planned before whatever they compute."""
        assert self.host is not None, "nothing is in host memory"
        is_spare, brought, counts = seq.request.batch, list[int](), self.host.counts
        keys = prefix_keys.extend_keys(seq)[seq.blocks_done : prefix_keys.findable_blocks(seq)]
        if (since := self.restoring.get(seq)) is not None:
            counts.restore_s += now - since
        else:
            for key in reversed(keys):  # what this run displaces on the device goes to the slots of others
                self.host.read(key)
            self._keep_found(seq)
        for key in keys:
            if found := self.lookup((key,)):
                self.share(found, is_spare=is_spare)
                brought += found
                continue
            payload = None
            if self.disk is not None and key not in self.host:
                payload = self.disk.payload(key)
            if (payload is None and key not in self.host) or not self.num_free:
                break
            if self._num_restored >= self._most_restored:
                self._brought(seq, brought)
                self.restoring[seq] = now
                return False
            taken = self.allocate(1)
            slot = -1 if payload is not None else self.host.read(key)
            if slot is None:  # written over by what the block held
                self.release(taken)
                break
            self.copies.append(BlockCopy(taken[0], slot, False, None if payload is None else key, payload))
            self.register(taken[0], key, is_spare=is_spare)
            self._num_restored += 1
            if payload is None:
                counts.restored += 1
            elif self.disk is not None:
                self.disk.num_restored += 1
            brought += taken
        self._brought(seq, brought)
        self.restoring.pop(seq, None)
        if self.disk is not None:
            self.disk.close_request(seq.request_id)
        return True

    def on_disk(self, seq: Sequence) -> list[BlockKey]:
        """The blocks of a new sequence's prefix that neither the pool nor host memory has, as far as they lie on the
        disk without a gap."""
        request = seq.request
        if self.disk is None or self.host is None or seq.measured is not None or request.background:
            return []  # what runs in the background may begin much later
        found: list[BlockKey] = []
        for key in prefix_keys.extend_keys(seq)[: prefix_keys.findable_blocks(seq)]:
            if key in self._block_of or key in self.host:
                continue
            if key not in self.disk:
                break
            found.append(key)
            if len(found) == self.disk.most_asked:
                break
        return found

    def _keep_found(self, seq: Sequence) -> None:
        """Blocks that a second request finds go to the disk at once, since a process that is killed loses the others;
        no more of them in a step than come back in one."""
        if self.disk is None or seq.request.batch:
            return
        for block, key in zip(seq.block_ids, seq.block_keys, strict=False):
            if block in self._kept:
                continue
            if self._num_kept >= self._most_restored or not self.disk.takes_more():
                return
            self._kept.add(block)
            if key[0][1] not in self._erased and self.disk.reserve(key):
                self._num_kept += 1
                self._to_host(block, key, is_for_disk=True)

    def _brought(self, seq: Sequence, block_ids: list[int]) -> None:
        seq.block_ids += tuple(block_ids)
        seq.blocks_done += len(block_ids)
        seq.num_computed = seq.blocks_done * BLOCK_SIZE

    def num_found(self, seq: Sequence) -> int:
        """Positions of a waiting sequence that need not be computed, as far as the caches have them now."""
        count = len(self.find(seq)) // self._num_groups
        if self.host is not None:
            keys = prefix_keys.extend_keys(seq)[count : prefix_keys.findable_blocks(seq)]
            count += len(self.host.find(keys))
        return count * BLOCK_SIZE

    def on_forgotten(self, block: int, key: BlockKey) -> None:
        if self.host is None:
            return
        if key[0][1] in self._erased:
            self.host.counts.refused += 1
            return
        self._to_host(block, key, is_for_disk=self.disk is not None and self.disk.reserve(key))

    def _to_host(self, block: int, key: BlockKey, *, is_for_disk: bool) -> None:
        """Copy a block to host memory, unless it is there, and on to the disk from there."""
        assert self.host is not None, "nothing is in host memory"
        slot = self.host.write(key)
        if slot is None and is_for_disk:
            slot = self.host.read(key)
        if slot is not None:
            self.copies.append(BlockCopy(block, slot, to_host=True, key=key if is_for_disk else None))

    def _drop_key(self, block: int) -> None:
        super()._drop_key(block)
        self._kept.discard(block)

    def take_copies(self) -> tuple[BlockCopy, ...]:
        """The copies for the step that is submitted next."""
        taken, self.copies, self._num_restored, self._num_kept = tuple(self.copies), [], 0, 0
        return taken

    def erase(self, digest: str, *, is_used: bool) -> None:
        """A version was deleted: where there is host memory, no block of it is found any more, on a disk neither.
        `is_used`: requests still run on it: their blocks are not copied to host memory."""
        if self.host is None:
            return
        self.host.erase(digest)
        if self.disk is not None:
            self.disk.erase_version(digest)
        self.disown(self.keys_of(digest))
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

    def begin_again(self, seq: Sequence, start: int) -> None:
        """The positions of a running sequence from `start` on are computed again, and those before too where a state
        may have been written over."""
        start = min(seq.num_computed, start)
        known: int | None = start
        if self.states is not None and seq.window_slot >= 0:
            known = self.states.go_back(seq, start)
        if known is not None:
            if known < start:
                seq.lost_until = max(seq.lost_until, seq.num_computed)
            seq.num_computed = known
            return
        seq.lost_until = max(seq.lost_until, seq.num_computed)
        self.drop(seq)
        self.begin(seq, [])

    def extend(self, seq: Sequence, count: int) -> None:
        """Give a sequence `count` blocks more, of all groups in turn."""
        seq.block_ids += tuple(self.allocate(count))

    def computed(self, seq: Sequence, scheduled: ScheduledSequence, start: int, end: int) -> None:
        """Positions start … end-1 of a slice were computed and collected, and no row before `end` will be computed
        again: the blocks that they filled can be found by their keys, and those that no later row sees are given
        back."""
        if not seq.request.is_shadow:
            named = prefix_keys.filled(seq, scheduled, start, end, self._num_groups)
            self.register_all(named, is_spare=seq.request.batch)
        done = end // BLOCK_SIZE
        if done <= seq.blocks_done:
            return
        if self.states is not None:
            self.states.computed(seq, done)
        if not self._windows:
            seq.blocks_done = done
            return
        table, given = list(seq.block_ids), [False] * len(seq.block_ids)
        for group, window in self._windows:
            for index in range(blocks_unseen(window, seq.blocks_done), blocks_unseen(window, done)):
                given[index * self._num_groups + group] = True
        seq.blocks_done = done
        unseen = list(compress(table, given))
        self.release(unseen)
        seq.num_given_back += len(unseen)
        seq.block_ids = tuple(GIVEN_BACK if gone else block for block, gone in zip(table, given, strict=True))

    def drop(self, seq: Sequence) -> None:
        """A sequence gives up all of its blocks, and its window and states."""
        self.restoring.pop(seq, None)
        self.release(self.held(seq.block_ids))
        if self.states is not None:
            self.states.drop(seq)
        seq.block_ids, seq.num_given_back, seq.blocks_done = (), 0, 0
        if seq.window_slot >= 0:
            self.places.release(seq.window_slot)
            seq.window_slot = -1

    def spoil(self, seq: Sequence) -> None:
        """Nothing that a sequence has computed is found again."""
        self.disown(
            prefix_keys.of_group(key, group) for key in seq.block_keys for group in range(self._num_groups)
        )
        if self.host is not None:
            self.host.disown(seq.block_keys)
        if self.disk is not None:
            self.disk.remove(seq.block_keys)
        if self.states is not None:
            self.states.disown(seq.block_keys)
            self.states.drop(seq, keeps=False)

    def set_resident(self, digest: str, is_resident: bool) -> None:
        super().set_resident(digest, is_resident)
        if is_resident:
            self._erased.discard(digest)
        if self.states is not None:
            self.states.set_resident(digest, is_resident)
