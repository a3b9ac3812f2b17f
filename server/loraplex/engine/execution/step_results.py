"""The results of steps, as the runner gives them back. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from loraplex.adapters.numerics.outputs import SiteOutputs
from loraplex.engine.logprobs import Scores
from loraplex.engine.pooling import PooledPart


@dataclass(frozen=True, slots=True)
class RowFailure:
    """The failure of one slice alone. `cause`: its input was wrong before the step; or numbers came out that are
    infinite, or none; or its grammar cannot be followed; or its adapter did not arrive."""

    reason: str
    cause: Literal["input", "numbers", "grammar", "adapter"] = "input"


class RowResult(msgspec.Struct, gc=False):
    """The outcome of a slice. `token_ids`: none where it does not sample, else the drafted tokens that were accepted,
    `num_accepted` of them, the one sampled behind them, and those that a grammar forces then. `ended`: the last one
    ends its grammar. `scores`: of its sampled tokens and of its `targets`, where it asks for them. `pooled`: its part,
    where it has a `pool_start`."""

    token_ids: tuple[int, ...] = ()
    num_accepted: int = 0
    failed: RowFailure | None = None
    ended: bool = False
    scores: Scores | None = None
    pooled: PooledPart | None = None

    def fail(self, reason: str) -> None:
        """Mark the row's numbers as unusable. An earlier failure stays."""
        self.failed = self.failed or RowFailure(reason, "numbers")


@dataclass(frozen=True, slots=True)
class ExpertLoads:
    """The rows that went to each expert: `loads` [n, E] int64 in each of n `layers` with a mixture."""

    layers: tuple[int, ...]
    loads: NDArray[np.int64]


@dataclass(slots=True)
class StepResult:
    """The outcome of one step. `rows` are in the order of `plan.scheduled`. `measured` are the outputs of
    `plan.measure`; None where there is none, or it failed. `experts`: of a model with routers."""

    step_id: int
    rows: list[RowResult]
    measured: SiteOutputs | None = None
    experts: ExpertLoads | None = None
