"""Steps of a release: which weight the newest version has, for how long, and when the next step begins.

`advance` moves by at most one step at a look, whatever time has passed, and only on a verdict `pass`. Its result
depends on its arguments alone: a server that takes over with the persisted state decides as the one before. Each step
has a guard of its own, which begins where the step does; after the last step all traffic goes to the version.
"""

from __future__ import annotations

import msgspec

from loraplex.adapters.store.files import shown
from loraplex.control.catalog.schedule_state import ScheduleState
from loraplex.control.errors import InvalidValue
from loraplex.lifecycle.release_guard.groups import Arms
from loraplex.lifecycle.release_guard.guard import Guard, GuardStateInvalid, Verdict
from loraplex.lifecycle.release_guard.rules import Rules

ALL = 100
"""Percent of the traffic."""
MAX_STEPS = 20
MIN_STEP_S, MAX_STEP_S = 1, 30 * 86_400


class Step(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The newest version has `weight` percent of the traffic for at least `for_seconds`."""

    weight: int
    for_seconds: int


class Schedule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Steps by rising weight; the one of 100 % follows by itself."""

    steps: tuple[Step, ...]

    def document(self) -> list[dict[str, int]]:
        """The JSON that `parse_schedule` reads."""
        return [{"weight": step.weight, "for_seconds": step.for_seconds} for step in self.steps]


def parse_schedule(document: object, *, param: str = "schedule") -> Schedule:
    """A schedule from JSON: `[{weight, for_seconds}, …]`. Raises InvalidValue, which names the field."""
    if not isinstance(document, list) or not 0 < len(document) <= MAX_STEPS:
        message = f"'{param}' is one list of 1 to {MAX_STEPS} steps, each with weight and for_seconds."
        raise InvalidValue(message, param=param)
    steps: list[Step] = []
    for index, given in enumerate(document):
        at = f"{param}[{index}]"
        if isinstance(given, list):
            raise InvalidValue(f"'{at}' is a list: a release has one schedule, not several.", param=at)
        if not isinstance(given, dict) or set(given) != {"weight", "for_seconds"}:
            raise InvalidValue(
                f"'{at}' is an object with weight and for_seconds, and nothing else.", param=at
            )
        weight = _whole(given["weight"], 1, ALL - 1, f"{at}.weight", "; the step of 100 follows by itself")
        seconds = _whole(given["for_seconds"], MIN_STEP_S, MAX_STEP_S, f"{at}.for_seconds", "")
        if steps and weight <= steps[-1].weight:
            message = (
                f"'{at}.weight' is {weight}, and that of the step before {steps[-1].weight}: weights rise."
            )
            raise InvalidValue(message, param=f"{at}.weight")
        steps.append(Step(weight, seconds))
    return Schedule(tuple(steps))


def _whole(value: object, least: int, most: int, param: str, hint: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        message = f"'{param}' is a whole number from {least} to {most}{hint}; not {shown(value, 50)}."
        raise InvalidValue(message, param=param)
    return value


def advance(schedule: Schedule, state: ScheduleState, verdict: Verdict, now: float) -> ScheduleState:
    """The state after this verdict: the same one, the next step from now on, promoted, or rolled back."""
    if state.status != "running":
        return state
    if verdict.kind == "breach":
        return msgspec.structs.replace(state, status="rolled_back", since=now, reason=verdict.reason)
    if verdict.kind == "hold" or now - state.since < schedule.steps[state.step].for_seconds:
        return state
    after = state.step + 1
    return ScheduleState(after, now, "promoted" if after == len(schedule.steps) else "running")


def guard_of(rules: Rules, arms: Arms, *, since: float, num_steps: int, persisted: bytes | None) -> Guard:
    """The guard of the step that began at `since`: the persisted one if it is this step's, else one without evidence.
    The steps of a schedule share the allowed false alarms."""
    fresh = Guard(rules.split(num_steps), arms, since=since)
    if persisted is None:
        return fresh
    try:
        guard = Guard.from_json(persisted)
    except GuardStateInvalid:
        return fresh
    return guard if guard.is_of(fresh) else fresh
