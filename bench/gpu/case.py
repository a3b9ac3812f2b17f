"""What the suite is made of."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from bench.gpu.stopwatch import Stopwatch, measure_ceilings
from bench.gpu.timing import Ceilings

Row = dict[str, Any]


class Skipped(Exception):
    """A case cannot run here, for a reason that is nothing wrong: a library or a GPU is not there."""


@dataclass
class Bench:
    """What the cases of one process share: the device, its ceilings, and the one large thing that is held.

    `on_building` is called with True before that is made and with False after it, so that a case's limit does not
    depend on whether an earlier one has made it."""

    device: torch.device
    on_building: Callable[[bool], None] = lambda building: None
    watch: Stopwatch = field(init=False)
    _ceilings: Ceilings | None = None
    _held: tuple[object, Any] = (None, None)

    def __post_init__(self) -> None:
        self.watch = Stopwatch(self.device)

    @property
    def ceilings(self) -> Ceilings:
        """Measured when they are first asked for."""
        if self._ceilings is None:
            self._ceilings = measure_ceilings(self.watch)
        return self._ceilings

    def hold(self, key: object, make: Callable[[], Any]) -> Any:
        """What `make` made for this key before, if nothing else was held since: a model that many cases use."""
        if self._held[0] != key:
            self.drop()
            self.on_building(True)
            self._held = (key, make())
            self.on_building(False)
        return self._held[1]

    def record(self, work: Callable[[], object]) -> Callable[[], object]:
        """Record the work as a CUDA graph, and return what replays it. Without a GPU, the work itself."""
        work()
        if self.device.type != "cuda":
            return work
        self.watch.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        return graph.replay

    def drop(self) -> None:
        """Give its memory back."""
        self._held = (None, None)
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


@dataclass(frozen=True)
class Case:
    """`run` gives a row or several, each with "ok" where something was compared. `limit_s`: after so long it hangs,
    counted again from when `Bench.hold` has made what it holds.
    `alone`: it is timed, and nothing else may run meanwhile."""

    section: str
    name: str
    run: Callable[[Bench], Row | list[Row]]
    limit_s: float = 60.0
    alone: bool = True

    @property
    def key(self) -> str:
        return f"{self.section}/{self.name}"
