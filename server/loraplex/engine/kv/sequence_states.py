"""The states of sequences of a model with windows, and which of them are kept for others.

A state is what all layers with a window keep of the positions up to a multiple of 16; a row at the end of a window
writes the next one. States are counted and named as blocks are: the state behind 16·n positions has the key of block
n - 1. A sequence that begins behind a found prefix shares its state, and no byte is copied.

A state that has a key, or that several sequences hold, is never written: the next end of a window writes another one.
Where states are plenty, a sequence writes another one at each end of a window, and keeps the one before until the step
is collected. So the state behind what was computed last is there when an answer ends, a sequence is preempted, or a
step did not fit into the device's memory.

Kept are the states behind the last multiple of 16 below the end of a prompt, up to which a request may find it; the one
at or before the position where an adapter begins to act; the end of the blocks that a request found beyond its state;
and the last one of a sequence that ends or is preempted. (The third: Pan et al., "Marconi", 2024.)
"""

from __future__ import annotations

from collections.abc import Callable

from loraplex.engine.kv import prefix_keys
from loraplex.engine.kv.blocks import BlockManager
from loraplex.engine.types import BlockKey, Sequence
from loraplex.kernels.attention import BLOCK_SIZE


class SequenceStates(BlockManager):
    """The pool of `num_states` states, more than the `num_windows` sequences that run at once. `forgotten` is told of
    each state that is about to be written over, with its key, unless lines of batches alone have used it."""

    def __init__(
        self,
        num_states: int,
        num_windows: int,
        forgotten: Callable[[int, BlockKey], None] = lambda state, key: None,
    ) -> None:
        super().__init__(num_states)
        assert num_states > num_windows, f"{num_states} states for {num_windows} windows: one more is needed"
        self._num_windows = num_windows
        self._forgotten = forgotten

    def on_forgotten(self, block: int, key: BlockKey) -> None:
        self._forgotten(block, key)

    @property
    def _are_plenty(self) -> bool:
        """Whether one may be held for nobody's next step."""
        return self.num_free > self._num_windows

    def begin(self, seq: Sequence, num_found: int) -> None:
        """A sequence starts behind `num_found` blocks."""
        if num_found:
            taken = self.lookup_all(seq.block_keys[num_found - 1 : num_found])
            self.share(taken, is_spare=seq.request.batch)
        else:
            taken = self.allocate(1)
        seq.states = ((num_found, taken[0]),)

    def advance(self, seq: Sequence, end: int) -> tuple[int, ...] | None:
        """The targets of the slice up to `end`; None where a state is lacking for now. The sequence holds them."""
        ends = range(seq.num_computed // BLOCK_SIZE + 1, end // BLOCK_SIZE + 1)
        if not ends:
            return ()
        held, targets = [*seq.states], list[int]()
        num_before = len(held)
        for number in ends:
            before, state = held[-1]
            is_new = len(held) > num_before and before not in seq.kept_ends
            if is_new:
                held[-1] = number, state
            elif self._are_plenty or (self._refs[state] > 1 and self.num_free):
                state = self.allocate(1)[0]
                held.append((number, state))
            elif self._refs[state] == 1:
                self._forget(state)
                held[-1] = number, state
            else:
                self.release([state for _, state in held[num_before:]])
                return None
            targets.append(state)
        seq.states = tuple(held)
        return tuple(targets)

    def can_advance(self, seq: Sequence) -> bool:
        """Whether `advance` finds a target now, however far."""
        return self.num_free > 0 or self._refs[seq.states[-1][1]] == 1

    def computed(self, seq: Sequence, done: int) -> None:
        """The sequence's first `done` blocks were computed and collected."""
        known = [held for held in seq.states if held[0] <= done]
        for number, state in known:
            if number in seq.kept_ends:
                self._name(seq, number, state)
        if len(known) > 1:
            self.release([state for _, state in known[:-1]])
            seq.states = seq.states[len(known) - 1 :]

    def go_back(self, seq: Sequence, start: int) -> int | None:
        """Steps from position `start` on were not computed. The position from which the sequence goes on: where a
        window ended since, its first row, for later ones lie over it. None if the state there was written over."""
        number = start // BLOCK_SIZE
        held = tuple(held for held in seq.states if held[0] <= number)
        if not held or held[-1][0] != number:
            return None
        lost = seq.states[len(held) :]
        self.release([state for _, state in lost])
        seq.states = held
        return number * BLOCK_SIZE if lost else start

    def drop(self, seq: Sequence, *, keeps: bool = True) -> None:
        """A sequence gives up its states; with `keeps`, the last one of what was computed can be found."""
        known = [held for held in seq.states if 0 < held[0] <= seq.blocks_done]
        if known and keeps and not seq.request.is_shadow:
            self._name(seq, *known[-1])
        self.release([state for _, state in seq.states])
        seq.states, seq.kept_ends = (), ()

    def spare_one(self, seq: Sequence) -> int | None:
        """A state that another one's content may come to. The sequence has begun, and nothing of it was computed. It
        is its own state, unless others may find that, or one that it takes beside; None where none is free."""
        held = seq.states[-1][1]
        if self._refs[held] == 1 and self._key_of[held] is None:
            return held
        return self.allocate(1)[0] if self.num_free else None

    def begin_later(self, seq: Sequence, number: int, state: int | None = None) -> None:
        """Such a sequence goes on behind `number` blocks instead of fewer. `state`: of `spare_one`, where the content
        is on its way; None: the one that is found there."""
        held = seq.states[-1][1]
        if state is None:
            (found,) = self.lookup_all(seq.block_keys[number - 1 : number])
            self.share((found,), is_spare=seq.request.batch)
        else:
            found = state
            self._name(seq, number, state)
        if held != found:
            self.release((held,))
        seq.states = ((number, found),)
        seq.kept_ends = tuple(n for n in seq.kept_ends if n > number)

    def _forget(self, state: int) -> None:
        """A held state is about to be written over."""
        key = self._key_of[state]
        if key is not None and state not in self._spare:
            self.on_forgotten(state, key)
        self._drop_key(state)

    def _name(self, seq: Sequence, number: int, state: int) -> None:
        self.register(state, prefix_keys.extend_keys(seq)[number - 1], is_spare=seq.request.batch)
