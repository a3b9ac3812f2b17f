"""The blocks of sequences: how many one needs, and which it gives back.

A sequence has a table of blocks for each group of layers. `Sequence.block_ids` has them side by side: of G groups, the
block of positions 16·i … 16·i+15 for group g is entry i·G + g.

A group whose layers see a window of w positions reads no block before the last ⌈(w - 1) / 16⌉ and those that are begun.
A sequence gives the others back when the rows that saw them have been computed, and GIVEN_BACK stands in their place.
What they hold stays in the prefix cache, for each group under a key of its own, until they are allocated again.

So a prefix of n blocks is found where each group that keeps all positions has all n, and each group with a window the
last ⌈(w - 1) / 16⌉ of them: position 16·n sees no more. Of several such n it is the largest (`prefix_blocks`).
"""

from __future__ import annotations

from collections.abc import Sequence as Row
from itertools import compress

from loraplex.engine.kv import prefix_keys
from loraplex.engine.kv.layers import blocks_for, blocks_unseen
from loraplex.engine.kv.prefix_blocks import GIVEN_BACK, PrefixBlocks
from loraplex.engine.types import ScheduledSequence, Sequence
from loraplex.kernels.attention import BLOCK_SIZE

_GROWTH = 1
"""Blocks of each group that are reserved for the growth of each running sequence before another one starts."""


def holds_blocks(seq: Sequence) -> bool:
    """Whether preempting a running sequence may free blocks at once: those of one whose last token is in flight become
    free by themselves, and one that is measured has none."""
    return seq.measured is None and not seq.all_sampled


class SequenceBlocks(PrefixBlocks):
    """The pool of `num_blocks` blocks, as sequences with `needs` hold them, and their windows and states. `num_states`
    and what follows as of `TieredBlocks`."""

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
        if self.restoring and seq in self.restoring:
            every += seq.num_given_back
        if not every or not self._windows:
            return every
        # It gives nothing back for what is in flight until that is collected.
        ahead = seq.num_tokens - seq.blocks_done * BLOCK_SIZE
        return max(0, min(every, self.needs.of(seq.num_tokens, ahead) - seq.num_held))

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
        """The blocks of a table, without those that were given back or are on their way."""
        return [block for block in block_ids if block != GIVEN_BACK] if GIVEN_BACK in block_ids else block_ids

    def begin(self, seq: Sequence, found: list[int]) -> None:
        """A waiting sequence starts behind these blocks, or, where more of its prefix comes, behind none as yet."""
        is_kept = seq.measured is None and not seq.request.is_shadow
        if self.host is not None and is_kept:
            found = self.begin_restoring(seq, found)
        held = self.held(found)
        self.share(held, is_spare=seq.request.batch)
        seq.block_ids = tuple(found)
        seq.num_given_back = len(found) - len(held)
        seq.blocks_done = len(found) // self._num_groups
        seq.num_computed = seq.blocks_done * BLOCK_SIZE
        if seq.measured is not None:
            return
        if self.states is not None:
            if is_kept:
                self._set_ends(seq)
            seq.window_slot = self.places.take()
            self.states.begin(seq, seq.blocks_done)

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
        names = [
            prefix_keys.of_group(key, group) for key in seq.block_keys for group in range(self._num_groups)
        ]
        self.disown(names)
        if self.host is not None:
            self.host.disown(names)
            self.host.disown(map(prefix_keys.of_state, seq.block_keys))
        if self.disk is not None:
            self.disk.remove(names)
            if self.states is not None:
                self.disk.remove_states(map(prefix_keys.of_state, seq.block_keys))
        if self.states is not None:
            self.states.disown(seq.block_keys)
            self.states.drop(seq, keeps=False)
