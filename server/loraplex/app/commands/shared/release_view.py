"""A release in the terminal: which versions take its traffic, where it stands, and its arms side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from loraplex.app.commands.shared.release_plan import seconds_text
from loraplex.app.output import fields_table, moment, rows_table

if TYPE_CHECKING:
    from rich.table import Table

Json = dict[str, Any]
LIVE_STATES = ("running", "paused")
MAX_PARTS = 12
"""Values of the evidence over time, beside the last one of each step."""


def is_compared(release: Json) -> bool:
    """Whether there is more to say of it than its weights."""
    return bool(release["run"] or release["shadow"] or sum(t["weight"] > 0 for t in release["targets"]) > 1)


def by_text(release: Json) -> str | None:
    """The actor that made it, as far as that is known."""
    actor = release["actor"]
    return f"key {release['actor_key_id']}" if actor == "key" else actor


def how_text(release: Json) -> str | None:
    """Such as `set`, `step of 4`, or `rollback to 2`."""
    origin, restores = release["origin"], release["restores"]
    if origin == "step" and release["began"] is not None:
        return f"step of {release['began']}"
    return origin if restores is None else f"{origin} to {restores}"


def targets_text(targets: list[Json]) -> str:
    """Such as `v1=90 v2=10`."""
    return " ".join(f"{target['version']}={target['weight']}" for target in targets) or "-"


def release_tables(release: Json, comparison: Json | None) -> list[Table]:
    """A release in tables; `comparison` is what the server answers for its arms."""
    fields = {
        "revision": release["revision"],
        "since": release["created_at"],
        "by": by_text(release),
        "how": how_text(release),
        "sticky": release["sticky"],
        **{name: text for name, text in _plan_fields(release) if text is not None},
    }
    total = sum(t["weight"] for t in release["targets"]) or 1
    shares = ([t["version"], t["weight"], f"{100 * t['weight'] / total:.1f}%"] for t in release["targets"])
    tables = [fields_table(fields), rows_table(["version", "weight", "share"], shares)]
    if comparison is not None:
        tables.append(_arms(comparison["arms"]))
        if comparison["guard"] is not None:
            tables += _guard(comparison["guard"], comparison["course"])
        if comparison["shadow"] is not None:
            tables.append(fields_table(_shadow_fields(comparison["shadow"])))
    return tables


def state_line(release: Json, comparison: Json | None) -> str:
    """The same in one line, for a log or a pipe."""
    parts = [f"revision {release['revision']}", targets_text(release["targets"])]
    parts += [text for name, text in _plan_fields(release) if name in ("state", "reason") and text]
    if comparison is not None:
        for arm in comparison["arms"]:
            parts.append(f"{arm['version']}: {arm['requests']} requests, {arm['errors']} errors")
        guard = comparison["guard"]
        if guard is not None:
            parts.append(f"guard {_verdict_text(guard)}")
    return "; ".join(parts)


def watch(
    read: Callable[[], tuple[Json, Json | None]],
    draw: Callable[[Json, Json | None], None],
    wait: Callable[[], None],
) -> None:
    """Draw a release, and again after each `wait`, until nothing runs any more."""
    while True:
        release, comparison = read()
        draw(release, comparison)
        if release["run"] is None or release["run"]["status"] not in LIVE_STATES:
            return
        wait()


def _plan_fields(release: Json) -> Iterator[tuple[str, str | None]]:
    run, guard, shadow = release["run"], release["guard"], release["shadow"]
    if run is not None:
        yield "state", f"{run['status']} since {moment(run['since'])}"
    if release["schedule"]:
        yield "steps", _steps_text(release["schedule"], run)
    if guard is not None:
        margins = ", ".join(f"{metric['name']} {metric['margin']:g}" for metric in guard["metrics"])
        yield "guard", f"{margins}; at most {guard['max_false_alarm']:.3g} false alarms"
    if shadow is not None:
        texts = ", keeps texts" if shadow["keep_texts"] else ""
        yield "shadow", f"{shadow['version']}, {100 * shadow['sample']:g}% of the requests{texts}"
    yield "reason", release["reason"] or (run["reason"] if run else None)


def _steps_text(schedule: list[Json], run: Json | None) -> str:
    """Such as `1% 10m > [10% 1h] > 100%`; the brackets are where it stands."""
    steps = [f"{step['weight']}% {seconds_text(step['for_seconds'])}" for step in schedule] + ["100%"]
    if run is not None and run["status"] != "rolled_back":
        at = min(run["step"], len(schedule))
        steps[at] = f"[{steps[at]}]"
    return " > ".join(steps)


def _arms(arms: list[Json]) -> Table:
    rows: list[tuple[str, Callable[[Json], Any]]] = [
        ("requests", lambda arm: arm["requests"]),
        ("errors", lambda arm: _share_text(arm["error_rate"])),
        ("first token, median", lambda arm: _quantile_text(arm["ttft"], "p50")),
        ("first token, 95 %", lambda arm: _quantile_text(arm["ttft"], "p95")),
        ("between tokens, median", lambda arm: _quantile_text(arm["itl"], "p50")),
        ("between tokens, 95 %", lambda arm: _quantile_text(arm["itl"], "p95")),
        ("output tokens, mean", lambda arm: _number_text(arm["output_tokens"])),
        ("output tokens, median", lambda arm: _quantile_text(arm["output_length"], "p50", _number_text)),
        ("output tokens, 95 %", lambda arm: _quantile_text(arm["output_length"], "p95", _number_text)),
        ("cut at the limit", lambda arm: _value_text("length_share", arm["length_share"])),
    ]
    titles = [" ".join(filter(None, (arm["version"], arm["role"]))) for arm in arms]
    return rows_table(["requests that ended", *titles], ([name, *map(of, arms)] for name, of in rows))


def _guard(guard: Json, course: list[Json]) -> list[Table]:
    columns = ["guard's metric", "control", "candidate", "allowed", "evidence", f"{guard['unit']}s"]
    rows = (
        [
            metric["name"],
            _metric_text(metric, "control"),
            _metric_text(metric, "candidate"),
            _value_text(metric["name"], metric["allowed"]),
            f"{metric['evidence']:.3g}",
            f"{metric['control_users']} + {metric['candidate_users']}",
        ]
        for metric in guard["metrics"]
    )
    said = {"guard says": _verdict_text(guard)} | (
        {"evidence so far": _course_text(course)} if course else {}
    )
    return [rows_table(columns, rows), fields_table(said)]


def _course_text(course: list[Json]) -> str:
    """The evidence as parts of its threshold, such as `0.4% > 3% of its threshold`; a bar is where a step began."""
    every = -(-sum(len(leg["points"]) for leg in course) // MAX_PARTS)
    legs = [
        " > ".join(_part_text(point["part"]) for point in leg["points"][::-1][::every][::-1])
        for leg in course
    ]
    return f"{' | '.join(legs)} of its threshold"


def _part_text(part: float) -> str:
    return f"{100 * part:.2g}%" if part < 1 else f"{100 * min(part, 1e6):.0f}%"


def _verdict_text(guard: Json) -> str:
    metric = f" in {guard['breach']}" if guard["breach"] else ""
    said = f"{guard['verdict']}{metric}, evidence {guard['evidence']:.3g} of {guard['threshold']:.4g}"
    return f"{said}; {guard['advice']}" if guard["advice"] else said


def _shadow_fields(shadow: Json) -> Json:
    samples, same = shadow["samples"], shadow["mean_same_tokens"]
    fields = {
        "shadow": f"{shadow['version']}, {samples} compared, {shadow['failed']} failed, {shadow['dropped']} dropped"
    }
    if samples:
        fields["same tokens"] = f"{100 * shadow['exact'] / samples:.2f}%"
    if same is not None:
        fields["else the same for"] = f"{same:.1f} tokens"
    if shadow["logprob"] is not None:
        under = f"{shadow['logprob']:.3f}, under the shadow {shadow['shadow_logprob']:.3f}"
        fields["log probability of a token"] = under
    return fields


def _metric_text(metric: Json, arm: str) -> str:
    return "unended" if arm in metric["unended"] else _value_text(metric["name"], metric[arm])


def _value_text(name: str, value: float | None) -> str:
    if name in ("ttft", "itl"):
        return _time_text(value)
    if value is None or name == "output_length":
        return _number_text(value)
    return f"{100 * value:.2f}%"


def _quantile_text(
    quantiles: Json | None, name: str, text: Callable[[float | None], str] | None = None
) -> str:
    if quantiles is None:
        return "-"
    shown, bounds = text or _time_text, quantiles[f"{name}_interval"]
    if None in (bounds["low"], bounds["high"]):
        return shown(quantiles[name])
    return f"{shown(quantiles[name])} ({shown(bounds['low'])} to {shown(bounds['high'])})"


def _share_text(share: Json | None) -> str:
    if share is None:
        return "-"
    return f"{100 * share['value']:.2f}% ({100 * share['low']:.2f} to {100 * share['high']:.2f})"


def _time_text(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.1f} ms"


def _number_text(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
