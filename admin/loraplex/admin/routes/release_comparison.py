"""The comparison of a release's arms, as the admin API shows it."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import Literal

from loraplex.admin.routes.release_plan import show_run
from loraplex.admin.schemas import release_comparison as shown
from loraplex.control.release_types import ReleaseInfo, ShadowInfo
from loraplex.control.usage.arms import ArmSummary, Quantiles
from loraplex.lifecycle.release_comparison import ReleaseComparison
from loraplex.lifecycle.release_guard.comparison import Reading
from loraplex.lifecycle.release_guard.course import Leg
from loraplex.lifecycle.release_guard.guard import Guard

Arm = Literal["control", "candidate"]


def show_comparison(found: ReleaseComparison) -> shown.ReleaseComparison:
    release = found.release
    return shown.ReleaseComparison(
        name=release.name,
        revision=release.revision,
        since=found.since,
        run=show_run(release.run),
        arms=[_arm(release, arm) for arm in found.arms],
        guard=None if found.guard is None else _guard(found.guard),
        course=[_leg(leg) for leg in found.course.legs],
        shadow=None if found.shadow is None else _shadow(found.shadow),
    )


def _arm(release: ReleaseInfo, arm: ArmSummary) -> shown.ComparedArm:
    version, run, interval = f"v{arm.version}", release.run, arm.failure_interval
    roles: dict[int, Arm] = {} if run is None else {run.control: "control", run.candidate: "candidate"}
    error_rate = None
    if arm.failure_share is not None and interval is not None:
        error_rate = shown.Share(value=arm.failure_share, low=interval.low, high=interval.high)
    return shown.ComparedArm(
        version=version,
        role=roles.get(arm.version),
        weight=sum(target.weight for target in release.targets if target.version == version),
        requests=arm.requests,
        errors=arm.failures,
        error_rate=error_rate,
        ttft=_quantiles(arm.first_token_s),
        itl=_quantiles(arm.inter_token_s),
        output_tokens=arm.output_tokens,
        output_length=_quantiles(arm.output_length),
        length_share=arm.length_share,
        length_share_interval=None if arm.length_interval is None else shown.Bounds.of(arm.length_interval),
    )


def _quantiles(found: Quantiles | None) -> shown.Quantiles | None:
    if found is None:
        return None
    return shown.Quantiles(
        p50=found.p50,
        p95=found.p95,
        p50_interval=shown.Bounds.of(found.p50_bounds),
        p95_interval=shown.Bounds.of(found.p95_bounds),
    )


def _guard(guard: Guard) -> shown.GuardState:
    verdict = guard.verdict()
    return shown.GuardState(
        verdict=verdict.kind,
        breach=None if verdict.breach is None else verdict.breach.metric,
        advice=verdict.advice,
        unit=guard.unit,
        since=datetime.fromtimestamp(guard.since, UTC),
        evidence=verdict.e_value,
        threshold=verdict.threshold,
        requests=verdict.num_requests,
        needs=guard.needs,
        metrics=[_reading(reading) for reading in guard.readings()],
    )


def _leg(leg: Leg) -> shown.EvidenceLeg:
    points = [
        shown.EvidencePoint(
            time=datetime.fromtimestamp(point.at, UTC),
            evidence=point.evidence,
            threshold=point.threshold,
            part=point.part,
            requests=point.requests,
            needs=point.needs,
        )
        for point in leg.all_points
    ]
    return shown.EvidenceLeg(step=leg.step, since=datetime.fromtimestamp(leg.since, UTC), points=points)


def _reading(reading: Reading) -> shown.GuardReading:
    values: dict[Arm, float | None] = {"control": reading.control, "candidate": reading.candidate}
    return shown.GuardReading(
        name=reading.metric,
        margin=reading.margin,
        control=_finite(reading.control),
        candidate=_finite(reading.candidate),
        unended=[arm for arm, value in values.items() if value is not None and math.isinf(value)],
        allowed=_finite(reading.bound),
        evidence=reading.e_value,
        share=reading.share,
        control_users=reading.num_control,
        candidate_users=reading.num_candidate,
        needs=reading.needs,
    )


def _shadow(info: ShadowInfo) -> shown.ShadowState:
    return shown.ShadowState(
        version=info.version,
        began=info.began,
        samples=info.samples,
        exact=info.exact,
        mean_same_tokens=_mean(info.diverged_at, info.samples - info.exact),
        dropped=info.dropped,
        failed=info.failed,
        live_tokens=info.live_tokens,
        shadow_tokens=info.shadow_tokens,
        logprob=_mean(info.live_logprob, info.scored),
        shadow_logprob=_mean(info.shadow_logprob, info.scored),
    )


def _mean(total: float, count: int) -> float | None:
    return total / count if count > 0 else None


def _finite(value: float | None) -> float | None:
    """JSON has no infinity."""
    return value if value is not None and math.isfinite(value) else None
