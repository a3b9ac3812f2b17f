"""Figures of many runs: as JSON, and as the tables of docs/fairness.md."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from bench.fairness.account import Run, bound
from bench.fairness.baselines import FIRST_COME
from bench.fairness.device import Device
from bench.fairness.workloads import HOGS, Workload

OURS = "Loraplex"
PICTURES = ("overload", "weights", "returning")
"""Workloads whose plots the page shows."""
HOG_NAMES = [workload.name for workload in HOGS]
PLACE_STEPS, LONGEST_PLACE_STEPS = 10, 100
"""Steps in which a tenant with less than its share of places should get one: median, and at most."""
Runs = dict[str, dict[str, Run]]
"""By workload and policy."""


def figures(workloads: Sequence[Workload], runs: Runs, device: Device) -> list[dict[str, Any]]:
    """One entry a workload, with everything that the tables tell and more."""
    return [
        {
            "workload": workload.name,
            "title": workload.title,
            "seconds": workload.seconds,
            "bound": bound(device, workload),
            "one_shape": workload.one_shape,
            "policies": {name: _figures(run, workload) for name, run in runs[workload.name].items()},
        }
        for workload in workloads
        if workload.name in runs
    ]


def _figures(run: Run, workload: Workload) -> dict[str, Any]:
    return {
        "batch": run.rule,
        "max_gap": run.max_gap,
        "tokens_per_s": round(run.tokens_per_s, 1),
        "steps": run.steps,
        "preemptions": run.preemptions,
        "adapter_loads": run.loads,
        "adapter_copies": run.copies,
        "tenants": {
            tenant: {
                "weight": weight,
                "units": run.served[-1][1][tenant],
                "share": round(run.share(tenant, workload.window), 4),
                "answered": len(run.first_token_s[tenant]),
                "first_token_median_s": _rounded(_quantile(run.first_token_s[tenant], 0.5)),
                "first_token_p99_s": _rounded(_quantile(run.first_token_s[tenant], 0.99)),
                "longest_wait_s": _rounded(run.longest_wait_s[tenant]),
                "steps_to_place_median": _quantile(run.steps_to_place[tenant], 0.5),
                "steps_to_place_most": max(run.steps_to_place[tenant], default=None),
            }
            for tenant, weight in run.weights.items()
        },
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def _quantile(values: Sequence[float], part: float) -> float | None:
    if not values:
        return None
    if part == 0.5:
        return statistics.median(values)
    return sorted(values)[min(len(values) - 1, int(part * len(values)))]


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Markdown."""
    return "\n".join([_row(head), _row(["---"] * len(head)), *map(_row, rows)])


def tables(told: list[dict[str, Any]], runs: Runs) -> str:
    """Markdown."""
    names = list(told[0]["policies"])
    parts = [
        _aims({entry["workload"]: entry for entry in told}),
        _gaps(told, names),
        *_gap_over_time(told, runs, names),
        _throughput(told, names),
        *_places([entry for entry in told if entry["workload"] in HOG_NAMES], names),
        _shares(told, names),
        _latency([entry for entry in told if entry["workload"] not in HOG_NAMES]),
        *_adapters(told, names),
    ]
    return "\n\n".join(parts)


