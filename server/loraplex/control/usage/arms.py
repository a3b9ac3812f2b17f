"""The arms of a release side by side, from the newest rows of the ledger."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from statistics import fmean, quantiles
from typing import NamedTuple

from sqlalchemy import literal, select
from sqlalchemy.orm import Session

from loraplex.control.db.tables import Usage, UtcDateTime
from loraplex.control.intervals import Interval, wilson_interval
from loraplex.control.usage.outcome import FAILURES, PROPER, inter_token_s

MAX_ROWS = 10_000
"""Rows of an arm that are read: the newest."""
_TAIL = 0.025
"""The probability that a quantile lies beyond one of its bounds of 95 %."""
_FAR = 8.0
"""Standard deviations beyond which a binomial number is taken as never."""


class Bounds(NamedTuple):
    """Bounds of a quantile at 95 %; None where the observations are too few for one."""

    low: float | None = None
    high: float | None = None


class Quantiles(NamedTuple):
    """Median and 95th percentile, linear between two observations, in seconds or tokens, with their bounds."""

    p50: float
    p95: float
    p50_bounds: Bounds = Bounds()
    p95_bounds: Bounds = Bounds()


@dataclass(frozen=True, slots=True)
class ArmSummary:
    """The requests of one version. `requests` counts the rows that were read; those that were asked for by the
    version's own name are among them. `failures` are errors of the version; `failure_share` is their part of the
    requests that say something of it, neither cancelled nor refused, and `failure_interval` its bounds.
    `output_tokens` is the mean of requests that came to their end, `output_length` their quantiles, and `length_share`
    the part of them that their limit of tokens ended, `length_interval` its bounds. None where no request says
    anything."""

    version: int
    requests: int
    failures: int
    failure_share: float | None
    failure_interval: Interval | None
    first_token_s: Quantiles | None
    inter_token_s: Quantiles | None
    output_tokens: float | None
    length_share: float | None
    output_length: Quantiles | None = None
    length_interval: Interval | None = None


def compare_arms(
    session: Session, tenant_id: str, name: str, versions: Sequence[int], since: datetime
) -> list[ArmSummary]:
    """One summary for each of `versions`, in their order, of at most `MAX_ROWS` requests each that ended at `since` or
    after. Use a session of `Database.read(report=True)`."""
    return [_summary(session, tenant_id, name, version, since) for version in versions]


def _summary(session: Session, tenant_id: str, name: str, version: int, since: datetime) -> ArmSummary:
    of = Usage
    newest = (
        select(of.status, of.n, of.completion_tokens, of.first_token_s, of.total_s)
        .where(of.tenant_id == tenant_id, of.at >= literal(since, UtcDateTime()))
        .where(of.adapter == name, of.version == version)
        .order_by(of.at.desc())
        .limit(MAX_ROWS)
    )
    requests = failures = cut = 0
    first: list[float] = []
    between: list[float] = []
    lengths: list[float] = []
    for status, n, num_tokens, first_token_s, total_s in session.execute(newest):
        tokens = num_tokens / max(1, n)
        requests += 1
        failures += status in FAILURES
        if status in PROPER:
            lengths.append(tokens)
            cut += status == "length"
        if first_token_s is not None:
            first.append(first_token_s)
        if (gap := inter_token_s(first_token_s, total_s, tokens)) is not None:
            between.append(gap)
    told = failures + len(lengths)
    return ArmSummary(
        version=version,
        requests=requests,
        failures=failures,
        failure_share=failures / told if told else None,
        failure_interval=wilson_interval(failures, told) if told else None,
        first_token_s=_quantiles(first),
        inter_token_s=_quantiles(between),
        output_tokens=fmean(lengths) if lengths else None,
        length_share=cut / len(lengths) if lengths else None,
        output_length=_quantiles(lengths),
        length_interval=wilson_interval(cut, len(lengths)) if lengths else None,
    )


def _quantiles(values: list[float]) -> Quantiles | None:
    if len(values) < 2:
        return Quantiles(values[0], values[0]) if values else None
    cuts, ordered = quantiles(values, n=20, method="inclusive"), sorted(values)
    return Quantiles(cuts[9], cuts[18], quantile_bounds(ordered, 0.5), quantile_bounds(ordered, 0.95))


def quantile_bounds(ordered: Sequence[float], share: float) -> Bounds:
    """Bounds of the quantile of `share` at 95 % at least, whatever the distribution: the number of observations below
    it is binomial (Conover, Practical Nonparametric Statistics, 3.2). `ordered` ascends."""
    below, above = _rank(len(ordered), share), _rank(len(ordered), 1 - share)
    return Bounds(ordered[below - 1] if below else None, ordered[-above] if above else None)


def _rank(count: int, share: float) -> int:
    """The largest number of hits that all but `_TAIL` of runs of `count` tries reach; 0 where that is not one."""
    deviation = math.sqrt(count * share * (1 - share))
    hits, missed = max(0, int(count * share - _FAR * deviation)), 0.0
    while True:
        ways = math.lgamma(count + 1) - math.lgamma(hits + 1) - math.lgamma(count - hits + 1)
        missed += math.exp(ways + hits * math.log(share) + (count - hits) * math.log1p(-share))
        if missed > _TAIL:
            return hits
        hits += 1
