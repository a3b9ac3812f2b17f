"""Engines with host memory, which hand prefixes on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from loraplex.engine.core.handed import HandedBlock
from support.engine.core_engine import CoreEngine

SIZES: dict[str, Any] = {"num_blocks": 40, "num_host_blocks": 200, "most_restored_blocks": 64}
STATES = SIZES | {"num_states": 8, "num_windows": 2, "state_slots": 3}


def make(**config: Any) -> CoreEngine:
    return CoreEngine(**(SIZES | config))


def pages(engine: CoreEngine) -> Iterator[tuple[HandedBlock, ...]]:
    begins, is_last = True, False
    while not is_last:
        page, is_last = engine.core.handover.next_page(begins=begins)
        begins = False
        yield page
