"""What a dashboard is made of, apart from Grafana's form of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

SERVERS = 'job=~"$job",instance=~"$instance"'
"""Selects the servers that are chosen at the top of a dashboard."""

Unit = Literal["reqps", "percentunit", "s", "short", "bytes", "ops", "none"]
Kind = Literal["lines", "stack", "number"]


@dataclass(frozen=True)
class Query:
    """One PromQL expression. `<servers>` in it stands for the labels that select the servers."""

    expression: str
    legend: str = ""

    @property
    def text(self) -> str:
        return self.expression.replace("<servers>", SERVERS)


@dataclass(frozen=True)
class Panel:
    """`description` says what is shown and what to see in it. `runbooks` names alerts."""

    title: str
    description: str
    unit: Unit
    queries: Sequence[Query]
    runbooks: Sequence[str] = ()
    kind: Kind = "lines"
    most: float | None = None
    """The top of the axis, where there is one."""


@dataclass(frozen=True)
class Row:
    title: str
    panels: Sequence[Panel]


@dataclass(frozen=True)
class Variable:
    """A choice at the top. `query` is Grafana's `label_values(…)`; `pattern` takes a part of each value."""

    name: str
    label: str
    query: str
    several: bool = False
    pattern: str = ""


INSTANCES = (
    Variable("job", "Job", "label_values(loraplex_engine_up, job)", several=True),
    Variable("instance", "Server", 'label_values(loraplex_engine_up{job=~"$job"}, instance)', several=True),
)


@dataclass(frozen=True)
class Board:
    uid: str
    title: str
    description: str
    rows: Sequence[Row]
    variables: Sequence[Variable] = ()
    annotations: Sequence[Query] = field(default=())
    """Marks on every panel, where the expression is above 0."""


def quantiles(metric: str, *shares: float, by: str = "", of: str = "<servers>") -> list[Query]:
    """Quantiles of a histogram of all chosen servers together; `by` keeps a label, `of` are the labels that select."""
    labels, legend = (f"le, {by}", f"{{{{{by}}}}} ") if by else ("le", "")
    return [
        Query(
            f"histogram_quantile({share}, sum by ({labels}) (rate({metric}_bucket{{{of}}}[$__rate_interval])))",
            f"{legend}p{share * 100:g}",
        )
        for share in shares
    ]


def share(metric: str, part: str, whole: str = "<servers>", *, by: str = "", legend: str = "") -> Query:
    """Of a counter's increase the share that has `part` too; 0, and not nothing, where there is no such series yet."""
    total, some = (
        f"sum{f' by ({by})' if by else ''} (rate({metric}{{{labels}}}[$__rate_interval]))"
        for labels in (whole, f"{whole},{part}")
    )
    return Query(f"({some} or {total} * 0) / {total}", legend or f"{{{{{by}}}}}")


def rates(metric: str, by: str, legend: str = "", *, some: bool = False) -> Query:
    """Increase a second by a label. With `some`, only what increased: for a label whose values are mostly rare."""
    expression = f"sum by ({by}) (rate({metric}{{<servers>}}[$__rate_interval]))"
    return Query(f"{expression} > 0" if some else expression, legend or f"{{{{{by}}}}}")
