"""The work of the tier on a disk: blocks that requests have asked for, and blocks that are to be written."""

from __future__ import annotations

from dataclasses import dataclass

from loraplex.engine.types import BlockKey


@dataclass(slots=True, eq=False)
class Asked:
    """A request that has asked for blocks. `missing` are those that were not read yet; `until` when it goes on without
    them; `is_held` before it was told to go on."""

    until: float
    keys: tuple[BlockKey, ...]
    missing: set[BlockKey]
    is_held: bool = True


@dataclass(slots=True, eq=False)
class Write:
    """A block that is to be written. `payload` is None until the runner has copied it."""

    payload: memoryview | None = None
    is_void: bool = False  # its owner was erased
