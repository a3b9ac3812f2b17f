"""Blocks in the host memory of a `FakeRunner`: their contents, and whose they are."""

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
_ERASED = "erased"
"""The version of a block that nothing may read any more."""


class FakeHostMemory:
    """`num_slots` blocks. A plan copies from and to them: `most_restored` at most come back, and none of a version that
    was `erased` since it was written. Blocks go on to a disk by `keep`. `disk` counts the erasures of each version
    there: a block that was copied before one may not come back behind it."""

    def __init__(self, num_blocks: int, num_slots: int, most_restored: int) -> None:
        self.disk: Counter[str | None] | None = None
        self.keep: Callable[[BlockKey, memoryview], None] = lambda key, payload: None
        self._generations: dict[BlockKey, int] = {}  # of blocks on their way to the disk
        self._most_restored = most_restored
        self._contents: list[Content] = [([], [])] * num_slots
        # As the steps that were submitted leave them; they run in this order.
        self._of_blocks: list[str | None] = [None] * num_blocks
        self._of_slots: list[str | None] = [_ERASED] * num_slots
        self.num_restored = 0

    def erased(self, digest: str) -> None:
        """A version was deleted."""
        self._of_slots = [_ERASED if of == digest else of for of in self._of_slots]
        if self.disk is not None:
            self.disk[digest] += 1

    def submitted(self, plan: StepPlan) -> list[str]:
        """Find out why the copies of a plan are wrong: an empty list where they are right."""
        wrong: list[str] = []
        for one in plan.copies:
            if one.to_host:
                self._of_slots[one.slot] = self._of_blocks[one.block]
                if one.key is not None and self.disk is not None:
                    self._generations[one.key] = self.disk[one.key[0][1]]
                continue
            if one.payload is not None and one.key is not None and self.disk is not None:
                digest = one.key[0][1]
                self._of_blocks[one.block] = digest
                if unpacked(one.payload)[0] != self.disk[digest]:
                    wrong.append("a block comes back after its version was deleted")
                continue
            self._of_blocks[one.block] = self._of_slots[one.slot]
            if self._of_slots[one.slot] == _ERASED:
                wrong.append("a block comes back after its version was deleted")
        for row in plan.scheduled:
            of = None if row.slot < 0 or row.request.adapter is None else row.request.adapter.digest
            first, end = row.start // BLOCK_SIZE, -(-(row.start + row.num_tokens) // BLOCK_SIZE)
            for block in row.block_ids[first:end]:
                self._of_blocks[block] = of
        restored = sum(not one.to_host for one in plan.copies)
        self.num_restored += restored
        if restored > self._most_restored:
            wrong.append(f"{restored} blocks come back in a step, {self._most_restored} may")
        return wrong

    def copy(self, copies: Iterable[BlockCopy], values: list[int], tenants: list[str]) -> None:
        """Copy blocks between here and the device's `values` and `tenants` of all positions."""
        for one in copies:
            places = slice(one.block * BLOCK_SIZE, (one.block + 1) * BLOCK_SIZE)
            if one.to_host:
                self._contents[one.slot] = values[places], tenants[places]
                if one.key is not None:
                    self.keep(one.key, packed(self._generations.pop(one.key, 0), self._contents[one.slot]))
            elif one.payload is not None:
                values[places], tenants[places] = unpacked(one.payload)[1]
            else:
                values[places], tenants[places] = self._contents[one.slot]


def packed(generation: int, content: Content) -> memoryview:
    payload = pickle.dumps((generation, content))
    assert len(payload) <= BLOCK_BYTES
    return memoryview(payload.ljust(BLOCK_BYTES, b"\0"))


def unpacked(payload: bytes) -> tuple[int, Content]:
    found: tuple[int, Content] = pickle.loads(payload)
    return found
