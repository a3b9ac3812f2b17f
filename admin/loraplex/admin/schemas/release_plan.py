"""A release's guard, schedule and shadow in JSON, and where it stands."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema

from loraplex.admin.schemas.fields import RequestBody, ResponseBody, Timestamp, VersionName
from loraplex.lifecycle.release_guard.rules import (
    MAX_FALSE_ALARM,
    MAX_MIN_REQUESTS,
    METRICS,
    MIN_FALSE_ALARM,
    MetricName,
)
from loraplex.lifecycle.release_guard.schedule import ALL, MAX_STEP_S, MAX_STEPS, MIN_STEP_S

RunStatus = Literal["running", "paused", "promoted", "rolled_back"]
_NULL = {"type": "null"}


def _metric_schema(name: MetricName) -> dict[str, Any]:
    known = METRICS[name]
    margin = {
        "type": "number",
        "minimum": 0,
        "maximum": known.max_margin,
        "default": known.default_margin,
        "description": "Added to the control's share." if known.is_rate else "Part of the control's value.",
    }
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "margin": margin},
        "required": ["name"],
        "additionalProperties": False,
    }


def _at_most_once(name: MetricName) -> dict[str, Any]:
    return {
        "contains": {"properties": {"name": {"const": name}}, "required": ["name"]},
        "minContains": 0,
        "maxContains": 1,
    }


_GUARD = {
    "type": "object",
    "description": "Goes back by itself where the newest version is worse. Without `metrics`: all of them.",
    "properties": {
        "metrics": {
            "type": "array",
            "minItems": 1,
            "maxItems": len(METRICS),
            "items": {"oneOf": [_metric_schema(name) for name in METRICS]},
            "allOf": [_at_most_once(name) for name in METRICS],
        },
        "max_false_alarm": {
            "type": "number",
            "minimum": MIN_FALSE_ALARM,
            "maximum": MAX_FALSE_ALARM,
            "default": 0.01,
            "description": "Probability that a version that is not worse is ever called so.",
        },
        "min_requests": {
            "type": "integer",
            "minimum": 0,
            "maximum": MAX_MIN_REQUESTS,
            "default": 20,
            "description": "Requests of the newest version before a step may pass.",
        },
    },
    "additionalProperties": False,
}
_SCHEDULE = {
    "type": "array",
    "description": "Steps of the newest version, by rising weight; the one of 100 follows by itself.",
    "minItems": 1,
    "maxItems": MAX_STEPS,
    "items": {
        "type": "object",
        "properties": {
            "weight": {
                "type": "integer",
                "minimum": 1,
                "maximum": ALL - 1,
                "description": "Percent of the traffic.",
            },
            "for_seconds": {"type": "integer", "minimum": MIN_STEP_S, "maximum": MAX_STEP_S},
        },
        "required": ["weight", "for_seconds"],
        "additionalProperties": False,
    },
}
# Parsed by loraplex.lifecycle.release_guard, whose errors name the field.
GivenGuard = Annotated[Any, WithJsonSchema({"anyOf": [_GUARD, _NULL]})]
GivenSchedule = Annotated[Any, WithJsonSchema({"anyOf": [_SCHEDULE, _NULL]})]


class Shadow(RequestBody):
    """A version that also answers a share of the requests, `sample`, unseen by callers. With `keep_texts`, prompts and
    both answers are kept for a while."""

    version: VersionName
    sample: Annotated[float, Field(gt=0, le=1)]
    keep_texts: bool = False


class GuardedMetric(ResponseBody):
    """How much worse the newest version may be: `margin` is added to a share, and is a part of any other value."""

    name: MetricName
    margin: float


class ReleaseGuard(ResponseBody):
    """Compares the newest version with the one that it replaces."""

    metrics: list[GuardedMetric]
    max_false_alarm: float
    min_requests: int


class ScheduleStep(ResponseBody):
    """The newest version has `weight` percent of the traffic for at least `for_seconds`."""

    weight: int
    for_seconds: int


class Run(ResponseBody):
    """Where a release with a guard or a schedule stands. `began`: the revision that began it. `step` counts from 0, as
    in `schedule`; all passed where it is their number. `since`: when this step or state began. `reason`: why the guard
    went back."""

    status: RunStatus
    step: int
    since: Timestamp
    reason: str | None
    began: int
    control: str
    candidate: str
