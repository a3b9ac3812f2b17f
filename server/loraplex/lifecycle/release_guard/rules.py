"""Rules of a guard: the metrics that it compares, their margins, and how often it may be wrong."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, TypeGuard, get_args

import msgspec

from loraplex.adapters.store.files import shown
from loraplex.control.errors import InvalidValue

MetricName = Literal["error_rate", "ttft", "itl", "output_length", "length_share"]
MIN_FALSE_ALARM, MAX_FALSE_ALARM = 1e-6, 0.1
MAX_MIN_REQUESTS = 1_000_000


class Metric(NamedTuple):
    """How a metric is compared. Of a rate the margin is added to the control's share; of any other, a margin of 0.1
    allows numbers 10 % larger. `of` says what a value of it is of; `parts`: its weight among the metrics; `prior`
    is of `Evidence`."""

    is_rate: bool
    default_margin: float
    max_margin: float
    of: str
    parts: int = 1
    prior: float | None = None

    def shown(self, value: float | None) -> str:
        """A value for people."""
        if value is None:
            return "unknown"
        if math.isinf(value):
            return "no end"
        return f"{100 * value:.3g} %" if self.is_rate else f"{value:.3g}"


METRICS: Mapping[MetricName, Metric] = {
    "error_rate": Metric(True, 0.005, 0.5, "ended with an error", parts=3, prior=0.01),
    "ttft": Metric(False, 0.1, 10.0, "seconds to the first token, median"),
    "itl": Metric(False, 0.1, 10.0, "seconds between tokens, median"),
    "output_length": Metric(False, 0.2, 10.0, "tokens, median"),
    "length_share": Metric(True, 0.05, 0.5, "cut at their limit", prior=0.02),
}


def _default_margins() -> dict[MetricName, float]:
    return {name: metric.default_margin for name, metric in METRICS.items()}


class Rules(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`margins` by metric; a metric that is not named is not compared. `max_false_alarm`: the probability that a
    version that is not worse is ever called so. `min_requests`: requests of the candidate before a step may pass."""

    margins: dict[MetricName, float] = msgspec.field(default_factory=_default_margins)
    max_false_alarm: float = 0.01
    min_requests: int = 20

    def share(self, name: MetricName) -> float:
        """The metric's weight in the mean of the evidence; those of all metrics add up to 1."""
        return METRICS[name].parts / sum(METRICS[other].parts for other in self.margins)

    def split(self, num_runs: int) -> Rules:
        """The rules of each of this many runs, so that all together keep `max_false_alarm`."""
        return msgspec.structs.replace(self, max_false_alarm=self.max_false_alarm / max(1, num_runs))

    def document(self) -> dict[str, Any]:
        """The JSON that `parse_rules` reads, with every field."""
        return {
            "metrics": [{"name": name, "margin": margin} for name, margin in self.margins.items()],
            "max_false_alarm": self.max_false_alarm,
            "min_requests": self.min_requests,
        }


def parse_rules(document: object, *, param: str = "guard") -> Rules:
    """Rules from JSON: `{metrics: [{name, margin}], max_false_alarm?, min_requests?}`; without `metrics`, all of them
    with their default margins. Raises InvalidValue, which names the field."""
    given = _object(document, param, ("metrics", "max_false_alarm", "min_requests"))
    rules = Rules()
    alarm = given.get("max_false_alarm", rules.max_false_alarm)
    if not _is_number(alarm) or not MIN_FALSE_ALARM <= alarm <= MAX_FALSE_ALARM:
        message = (
            f"'{param}.max_false_alarm' is a number from {MIN_FALSE_ALARM:f} to {MAX_FALSE_ALARM}; "
            f"not {shown(alarm, 50)}."
        )
        raise InvalidValue(message[:300], param=f"{param}.max_false_alarm")
    least = given.get("min_requests", rules.min_requests)
    if not isinstance(least, int) or isinstance(least, bool) or not 0 <= least <= MAX_MIN_REQUESTS:
        message = f"'{param}.min_requests' is a whole number from 0 to {MAX_MIN_REQUESTS:,}; not {shown(least, 50)}."
        raise InvalidValue(message[:300], param=f"{param}.min_requests")
    margins = _margins(given["metrics"], f"{param}.metrics") if "metrics" in given else rules.margins
    return Rules(margins, float(alarm), least)


def _margins(entries: object, param: str) -> dict[MetricName, float]:
    if not isinstance(entries, list) or not 0 < len(entries) <= len(METRICS):
        raise InvalidValue(
            f"'{param}' is a list of 1 to {len(METRICS)} metrics: {', '.join(METRICS)}.", param=param
        )
    margins: dict[MetricName, float] = {}
    for index, entry in enumerate(entries):
        at = f"{param}[{index}]"
        given = _object(entry, at, ("name", "margin"))
        name = next((known for known in get_args(MetricName) if known == given.get("name")), None)
        if name is None:
            raise InvalidValue(f"'{at}.name' is one of {', '.join(METRICS)}.", param=f"{at}.name")
        if name in margins:
            raise InvalidValue(f"'{at}.name': {name} has a margin already.", param=f"{at}.name")
        metric = METRICS[name]
        margin = given.get("margin", metric.default_margin)
        if not _is_number(margin) or not 0 <= margin <= metric.max_margin:
            meaning = "share of requests" if metric.is_rate else "part of the control's value"
            wanted = f"a {meaning} from 0 to {metric.max_margin:g}"
            message = f"'{at}.margin' of {name} is {wanted}; not {shown(margin, 50)}."
            raise InvalidValue(message, param=f"{at}.margin")
        margins[name] = float(margin)
    return margins


def _object(document: object, param: str, fields: tuple[str, ...]) -> Mapping[str, Any]:
    if not isinstance(document, dict):
        raise InvalidValue(f"'{param}' is an object with {', '.join(fields)}.", param=param)
    for name in document:
        if name not in fields:
            message = f"'{param}' has no field {shown(name, 50)}; it has {', '.join(fields)}."
            raise InvalidValue(message, param=param)
    return document


def _is_number(value: object) -> TypeGuard[float]:
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and not isinstance(value, bool)
