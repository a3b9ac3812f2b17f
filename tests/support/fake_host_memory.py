"""Blocks and states in the host memory of a `FakeRunner`: their contents, and whose they are."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable, Iterable

from loraplex.engine.types import BlockCopy, BlockKey, StepPlan
from loraplex.kernels.attention import BLOCK_SIZE

BLOCK_BYTES = 2048
"""Of a block on its way to a disk and from there."""
Content = tuple[list[int], list[str]]
"""The values and tenants of a block's positions."""
_Owner = tuple[str, str | None]
"""The tenant and version (None: the base) that a block or a state is of."""
_ERASED: _Owner = ("", "erased")
"""Of what nothing may read any more."""
_NOBODY: _Owner = ("", None)
_TORN = -1_000_033
"""What a state is whose parts were not copied in their order."""


class FakeHostMemory:
    """`num_slots` blocks, or parts of states, each of `state_slots`. A plan copies from and to them: `most_restored` at
    most come back, or one state, and none of a version that was `erased` since it was written. Blocks go on to a disk
    by `keep`. `disk` counts the erasures of each version there: a block that was copied before one may not come back
    behind it."""

    def __init__(
        self,
        num_blocks: int,
        num_slots: int,
        most_restored: int,
        num_states: int = 0,
        state_slots: int = 0,
        num_groups: int = 1,
    ) -> None:
        self.disk: Counter[str | None] | None = None
        self.keep: Callable[[BlockKey, memoryview], None] = lambda key, payload: None
        self.hand: Callable[[BlockKey, bytes], None] = lambda key, payload: None
        self._passing: dict[int, Content] = {}  # blocks that a piece of a state goes through
        self._generations: dict[BlockKey, int] = {}  # of blocks on their way to the disk
        self._most_restored = most_restored
        self._contents: list[Content] = [([], [])] * num_slots
        # As the steps that were submitted leave them; they run in this order.
        self._of_blocks = [_NOBODY] * num_blocks
        self._of_states = [_NOBODY] * num_states
        self._of_slots = [_ERASED] * num_slots
        self._state_slots = state_slots
        self._num_groups = num_groups
        self.num_restored = 0
        self.num_states_restored = 0

    def erased(self, digest: str) -> None:
        """A version was deleted."""
        self._of_slots = [_ERASED if of[1] == digest else of for of in self._of_slots]
        if self.disk is not None:
            self.disk[digest] += 1

    def submitted(self, plan: StepPlan) -> list[str]:
        """Find out why the copies of a plan are wrong: an empty list where they are right."""
        wrong: list[str] = []
        states: dict[int, list[int]] = {}
        for one in plan.copies:
            of_device = self._of_blocks if one.part is None else self._of_states
            if one.to_host and (one.slot < 0 or one.block < 0):
                of = self._of_slots[one.slot] if one.block < 0 else of_device[one.block]
                if one.key is None or of != one.key[0]:
                    wrong.append(f"a block of {of} is handed on as {one.key}")
                continue
            if one.to_host:
                self._of_slots[one.slot] = of_device[one.block]
                if one.key is not None and self.disk is not None:
                    self._generations[one.key] = self.disk[one.key[0][1]]
                continue
            if one.payload is not None and one.key is not None and self.disk is not None:
                of_device[one.block] = one.key[0]
                if one.part is not None:
                    states.setdefault(one.block, []).append(one.part)
                if unpacked(one.payload)[0] != self.disk[one.key[0][1]]:
                    wrong.append("a block comes back after its version was deleted")
                continue
            if one.payload is not None and one.key is not None:
                of_device[one.block] = one.key[0]
                if not {*unpacked(one.payload)[1][1]} <= {one.key[0][0]}:
                    wrong.append(f"a block of another tenant comes as {one.key[0]}")
                continue
            of_device[one.block] = self._of_slots[one.slot]
            if one.part is not None:
                states.setdefault(one.block, []).append(one.part)
            if self._of_slots[one.slot] == _ERASED:
                wrong.append("a block comes back after its version was deleted")
        for row in plan.scheduled:
            tenant, adapter = row.request.tenant_id, row.request.adapter
            of = tenant, None if row.slot < 0 or adapter is None else adapter.digest
            first, end = row.start // BLOCK_SIZE, -(-(row.start + row.num_tokens) // BLOCK_SIZE)
            for block in row.block_ids[first * self._num_groups : end * self._num_groups]:
                self._of_blocks[block] = of
            if row.start >= BLOCK_SIZE and self._of_states and self._of_states[row.state][0] != tenant:
                wrong.append(f"{row.request_id} begins with a state of {self._of_states[row.state]}")
            for state in row.state_targets:
                self._of_states[state] = of
        if any(parts != [*range(self._state_slots)] for parts in states.values()):
            wrong.append(f"states come back in the parts {[*states.values()]} of {self._state_slots} each")
        restored = sum(not one.to_host for one in plan.copies)
        self.num_restored += restored
        self.num_states_restored += len(states)
        if restored > self._most_restored and not (len(states) == 1 and restored == self._state_slots):
            wrong.append(f"{restored} blocks come back in a step, {self._most_restored} may")
        return wrong

    def copy(
        self, copies: Iterable[BlockCopy], values: list[int], tenants: list[str], states: list[int]
    ) -> None:
        """Copy blocks between here and the device's `values` and `tenants` of all positions, and states."""
        for one in copies:
            if one.to_host and one.key is not None and (one.slot < 0 or one.block < 0):
                self.hand(one.key, bytes(packed(0, self._content(one, values, tenants, states))))
                continue
            if one.part is not None:
                self._copy_part(one, one.part, states)
                continue
            places = slice(one.block * BLOCK_SIZE, (one.block + 1) * BLOCK_SIZE)
            if one.to_host and one.block in self._passing:
                self._contents[one.slot] = self._passing.pop(one.block)
            elif one.to_host:
                self._contents[one.slot] = values[places], tenants[places]
                if one.key is not None:
                    self.keep(one.key, packed(self._generations.pop(one.key, 0), self._contents[one.slot]))
            elif one.payload is not None and one.key is not None and len(one.key[1]) > 33:
                self._passing[one.block] = unpacked(one.payload)[1]
            elif one.payload is not None:
                values[places], tenants[places] = unpacked(one.payload)[1]
            else:
                values[places], tenants[places] = self._contents[one.slot]

    def _content(self, one: BlockCopy, values: list[int], tenants: list[str], states: list[int]) -> Content:
        """What a slot, a block or a part of a state holds."""
        if one.block < 0:
            return self._contents[one.slot]
        if one.part is not None:
            return [states[one.block], one.part], []
        places = slice(one.block * BLOCK_SIZE, (one.block + 1) * BLOCK_SIZE)
        return values[places], tenants[places]

    def _copy_part(self, one: BlockCopy, part: int, states: list[int]) -> None:
        if one.to_host:
            self._contents[one.slot] = [states[one.block], part], []
            if one.key is not None:
                self.keep(one.key, packed(self._generations.pop(one.key, 0), self._contents[one.slot]))
            return
        content, _ = self._contents[one.slot] if one.payload is None else unpacked(one.payload)[1]
        is_whole = content[1:] == [part] and (part == 0 or content[0] == states[one.block])
        states[one.block] = content[0] if is_whole else _TORN


def packed(generation: int, content: Content) -> memoryview:
    payload = pickle.dumps((generation, content))
    assert len(payload) <= BLOCK_BYTES
    return memoryview(payload.ljust(BLOCK_BYTES, b"\0"))


def unpacked(payload: bytes) -> tuple[int, Content]:
    found: tuple[int, Content] = pickle.loads(payload)
    return found
