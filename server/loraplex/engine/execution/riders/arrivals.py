"""Adapters of a step whose pages are still being copied to the device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from loraplex.engine.execution.riders.rider import Rider
from loraplex.engine.execution.step_results import RowFailure, StepResult


class Arrival(Protocol):
    """The pages of one adapter on their way."""

    def wait_for(self, layer: int) -> bool:
        """Wait until the device has the pages of the layers up to this one. False if they do not come."""
        ...


class ArrivalSource(Protocol):
    """Where adapters arrive: the adapter arena."""

    def arrival(self, slot: int) -> Arrival | None:
        """The pages that a step which names this slot has to wait for; None where all are there."""
        ...


class ArrivingAdapters(Rider):
    """Keeps each layer of a step from being queued before the device has its pages. Where they do not come, the step
    goes on without them, and only the slices of that adapter fail: no other row reads them."""

    prevents_replay = True

    def __init__(self, arrivals: Mapping[int, Arrival], slots: Mapping[int, int]) -> None:
        """`arrivals` by slot; `slots` by the index of a slice in the plan, of those that have one of these."""
        self._arrivals = arrivals
        self._slots = slots
        self._missing: set[int] = set()

    def enter_layer(self, layer: int) -> None:
        """Wait for the pages of this layer. The worker calls it before it queues what reads them."""
        for slot, arrival in self._arrivals.items():
            if slot not in self._missing and not arrival.wait_for(layer):
                self._missing.add(slot)

    def collect(self, result: StepResult) -> None:
        for index, slot in self._slots.items():
            if slot in self._missing:
                reason = "its copy to the device failed while its first step ran"
                result.rows[index].failed = RowFailure(reason, "adapter")
