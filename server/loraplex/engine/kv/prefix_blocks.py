"""Prefixes: how long one is found in the pools, and how it comes back from the tiers behind them.

A prefix has blocks of each group of layers, and a state where the model keeps states (`PrefixNeeds`). Each piece is in
a pool, in host memory, or on the disk. What was read from there for a request is as near as host memory. A sequence
begins behind the largest prefix whose pieces are all near. Those that its pool lacks come by copies in the plans of
steps. Until they are here its table has gaps, and nothing of it is computed.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Row
from enum import Enum

from loraplex.engine.kv import prefix_keys
from loraplex.engine.kv.disk_tier import DiskTier
from loraplex.engine.kv.handed_blocks import HandedBlocks
from loraplex.engine.kv.layers import STATE_GROUP, BlockNeeds, PrefixNeeds
from loraplex.engine.kv.states import Places
from loraplex.engine.types import BlockCopy, BlockKey, Sequence
from loraplex.kernels.attention import BLOCK_SIZE

GIVEN_BACK = -1
"""Stands in a table for a block that the sequence has given back, or does not have yet."""


class _Obstacle(Enum):
    """Why not all of a prefix comes in this step."""

    BUDGET = "a step brings no more"
    GONE = "what it displaced took its place in host memory, or its owner was erased"
    ROOM = "no block or no state is free"


class PrefixBlocks(HandedBlocks):
    """The pool of `num_blocks` blocks, with the prefixes of sequences with `needs`. `num_states` and what follows as of
    `TieredBlocks`."""

    def __init__(
        self,
        num_blocks: int,
        needs: BlockNeeds,
        num_states: int = 0,
        num_windows: int = 0,
        num_host_blocks: int = 0,
        most_restored: int = 1,
        disk: DiskTier | None = None,
        state_slots: int = 1,
    ) -> None:
        super().__init__(
            num_blocks, num_states, num_windows, num_host_blocks, most_restored, disk, state_slots
        )
        self.needs = needs
        self.prefix_needs = PrefixNeeds(needs.windows, self.states is not None)
        self.places = Places(num_windows)
        """Those of windows."""
        self.restoring: dict[Sequence, float | None] = {}
        """Running sequences whose prefix is on its way: nothing of them is computed before. And up to when their
        waiting was counted, None before the first step."""
        self._num_groups = len(needs.windows)
        self._windows = [(group, window) for group, window in enumerate(needs.windows) if window is not None]

    def find(self, seq: Sequence) -> list[int]:
        """The table of the beginning of a waiting sequence, as far as the pools have it."""
        keys = self._findable(seq)
        if self.prefix_needs.is_plain:
            return self.lookup(keys)
        size = self._longest(keys, self._is_here)
        table = [GIVEN_BACK] * (size * self._num_groups)
        for index, group in self.prefix_needs.entries(size):
            table[index * self._num_groups + group] = self._block_of[prefix_keys.of_group(keys[index], group)]
        return table

    def num_found(self, seq: Sequence) -> int:
        """Positions of a waiting sequence that need not be computed, as far as the caches have them now."""
        return self._longest(self._findable(seq), self._is_near) * BLOCK_SIZE

    def _findable(self, seq: Sequence) -> list[BlockKey]:
        return prefix_keys.extend_keys(seq)[: prefix_keys.findable_blocks(seq)]

    def _longest(
        self, keys: Row[BlockKey], is_there: Callable[[BlockKey, int], bool], seq: Sequence | None = None
    ) -> int:
        """The most of these blocks that have all they need, where `is_there`, or held by `seq`."""

        def has(index: int, group: int) -> bool:
            return (seq is not None and self._holds(seq, index, group)) or is_there(keys[index], group)

        most = self.prefix_needs.leading(len(keys), has)
        return self.prefix_needs.longest(most, has)

    def _holds(self, seq: Sequence, index: int, group: int) -> bool:
        if group == STATE_GROUP:
            return seq.states[-1][0] == index + 1
        entry = index * self._num_groups + group
        return entry < len(seq.block_ids) and seq.block_ids[entry] != GIVEN_BACK

    def _set_ends(self, seq: Sequence) -> None:
        """A sequence begins: the states of these ends are kept for others."""
        keys = self._findable(seq)
        is_there = self._is_here if self.host is None else self._is_near
        num_cached = self.prefix_needs.leading(len(keys), lambda index, group: is_there(keys[index], group))
        wanted = (seq.num_prompt - 1) // BLOCK_SIZE, seq.request.adapter_from // BLOCK_SIZE, num_cached
        seq.kept_ends = tuple(n for n in wanted if n > seq.blocks_done)

    def begin_restoring(self, seq: Sequence, found: list[int]) -> list[int]:
        """A waiting sequence is about to start behind `found`. Returns the table that it starts with: none where more
        of its prefix comes, for that may need other blocks than these, and another state."""
        assert self.host is not None, "nothing is in host memory"
        self.restoring[seq] = None
        keys = self._findable(seq)
        size = self._longest(keys, self._is_near)
        # What this sequence displaces on the device goes to the slots of others.
        for index, group in reversed(self.prefix_needs.entries(size)):
            name = prefix_keys.of_group(keys[index], group)
            if name not in self._block_of:
                self.host.read(name)
        if self.states is not None and size:
            self.host.read(prefix_keys.of_state(keys[size - 1]))
        self._keep_found(seq, keys, found)
        return found if size * self._num_groups <= len(found) else []

    def restore(self, seq: Sequence, now: float) -> bool:
        """Bring what is near of a sequence's prefix, at most what is left to the next step. Returns whether the
        sequence waits for no more.

        The index is asked again in each step: what was erased meanwhile does not come. A block is found by others at
        once, since its copy is planned before whatever they compute."""
        assert self.host is not None, "nothing is in host memory"
        if (since := self.restoring.get(seq)) is not None:
            self.host.counts.restore_s += now - since
        keys, is_short = self._findable(seq), False
        while True:
            size = self._longest(keys, self._is_near, seq)
            obstacle = self._bring(seq, keys[:size])
            if obstacle is _Obstacle.BUDGET:
                self.restoring[seq] = now
                return False
            if obstacle is None or (obstacle is _Obstacle.ROOM and is_short):
                break
            if obstacle is _Obstacle.ROOM:
                is_short = True
                keys = keys[: self.prefix_needs.leading(size - 1, lambda *each: self._holds(seq, *each))]
                self._give_back_behind(seq, self._longest(keys, self._is_near, seq))
        self.stop_restoring(seq)
        if self.disk is not None:
            self.disk.close_request(seq.request_id)
        return True

    def restore_at_once(self, seq: Sequence, now: float) -> None:
        """Bring what comes of a sequence's prefix in the next step, and wait for no more. Where some blocks come to
        nothing without the others, all come or none."""
        if self.prefix_needs.is_plain or self._comes_at_once(seq):
            self.restore(seq, now)
        self.stop_restoring(seq)

    def stop_restoring(self, seq: Sequence) -> None:
        """A sequence waits for no more of its prefix. It goes on behind the most of it that is here, and gives back
        what that does not need."""
        if seq not in self.restoring:
            return
        del self.restoring[seq]
        keys, groups = self._findable(seq), self._num_groups
        size = self._longest(keys, self._is_here, seq)
        if self.states is not None and size != seq.states[-1][0]:
            self.states.begin_later(seq, size)
        held, table = [*seq.block_ids], [GIVEN_BACK] * (size * groups)
        for index, group in self.prefix_needs.entries(size):
            entry = index * groups + group
            if self._holds(seq, index, group):
                table[entry], held[entry] = held[entry], GIVEN_BACK
            else:
                (table[entry],) = self._share_found(seq, prefix_keys.of_group(keys[index], group))
        self.release([block for block in held if block != GIVEN_BACK])
        self._set_table(seq, table)
        self._begins_behind(seq, size)

    def _give_back_behind(self, seq: Sequence, size: int) -> None:
        """A sequence gives up what a prefix of `size` blocks does not need."""
        needed = {index * self._num_groups + group for index, group in self.prefix_needs.entries(size)}
        table = [block if entry in needed else GIVEN_BACK for entry, block in enumerate(seq.block_ids)]
        given = [block for entry, block in enumerate(seq.block_ids) if entry not in needed]
        self.release([block for block in given if block != GIVEN_BACK])
        while table and table[-1] == GIVEN_BACK:
            table.pop()
        self._set_table(seq, table)

    def _bring(self, seq: Sequence, keys: list[BlockKey]) -> _Obstacle | None:
        """Get all that the sequence lacks of a prefix of these blocks. None: it has all."""
        groups, size = self._num_groups, len(keys)
        table = [*seq.block_ids]
        table += [GIVEN_BACK] * (size * groups - len(table))
        lacking: list[tuple[int, BlockKey]] = []
        for index, group in self.prefix_needs.entries(size):
            if table[index * groups + group] == GIVEN_BACK:
                lacking.append((index * groups + group, prefix_keys.of_group(keys[index], group)))
        for entry, name in lacking:  # first those that might be displaced
            if name in self._block_of:
                (table[entry],) = self._share_found(seq, name)
        obstacle = None
        for entry, name in lacking:
            if table[entry] == GIVEN_BACK:
                found = self._bring_block(name, is_spare=seq.request.batch)
                if isinstance(found, _Obstacle):
                    obstacle = found
                    break
                table[entry] = found
        while table and table[-1] == GIVEN_BACK:
            table.pop()
        self._set_table(seq, table)
        if lacking:
            self.note_chain(keys, lacking[0][0] // groups, size)
        if self.prefix_needs.is_plain:
            self._begins_behind(seq, table.index(GIVEN_BACK) if GIVEN_BACK in table else len(table))
        if obstacle is None and self.states is not None and size and seq.states[-1][0] != size:
            return self._bring_state(seq, keys[-1], size)
        return obstacle

    def _share_found(self, seq: Sequence, name: BlockKey) -> list[int]:
        found = [self._block_of[name]]
        self.share(found, is_spare=seq.request.batch)
        return found

    def _set_table(self, seq: Sequence, table: list[int]) -> None:
        seq.block_ids, seq.num_given_back = tuple(table), table.count(GIVEN_BACK)

    def _begins_behind(self, seq: Sequence, size: int) -> None:
        seq.blocks_done, seq.num_computed = size, size * BLOCK_SIZE

    def _bring_block(self, name: BlockKey, *, is_spare: bool) -> int | _Obstacle:
        """A block of the pool that gets the content of this name."""
        assert self.host is not None
        payload = None
        if self.disk is not None and name not in self.host:
            payload = self.disk.payload(name)
        if payload is None and name not in self.host:
            return _Obstacle.GONE
        if not self.num_free:
            return _Obstacle.ROOM
        if not self._may_restore(1):
            return _Obstacle.BUDGET
        (block,) = self.allocate(1)
        slots = (-1,) if payload is not None else self.host.read(name)
        if not slots:  # written over by what the block held
            self.release((block,))
            return _Obstacle.GONE
        self.copies.append(BlockCopy(block, slots[0], False, None if payload is None else name, payload))
        self.register(block, name, is_spare=is_spare)
        self._num_restored += 1
        if payload is None:
            self.host.counts.restored += 1
        elif self.disk is not None:
            self.disk.num_restored += 1
        return block

    def _bring_state(self, seq: Sequence, key: BlockKey, number: int) -> _Obstacle | None:
        """Have the sequence begin behind `number` blocks, the last one of this key, with the state there."""
        assert self.states is not None
        assert self.host is not None
        if self.states.lookup((key,)):
            self.states.begin_later(seq, number)
            return None
        name = prefix_keys.of_state(key)
        if not self._is_behind(name):
            return _Obstacle.GONE
        if not self._may_restore(self._state_slots):
            return _Obstacle.BUDGET
        state = self.states.spare_one(seq)
        if state is None:
            return _Obstacle.ROOM
        slots, read = self.host.read(name), self._state_read(name)
        if slots:
            self.copies += [BlockCopy(state, slot, to_host=False, part=n) for n, slot in enumerate(slots)]
            self.host.counts.states_restored += 1
        elif read and self.disk is not None:
            self.copies += [BlockCopy(state, -1, False, *each, part=n) for n, each in enumerate(read)]
            self.disk.num_restored += len(read)
        else:  # written over by what the state was
            if state != seq.states[-1][1]:
                self.states.release((state,))
            return _Obstacle.GONE
        self._num_restored += self._state_slots
        self.states.begin_later(seq, number, state)
        return None

    def _comes_at_once(self, seq: Sequence) -> bool:
        """Whether what the pools lack of the prefix that is near may all come in the next step."""
        keys = self._findable(seq)
        keys = keys[: self._longest(keys, self._is_near, seq)]
        lacking = self._lacking(keys, self._is_here, seq)
        num_blocks = sum(not prefix_keys.is_of_state(name) for name in lacking)
        num_slots = num_blocks + (self._state_slots if num_blocks < len(lacking) else 0)
        every = (prefix_keys.of_group(keys[n], group) for n, group in self.prefix_needs.entries(len(keys)))
        num_idle = self.num_idle(self._block_of[name] for name in every if name in self._block_of)
        has_room = num_blocks <= self.num_free - num_idle
        has_room = has_room and self._num_restored + num_slots <= self._most_restored
        return not num_blocks or has_room

    def _lacking(
        self, keys: Row[BlockKey], is_there: Callable[[BlockKey, int], bool], seq: Sequence | None = None
    ) -> list[BlockKey]:
        """The names of what a prefix of these blocks needs and is not there, nor held by `seq`: the state first, and
        then what the prefix is of no use without."""
        full = self.prefix_needs.keeping_all()
        entries = sorted(self.prefix_needs.entries(len(keys)), key=lambda entry: entry[1] in full)
        if keys and self.states is not None:
            entries.insert(0, (len(keys) - 1, STATE_GROUP))
        return [
            prefix_keys.of_group(keys[index], group)
            for index, group in entries
            if not ((seq is not None and self._holds(seq, index, group)) or is_there(keys[index], group))
        ]

    def on_disk(self, seq: Sequence) -> tuple[list[BlockKey], int]:
        """The pieces of a new sequence's prefix that only the disk has, the parts of a state first; and how many blocks
        need not be computed with them."""
        request = seq.request
        if self.disk is None or self.host is None or seq.measured is not None or request.background:
            return [], 0  # what runs in the background may begin much later
        keys = self._findable(seq)
        begun = self._longest(keys, self._is_near)
        size, most = self._longest(keys, self._is_anywhere), self.disk.most_asked
        wanted = self._pieces(keys[:size])
        if self.prefix_needs.is_plain:
            return wanted[:most], len(wanted[:most])
        while len(wanted) > most and size > begun:
            # A shorter prefix may need fewer. Halves cost together as much as the first search, for names are costly.
            size = self._longest(keys[: begun + (size - begun) // 2], self._is_anywhere)
            wanted = self._pieces(keys[:size])
        return (wanted, size - begun) if size > begun else ([], 0)

    def _pieces(self, keys: Row[BlockKey]) -> list[BlockKey]:
        """The names on the disk of what a prefix of these blocks needs that is not near."""
        wanted: list[BlockKey] = []
        for name in self._lacking(keys, self._is_near):
            wanted += self._state_parts(name) if prefix_keys.is_of_state(name) else [name]
        return wanted

    def _keep_found(self, seq: Sequence, keys: list[BlockKey], found: list[int]) -> None:
        """Blocks that a second request finds go to the disk at once, since a process that is killed loses the others;
        no more of them in a step than come back in one."""
        if self.disk is None or seq.request.batch:
            return
        if self.states is not None and found:
            key = keys[len(found) // self._num_groups - 1]
            self._keep_state(self.states.lookup((key,))[0], key)
        for entry, block in enumerate(found):
            if block == GIVEN_BACK or block in self._kept:
                continue
            if self._num_kept >= self._most_restored or not self.disk.takes_more():
                return
            self._kept.add(block)
            name = prefix_keys.of_group(keys[entry // self._num_groups], entry % self._num_groups)
            if name[0][1] not in self._erased and self.disk.reserve(name):
                self._num_kept += 1
                self._to_host(block, name, is_for_disk=True)

    def _keep_state(self, state: int, key: BlockKey) -> None:
        slots, name = self._state_slots, prefix_keys.of_state(key)
        has_room = not self._num_kept or self._num_kept + slots <= self._most_restored
        if self.disk is None or key[0][1] in self._erased or self._state_on_disk(name):
            return
        if has_room and self.disk.takes_more(slots):
            self._num_kept += slots
            self._state_to_host(state, key)