def _aims(told: dict[str, dict[str, Any]]) -> str:
    """What is promised of the scheduler, and what was measured. Rows whose workload was not run are left out."""
    rows: list[tuple[str, str, bool]] = []

    def ours(name: str) -> dict[str, Any]:
        policies: dict[str, dict[str, Any]] = told[name]["policies"]
        return policies[OURS]

    def say(aim: str, measured: str, *, met: bool) -> None:
        rows.append((aim, measured, met))

    gaps = {name: (ours(name)["max_gap"] or 0.0) / entry["bound"] for name, entry in told.items()}
    worst = max(gaps, key=gaps.__getitem__)
    say("the gap is never above the bound", f"at most {gaps[worst]:.1%} ({worst})", met=gaps[worst] <= 1)
    for name in ("overload", "waves"):
        if name in told:
            others = {n: p["max_gap"] or 0.0 for n, p in told[name]["policies"].items() if n != OURS}
            best = min(others, key=others.__getitem__)
            measured = f"{gaps[name]:.1%}; {best} {others[best] / told[name]['bound']:.1%}"
            say(f"`{name}`: at most 5% of the bound", measured, met=gaps[name] <= 0.05)
    ratio = {
        name: ours(name)["tokens_per_s"] / entry["policies"][FIRST_COME]["tokens_per_s"]
        for name, entry in told.items()
        if entry["one_shape"]
    }
    if ratio:
        worst = min(ratio, key=ratio.__getitem__)
        measured = f"at least {ratio[worst]:.1%} ({worst})"
        say("throughput at least 97% of first-come's", measured, met=ratio[worst] >= 0.97)
    for which, steps in (("median", PLACE_STEPS), ("most", LONGEST_PLACE_STEPS)):
        places = {n: ours(n)["tenants"]["light"][f"steps_to_place_{which}"] for n in told if n in HOG_NAMES}
        if places:
            worst = max(places, key=places.__getitem__)
            aim = f"beside hogs: a place within {steps} steps at any pool size, {which}"
            say(aim, f"{places[worst]} ({worst})", met=places[worst] <= steps)
    if "weights" in told:
        tenants = ours("weights")["tenants"].values()
        total = sum(tenant["weight"] for tenant in tenants)
        off = max(abs(t["share"] / (t["weight"] / total) - 1) for t in tenants)
        say("shares by weight within 2%", f"off by {off:.1%} of the share at most", met=off <= 0.02)
    for name in ("fifty-adapters", "fifty-keys"):
        if name in told:
            share = ours(name)["tenants"]["fifty"]["share"]
            say(f"`{name}`: a share of 50% ± 1%", f"{share:.1%}", met=abs(share - 0.5) <= 0.01)
    if "returning" in told:
        share = ours("returning")["tenants"]["returning"]["share"]
        say("`returning`: at most 52% in the first minute back", f"{share:.1%}", met=share <= 0.52)
    if "many-adapters" in told:
        waits = (t["longest_wait_s"] for n, t in ours("many-adapters")["tenants"].items() if n != "many")
        longest = max(waits)
        aim = "`many-adapters`: every other tenant served within 10 s"
        say(aim, f"{longest:.1f} s at most", met=longest <= 10)
    cells = [(aim, measured, "yes" if met else "**no**") for aim, measured, met in rows]
    return f"### What is aimed at\n\n{table(['aim', 'measured', 'met'], cells)}"


def _gaps(told: list[dict[str, Any]], names: list[str]) -> str:
    rows = [
        [_link(entry["workload"]), entry["title"]]
        + [_percent(entry["policies"][name]["max_gap"], entry["bound"]) for name in names]
        for entry in told
    ]
    return f"### Largest gap, as a share of the bound\n\n{table(['workload', 'what', *names], rows)}"


def _link(name: str) -> str:
    """To the workload's picture, if it has one."""
    return f"[{name}](fairness/{name}.svg)" if name in PICTURES else name


def _percent(value: float | None, whole: float) -> str:
    return "–" if value is None else f"{100 * value / whole:.1f}%"


def _gap_over_time(told: list[dict[str, Any]], runs: Runs, names: list[str]) -> Iterable[str]:
    for entry in told:
        if entry["workload"] not in ("overload", "waves"):
            continue
        of = runs[entry["workload"]]
        rows = []
        for second in range(60, int(entry["seconds"]) + 1, 60):
            nearest = (min(of[name].gaps, key=lambda gap: abs(gap[0] - second))[1] for name in names)
            rows.append([f"{second} s", *(_percent(gap, entry["bound"]) for gap in nearest)])
        yield f"### {entry['workload']}: the gap over time\n\n{table(['at', *names], rows)}"


