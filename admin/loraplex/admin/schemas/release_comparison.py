"""The versions of a release side by side."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from loraplex.admin.schemas.fields import ResponseBody, Timestamp
from loraplex.admin.schemas.release_plan import Run
from loraplex.lifecycle.release_guard.rules import MetricName

Fraction = Annotated[float, Field(ge=0, le=1)]


class Share(ResponseBody):
    """A share of requests, with the bounds of its 95 % interval (Wilson's)."""

    value: Fraction
    low: Fraction
    high: Fraction


class Bounds(ResponseBody):
    """The bounds of a 95 % interval; null where the requests are too few for one."""

    low: float | None
    high: float | None


class Quantiles(ResponseBody):
    """Median and 95th percentile, in seconds or tokens, with their intervals, which assume no distribution."""

    p50: float
    p95: float
    p50_interval: Bounds
    p95_interval: Bounds


class ComparedArm(ResponseBody):
    """A version's latest requests that ended, at most 10,000. `weight`: its part of the weights' sum. `errors`: those
    that failed for the version or the server. `output_tokens`: the mean of an answer; `output_length`: its quantiles in
    tokens. `length_share`: answers that were cut at their limit of tokens, with Wilson's interval. Null where no
    request says anything of it."""

    version: str
    role: Literal["control", "candidate"] | None
    weight: int
    requests: int
    errors: int
    error_rate: Share | None
    ttft: Quantiles | None
    itl: Quantiles | None
    output_tokens: float | None
    output_length: Quantiles | None
    length_share: Fraction | None
    length_share_interval: Bounds | None


class GuardReading(ResponseBody):
    """One metric of the guard. `control` and `candidate` are shares of a rate, else medians; null without a number, and
    where most answers have not ended (`unended`). `allowed`: the largest value of the candidate that is not worse.
    `evidence` that it is worse grows from 1; `share` is its weight in the mean. A user counts once; with `sticky: none`
    each request is a unit of its own. `needs`: units of both versions that are missing until a gross fault of this
    metric would have been found."""

    name: MetricName
    margin: float
    control: float | None
    candidate: float | None
    unended: list[Literal["control", "candidate"]]
    allowed: float | None
    evidence: float
    share: float
    control_users: int
    candidate_users: int
    needs: int


class GuardState(ResponseBody):
    """The guard since it began, at `since`. `hold`: it could not yet have found what it looks for, and `advice` says
    what is missing. `pass`: it could have, and no metric is worse so far. `breach`: the candidate is worse in `breach`,
    since the evidence reached the threshold. `unit` is what draws its version by chance, and what is counted; `needs`
    of them, of both versions together, are missing until a gross fault would have been found."""

    verdict: Literal["hold", "pass", "breach"]
    breach: MetricName | None
    advice: str | None
    unit: Literal["user", "key", "request"]
    since: Timestamp
    evidence: float
    threshold: float
    requests: int
    needs: int
    metrics: list[GuardReading]


class EvidencePoint(ResponseBody):
    """The findings of one look. `part`: the evidence as a part of its threshold; at 1 the release goes back.
    `requests`: the candidate's that had ended. `needs`: as in the guard's state."""

    time: Timestamp
    evidence: float
    threshold: float
    part: float
    requests: int
    needs: int


class EvidenceLeg(ResponseBody):
    """The looks of one guard since it began, at `since`: of the schedule's step `step`, which counts from 0. A resume
    begins another one."""

    step: int
    since: Timestamp
    points: list[EvidencePoint]


class ShadowState(ResponseBody):
    """The samples of the shadow version since revision `began`. `samples` were compared: `exact` of them have the
    tokens of the released version's answer, the others differ after `mean_same_tokens` in the mean. `dropped` did not
    run to their end, `failed` ended with an error. `logprob` and `shadow_logprob`: the mean log probability of a token
    that callers got, under the version that answered and under the shadow. Null where there is nothing."""

    version: str
    began: int
    samples: int
    exact: int
    mean_same_tokens: float | None
    dropped: int
    failed: int
    live_tokens: int
    shadow_tokens: int
    logprob: float | None
    shadow_logprob: float | None


class ReleaseComparison(ResponseBody):
    """The arms of a release. They are of requests since `since`: the step began, or the release. `course` is the
    evidence of all its steps over time, at most 120 points of it. `guard` and `shadow` are null where there is none."""

    name: str
    revision: int
    since: Timestamp
    run: Run | None
    arms: list[ComparedArm]
    guard: GuardState | None
    course: list[EvidenceLeg]
    shadow: ShadowState | None
