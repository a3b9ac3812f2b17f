"""A release's guard, schedule and shadow, from a request's body and back."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from loraplex.admin.schemas.release_plan import ReleaseGuard, Run, ScheduleStep, Shadow
from loraplex.admin.schemas.releases import ReleaseChange
from loraplex.control.release_types import ReleasePlan, RunInfo, ShadowPlan
from loraplex.lifecycle.release_guard.rules import parse_rules
from loraplex.lifecycle.release_guard.schedule import parse_schedule


def parse_plan(body: ReleaseChange) -> ReleasePlan:
    """The checked plan, with every default written out. Raises InvalidValue, which names the field."""
    given = body.shadow
    return ReleasePlan(
        guard=None if body.guard is None else parse_rules(body.guard).document(),
        schedule=None if body.schedule is None else parse_schedule(body.schedule).document(),
        shadow=None if given is None else ShadowPlan(given.version, given.sample, given.keep_texts),
    )


def show_plan(plan: ReleasePlan) -> dict[str, Any]:
    """The fields of `Release` that show the plan."""
    guard, schedule, shadow = plan.guard, plan.schedule, plan.shadow
    return {
        "guard": None if guard is None else ReleaseGuard.model_validate(guard),
        "schedule": None if schedule is None else [ScheduleStep.model_validate(step) for step in schedule],
        "shadow": None
        if shadow is None
        else Shadow(version=shadow.version, sample=shadow.sample, keep_texts=shadow.keep_texts),
    }


def show_run(info: RunInfo | None) -> Run | None:
    if info is None:
        return None
    return Run(
        status=info.status,
        step=info.step,
        since=datetime.fromtimestamp(info.since, UTC),
        reason=info.reason,
        began=info.began,
        control=f"v{info.control}",
        candidate=f"v{info.candidate}",
    )