def _throughput(told: list[dict[str, Any]], names: list[str]) -> str:
    rows = []
    for entry in told:
        base = entry["policies"][FIRST_COME]["tokens_per_s"]
        mark = "" if entry["one_shape"] else " *"
        cells = [f"{entry['policies'][name]['tokens_per_s'] / base:.3f}" for name in names]
        preempted = [str(entry["policies"][name]["preemptions"]) for name in (FIRST_COME, OURS)]
        rows.append([entry["workload"] + mark, f"{base:.0f}", *cells, " / ".join(preempted)])
    head = ["workload", "first-come, tokens/s", *names, "preemptions, first-come / Loraplex"]
    return (
        f"### Throughput, by first-come's\n\n{table(head, rows)}\n\n"
        "\\* Requests of different shapes: a policy that serves another mix has another throughput, whatever its merit."
    )


def _places(told: list[dict[str, Any]], names: list[str]) -> Iterable[str]:
    """Beside a hog: how soon the light tenant's requests get a place in the batch."""
    if not told:
        return
    for title, median, most, unit in (
        (
            "Beside a hog: steps until a place in the batch",
            "steps_to_place_median",
            "steps_to_place_most",
            "",
        ),
        ("Beside a hog: time to the first token", "first_token_median_s", "longest_wait_s", " s"),
    ):
        rows = []
        for entry in told:
            cells = [entry["workload"]]
            for name in names:
                light = entry["policies"][name]["tenants"]["light"]
                middle = "–" if light[median] is None else f"{light[median]:.{1 if unit else 0}f}"
                cells.append(f"{middle} / {light[most]:.{1 if unit else 0}f}{unit}")
            rows.append(cells)
        yield f"### {title}, median / most\n\n{table(['workload', *names], rows)}"


def _shares(told: list[dict[str, Any]], names: list[str]) -> str:
    rows = []
    for entry in told:
        if entry["workload"] not in ("weights", "fifty-adapters", "fifty-keys", "returning"):
            continue
        tenants = entry["policies"][OURS]["tenants"]
        total = sum(tenant["weight"] for tenant in tenants.values())
        for name, tenant in tenants.items():
            cells = [f"{100 * entry['policies'][policy]['tenants'][name]['share']:.1f}%" for policy in names]
            rows.append([entry["workload"], name, f"{100 * tenant['weight'] / total:.0f}%", *cells])
    return f"### Shares while all are backlogged\n\n{table(['workload', 'tenant', 'due', *names], rows)}"


def _latency(told: list[dict[str, Any]]) -> str:
    rows = []
    for entry in told:
        for name in entry["policies"][OURS]["tenants"]:
            cells = [entry["workload"], name]
            for policy in (FIRST_COME, OURS):
                tenant = entry["policies"][policy]["tenants"][name]
                median, tail = tenant["first_token_median_s"], tenant["first_token_p99_s"]
                cells.append("–" if median is None else f"{median:.1f} / {tail:.1f}")
                cells.append(str(tenant["answered"]))
            rows.append(cells)
    head = ["workload", "tenant", "first-come, s", "answered", "Loraplex, s", "answered"]
    return f"### Time to the first token, median / p99, of the requests that got one\n\n{table(head, rows)}"


def _adapters(told: list[dict[str, Any]], names: list[str]) -> Iterable[str]:
    for entry in told:
        if entry["workload"] != "many-adapters":
            continue
        rows = []
        for name in names:
            run = entry["policies"][name]
            waits = {t: f["longest_wait_s"] for t, f in run["tenants"].items()}
            others = max(wait for tenant, wait in waits.items() if tenant.startswith("other"))
            cells = [f"{others:.1f} s", f"{waits['base']:.1f} s", f"{waits['many']:.0f} s"]
            rows.append([name, *cells, str(run["adapter_loads"]), str(run["adapter_copies"])])
        head = ["policy", "others with an adapter", "other on base", "the one with 64", "loads", "copies"]
        yield f"### 64 adapters on the memory of 4: longest wait for a first token\n\n{table(head, rows)}"
