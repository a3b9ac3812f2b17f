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
from loraplex.engine.kv.disk_tier import DiskTier
from loraplex.engine.kv.handed_blocks import HandedBlocks
from loraplex.engine.kv.layers import BlockNeeds, blocks_for, blocks_unseen
from loraplex.engine.kv.states import Places
from loraplex.engine.types import BlockCopy, BlockKey, ScheduledSequence, Sequence
from loraplex.kernels.attention import BLOCK_SIZE

GIVEN_BACK = -1
"""Stands in a table for a block that the sequence has given back."""
_GROWTH = 1
"""Blocks of each group that are reserved for the growth of each running sequence before another one starts."""


def holds_blocks(seq: Sequence) -> bool:
    """Whether preempting a running sequence may free blocks at once: those of one whose last token is in flight become
    free by themselves, and one that is measured has none."""
    return seq.measured is None and not seq.all_sampled


class SequenceBlocks(HandedBlocks):
    """The pool of `num_blocks` blocks, as sequences with `needs` hold them, and their windows and states. `num_states`
    and what follows as of `TieredBlocks`; host memory is for a model whose layers are one group that keeps all
    positions."""

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
        self.places = Places(num_windows)
        """Those of windows."""
        self.restoring: dict[Sequence, float | None] = {}
        """Running sequences whose prefix is on its way from host memory: nothing of them is computed before. And up to
        when their waiting was counted, None before the first step."""
        self._num_groups = len(needs.windows)
        self._windows = [(group, window) for group, window in enumerate(needs.windows) if window is not None]

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
        on_device = len(self._find(keys)) // self._num_groups
        num_cached = on_device if self.host is None else self._num_there(keys)
        self.states.begin(seq, seq.blocks_done, num_cached)

    def restore(self, seq: Sequence, now: float) -> bool:
        """Bring what host memory has of a sequence's prefix, at most what is left to the next step. Returns whether the
        sequence waits for no more.

        The index is asked again in each step: what was erased meanwhile does not come. A block is found by others at
        once, since its copy is planned before whatever they compute."""
        assert self.host is not None, "nothing is in host memory"
        is_spare, brought, counts = seq.request.batch, list[int](), self.host.counts
        keys = prefix_keys.extend_keys(seq)[: prefix_keys.findable_blocks(seq)]
        if self.states is not None:
            keys = keys[: self._longest(keys, seq.states[-1][0])]
        if (since := self.restoring.get(seq)) is not None:
            counts.restore_s += now - since
        else:
            # What this run displaces on the device goes to the slots of others.
            for key in reversed(keys[len(seq.block_ids) :]):
                self.host.read(key)
            if self.states is not None and keys:
                self.host.read(prefix_keys.of_state(keys[-1]))
            self._keep_found(seq)
        for key in keys[len(seq.block_ids) :]:
            if found := self.lookup((key,)):
                self.share(found, is_spare=is_spare)
                brought += found
                continue
            payload = None
            if self.disk is not None and key not in self.host:
                payload = self.disk.payload(key)
            if (payload is None and key not in self.host) or not self.num_free:
                break
            if not self._may_restore(1):
                self._brought(seq, brought)
                self.restoring[seq] = now
                return False
            taken = self.allocate(1)
            slots = (-1,) if payload is not None else self.host.read(key)
            if not slots:  # written over by what the block held
                self.release(taken)
                break
            name = None if payload is None else key
            self.copies.append(BlockCopy(taken[0], slots[0], False, name, payload))
            self.register(taken[0], key, is_spare=is_spare)
            self._num_restored += 1
            if payload is None:
                counts.restored += 1
            elif self.disk is not None:
                self.disk.num_restored += 1
            brought += taken
        self._brought(seq, brought)
        if not self._go_on(seq, waits=True):
            self.restoring[seq] = now
            return False
        self.restoring.pop(seq, None)
        if self.disk is not None:
            self.disk.close_request(seq.request_id)
        return True

    def restore_at_once(self, seq: Sequence, now: float) -> None:
        """Bring what comes of a sequence's prefix in the next step, and wait for no more. Blocks come to nothing
        without the state behind them."""
        keys = prefix_keys.extend_keys(seq)[: prefix_keys.findable_blocks(seq)]
        if self.states is None or self._comes_at_once(keys[: self._longest(keys, seq.states[-1][0])]):
            self.restore(seq, now)
        self.stop_restoring(seq)

    def stop_restoring(self, seq: Sequence) -> None:
        """A sequence waits for no more of its prefix, and goes on behind what has come of it."""
        if seq in self.restoring:
            del self.restoring[seq]
            self._go_on(seq, waits=False)

    def _go_on(self, seq: Sequence, *, waits: bool) -> bool:
        """Begin a sequence of a model with states behind the most of the blocks that were brought that have a state,
        and give the others back. With `waits`, False where that state may only come in the next step."""
        if self.states is None or self.host is None:
            return True
        for number in range(len(seq.block_ids), seq.states[-1][0], -1):
            key = seq.block_keys[number - 1]
            if self.states.lookup((key,)):
                self.states.begin_later(seq, number)
                break
            name = prefix_keys.of_state(key)
            if name not in self.host and not self._state_read(name):
                continue
            if self._may_restore(self._state_slots):
                if (state := self._bring_state(seq, name)) is not None:
                    self.states.begin_later(seq, number, state)
                    break
            elif waits:
                return False
        number = seq.states[-1][0]
        self.release(seq.block_ids[number:])
        seq.block_ids, seq.blocks_done = seq.block_ids[:number], number
        seq.num_computed = number * BLOCK_SIZE
        return True

    def _bring_state(self, seq: Sequence, name: BlockKey) -> int | None:
        """The state that gets the content of the one of this name; None where that is not possible."""
        assert self.states is not None
        assert self.host is not None
        state = self.states.spare_one(seq)
        if state is None:
            return None
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
            return None
        self._num_restored += self._state_slots
        return state

    def on_disk(self, seq: Sequence) -> tuple[list[BlockKey], int]:
        """The blocks of a new sequence's prefix that neither the pool nor host memory has, as far as they lie on the
        disk without a gap, behind the parts of a state where one is needed; and how many blocks need not be computed
        with them."""
        request = seq.request
        if self.disk is None or self.host is None or seq.measured is not None or request.background:
            return [], 0  # what runs in the background may begin much later
        keys = prefix_keys.extend_keys(seq)[: prefix_keys.findable_blocks(seq)]
        found: list[BlockKey] = []
        count = len(keys)
        for number, key in enumerate(keys):
            if key in self._block_of or key in self.host:
                continue
            if key not in self.disk or len(found) == self.disk.most_asked:
                count = number
                break
            found.append(key)
        return (found, len(found)) if self.states is None else self._with_state(keys[:count], found)

    def _with_state(self, keys: list[BlockKey], found: list[BlockKey]) -> tuple[list[BlockKey], int]:
        """The answer of `on_disk` for a model with states. `keys`: of blocks that are anywhere; `found`: of those on
        the disk."""
        assert self.states is not None
        assert self.host is not None
        assert self.disk is not None
        begun = self._longest(keys, 0)
        lacking = frozenset(found)
        for number in range(len(keys), begun, -1):
            key = keys[number - 1]
            name = prefix_keys.of_state(key)
            is_near = bool(self.states.lookup((key,))) or name in self.host
            if is_near or self._state_on_disk(name):
                parts = [] if is_near else self._state_parts(name)
                wanted = [*parts, *(one for one in keys[:number] if one in lacking)]
                return (wanted, number - begun) if len(wanted) <= self.disk.most_asked else ([], 0)
        return [], 0

    def _keep_found(self, seq: Sequence) -> None:
        """Blocks that a second request finds go to the disk at once, since a process that is killed loses the others;
        no more of them in a step than come back in one."""
        if self.disk is None or seq.request.batch:
            return
        number, state = seq.states[-1] if self.states is not None else (0, -1)
        if number:
            self._keep_state(state, seq.block_keys[number - 1])
        for block, key in zip(seq.block_ids, seq.block_keys, strict=False):
            if block in self._kept:
                continue
            if self._num_kept >= self._most_restored or not self.disk.takes_more():
                return
            self._kept.add(block)
            if key[0][1] not in self._erased and self.disk.reserve(key):
                self._num_kept += 1
                self._to_host(block, key, is_for_disk=True)

    def _keep_state(self, state: int, key: BlockKey) -> None:
        slots, name = self._state_slots, prefix_keys.of_state(key)
        has_room = not self._num_kept or self._num_kept + slots <= self._most_restored
        if self.disk is None or key[0][1] in self._erased or self._state_on_disk(name):
            return
        if has_room and self.disk.takes_more(slots):
            self._num_kept += slots
            self._state_to_host(state, key)

    def _brought(self, seq: Sequence, block_ids: list[int]) -> None:
        self.note_chain(seq.block_keys, len(seq.block_ids), len(seq.block_ids) + len(block_ids))
        seq.block_ids += tuple(block_ids)
        if self.states is None:  # else nothing is found before the state behind them is here
            seq.blocks_done += len(block_ids)
            seq.num_computed = seq.blocks_done * BLOCK_SIZE

    def num_found(self, seq: Sequence) -> int:
        """Positions of a waiting sequence that need not be computed, as far as the caches have them now."""
        count = len(self.find(seq)) // self._num_groups
        if self.host is not None:
            keys = prefix_keys.extend_keys(seq)[: prefix_keys.findable_blocks(seq)]
            if self.states is None:
                count += len(self.host.find(keys[count:]))
            else:
                count = self._longest(keys, count)
        return count * BLOCK_SIZE

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
        self.restoring.pop(seq, None)

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
        self.note_chain(seq.block_keys, seq.blocks_done, min(done, len(seq.block_keys)))
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

    def drop(self, seq: Sequence, *, keeps: bool = True) -> None:
        """A sequence gives up all of its blocks, and its window and states; `keeps` as of `SequenceStates.drop`."""
        self.restoring.pop(seq, None)
        self.release(self.held(seq.block_ids))
        if self.states is not None:
            self.states.drop(seq, keeps=keeps)
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
            self.host.disown(map(prefix_keys.of_state, seq.block_keys))
        if self.disk is not None:
            self.disk.remove(seq.block_keys)
            if self.states is not None:
                self.disk.remove_states(map(prefix_keys.of_state, seq.block_keys))
        if self.states is not None:
            self.states.disown(seq.block_keys)
            self.states.drop(seq, keeps=False)
