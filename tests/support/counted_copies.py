"""Counts what engines copy between a KV cache and host memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest

from loraplex.engine.kv.host_blocks import HostBlocks
from loraplex.engine.types import BlockCopy


class CountedCopies:
    """The copies of all engines, by whether they go to host memory: of `blocks` and of `parts` of states."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.blocks: Counter[bool] = Counter()
        self.parts: Counter[bool] = Counter()
        copy = HostBlocks.copy

        def counted(blocks: HostBlocks, copies: Sequence[BlockCopy]) -> None:
            for one in copies:
                (self.blocks if one.part is None else self.parts)[one.to_host] += 1
            copy(blocks, copies)

        patch.setattr(HostBlocks, "copy", counted)
