"""Where a release with a schedule stands, and what people may do with it. Pure: the time is an argument."""

from __future__ import annotations

import msgspec

from loraplex.control.errors import Conflict
from loraplex.control.release_types import RunStatus


class ScheduleState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a release stands. `step` counts from 0; as many as there are steps means that all were passed. `since`:
    when this step began, in seconds since the epoch. `reason` says why a release was rolled back."""

    step: int
    since: float
    status: RunStatus = "running"
    reason: str | None = None

    @property
    def has_ended(self) -> bool:
        return self.status not in ("running", "paused")


def begin(now: float, running: ScheduleState | None = None) -> ScheduleState:
    """The first step, from now on. `running` is the state of the release's schedule before this one, if it had one.
    Raises Conflict while that has not ended."""
    if running is not None and not running.has_ended:
        raise Conflict(
            f"A schedule is {running.status} at step {running.step + 1}, and a release has one: "
            "promote or roll back first."
        )
    return ScheduleState(0, now)


def pause(state: ScheduleState, now: float) -> ScheduleState:
    """Keep the weights as they are. Raises Conflict where no schedule is running."""
    if state.status != "running":
        raise Conflict(f"The release is {state.status}; only a running one can be paused.")
    return msgspec.structs.replace(state, status="paused", since=now)


def resume(state: ScheduleState, now: float) -> ScheduleState:
    """Begin the step again, with a guard without evidence. Raises Conflict where the schedule is not paused."""
    if state.status != "paused":
        raise Conflict(f"The release is {state.status}; only a paused one can be resumed.")
    return msgspec.structs.replace(state, status="running", since=now)
