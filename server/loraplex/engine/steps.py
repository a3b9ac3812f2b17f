"""A step from its submission to its answer: who computes it, and what is kept of it meanwhile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from loraplex.adapters.cache import Lease
from loraplex.engine.types import Sequence, StepPlan, StepResult


class Runner(Protocol):
    """Computes steps, in the order in which they are submitted."""

    def submit(self, plan: StepPlan) -> object:
        """Begin a step; returns a handle to collect it by. At most `lookahead` + 1 steps are in flight. Raises as
        `collect` does; then nothing is in flight for it."""
        ...

    def collect(self, handle: object) -> StepResult:
        """Wait for the oldest step in flight. Raises DeviceOutOfMemory: then it is computed anew in smaller steps.
        Raises DeviceLost: then the engine ends. Raises anything else: then all requests of the step end with an
        error."""
        ...


@dataclass(slots=True)
class Flight:
    """A submitted step, and its leases on the adapters that it reads: their pages stay until it is collected,
    whatever becomes of its sequences."""

    plan: StepPlan
    handle: object
    leases: list[Lease]

    @property
    def sequences(self) -> list[Sequence]:
        return [row.seq for row in self.plan.scheduled]
