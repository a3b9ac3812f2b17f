"""The guard of releases over simulated traffic: false alarms, power, and threshold rules as Flagger has them beside it.

    PYTHONPATH=tests:. python -m bench.release_guard [--part PART]… [--runs 100] [--processes 2]

PART is planted, margins, power or false-alarms; all of them where none is given. Prints how many requests of the
candidate had begun when a planted version was found, beside the bound; how that goes with the size of the fault; and
how often a version that is no worse, or worse by its margin alone, is called worse.
A look every second, 10 requests a second to both versions, one in ten to the candidate unless a row says otherwise.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace

from loraplex.lifecycle.release_guard.rules import METRICS, Rules
from support.releases.oracle import fewest_numbers
from support.releases.traffic import Fault, Traffic
from support.releases.verdicts import Found, breaches

LIGHT = Traffic(zipf=0.0, num_users=100_000)
"""Nearly each request has a user of its own."""
HEAVY = Traffic()
AT_MARGIN = Fault(errors=METRICS["error_rate"].default_margin, ttft=1.1, itl=1.1)
NEVER = 10**9


@dataclass(frozen=True)
class Case:
    name: str
    traffic: Traffic
    fault: Fault | None = None
    seconds: int = 600
    rules: Rules = field(default_factory=Rules)


FALSE_ALARMS = (
    Case("same version, heavy users", HEAVY),
    Case("errors, ttft and itl at their margins", HEAVY, AT_MARGIN),
)
PLANTED = (
    Case("+5 points of errors, light users", LIGHT, Fault(errors=0.05)),
    Case("+5 points of errors, heavy users, an hour", HEAVY, Fault(errors=0.05), 3600),
    Case("never stops, light users", LIGHT, Fault(never_stops=True)),
    Case("never stops, heavy users", HEAVY, Fault(never_stops=True)),
    Case("load fails", LIGHT, Fault(errors=1.0)),
    Case("half of the answers run on to 1,000 tokens", LIGHT, Fault(cut=0.5)),
    Case("20 % slower first token", LIGHT, Fault(ttft=1.2), 1800),
    Case(
        "20 % slower first token, margin 5 %",
        LIGHT,
        Fault(ttft=1.2),
        1800,
        Rules(Rules().margins | {"ttft": 0.05}),
    ),
    Case("2 % NaN (an error)", LIGHT, Fault(errors=0.02), 1800),
)
MARGINS, BASES = (0.0025, 0.005, 0.01, 0.02), (0.001, 0.005, 0.01)
CURVES: dict[str, Sequence[tuple[str, Fault]]] = {
    "errors, points": [(f"{points:g}", Fault(errors=points / 100)) for points in (0, 1, 2, 3, 5, 10, 20)],
    "first token, times": [(f"{by:g}", Fault(ttft=by)) for by in (1.0, 1.1, 1.2, 1.3, 1.5, 2.0)],
    "inter-token time, times": [(f"{by:g}", Fault(itl=by)) for by in (1.0, 1.1, 1.2, 1.3, 1.5, 2.0)],
    "output tokens, times": [(f"{by:g}", Fault(tokens=by)) for by in (1.0, 1.2, 1.5, 2.0, 3.0)],
    "cut at length, share": [(f"{share:g}", Fault(cut=share)) for share in (0.0, 0.05, 0.1, 0.2, 0.5)],
}
CURVE_AT = (100, 200, 500, 1000)


def _run(job: tuple[Case, int]) -> dict[str, Found | None]:
    case, seed = job
    return breaches(case.traffic, seed, seconds=case.seconds, fault=case.fault, rules=case.rules)


def run(pool: ProcessPoolExecutor, case: Case, runs: int) -> list[dict[str, Found | None]]:
    return list(pool.map(_run, [(case, seed) for seed in range(runs)], chunksize=4))


def print_false_alarms(pool: ProcessPoolExecutor, runs: int) -> None:
    print(
        f"\nCalled worse in 10 minutes, of {runs} runs with a look every second (allowed: {runs / 100:g}):\n"
    )
    print(f"{'':46}{'guard':>8}{'Flagger':>9}")
    for case in FALSE_ALARMS:
        found = run(pool, case, runs)
        counts = [sum(one[who] is not None for one in found) for who in ("guard", "flagger")]
        print(f"{case.name:46}{counts[0]:8}{counts[1]:9}")


def print_planted(pool: ProcessPoolExecutor, runs: int) -> None:
    print(
        f"\nPlanted versions, {runs} runs each. Requests of the candidate that had begun when it was found: median and"
    )
    print(
        "90th percentile; users who met it and seconds: medians; bound: numbers that a test of 1 % needs in the mean\n"
    )
    print(
        f"{'':46}{'found':>6}{'median':>8}{'90 %':>7}{'users':>7}{'s':>6}{'bound':>7}   Flagger: found median"
    )
    for case in PLANTED:
        found = run(pool, case, runs)
        ours, flagger = [[one[who] for one in found] for who in ("guard", "flagger")]
        bound = _bound(case)
        row = f"{case.name:46}{_share(ours)}{_row(ours)}{'' if bound is None else f'{bound:.0f}':>7}"
        print(
            f"{row}{_share(flagger):>19}{_number(_median([f.num_started if f else NEVER for f in flagger])):>8}"
        )


def print_margins(pool: ProcessPoolExecutor, runs: int) -> None:
    print(
        f"\n+5 points of errors by margin and by the control's errors, light users, {runs} runs: requests of the"
    )
    print("candidate, median; in brackets the bound of a test of 1 % that knows the control\n")
    print(f"{'margin':>10}" + "".join(f"{f'{base:.1%} errors':>16}" for base in BASES))
    for margin in MARGINS:
        cells = []
        for base in BASES:
            rules = Rules(Rules().margins | {"error_rate": margin})
            case = Case("", replace(LIGHT, base_errors=base), Fault(errors=0.05), 1800, rules)
            median = _median(
                [one["guard"].num_started if one["guard"] else NEVER for one in run(pool, case, runs)]
            )
            cells.append(
                f"{_number(median)} ({fewest_numbers(base, base + 0.05, margin, math.log(100)):.0f})"
            )
        print(f"{margin:10g}" + "".join(f"{cell:>16}" for cell in cells))


def print_power(pool: ProcessPoolExecutor, runs: int) -> None:
    at = "".join(f"{count:>8}" for count in CURVE_AT)
    print(
        f"\nPower: percent of {runs} runs that had found the candidate worse by its number of requests, half of the"
    )
    print(f"traffic, light users, default margins\n\n{'':34}{at}")
    for name, faults in CURVES.items():
        for label, fault in faults:
            case = Case("", replace(LIGHT, share=0.5), fault, 230)
            found = [one["guard"] for one in run(pool, case, runs)]
            cells = [
                sum(f is not None and f.num_started <= count for f in found) / runs for count in CURVE_AT
            ]
            print(f"{name:28}{label:>6}" + "".join(f"{cell:8.0%}" for cell in cells))


def _bound(case: Case) -> float | None:
    """The least number of requests, for errors alone: the other metrics are no Bernoulli numbers."""
    fault = case.fault
    if fault is None or not fault.errors:
        return None
    base = case.traffic.base_errors
    margin = case.rules.margins["error_rate"]
    return fewest_numbers(
        base, min(1.0, base + fault.errors), margin, math.log(1 / case.rules.max_false_alarm)
    )


def _share(found: Sequence[Found | None]) -> str:
    return f"{sum(one is not None for one in found) / len(found):6.0%}"


def _row(found: Sequence[Found | None]) -> str:
    started = sorted(one.num_started if one else NEVER for one in found)
    users = _median([one.users_met if one else NEVER for one in found])
    seconds = _median([one.after_s if one else NEVER for one in found])
    ninety = started[math.ceil(len(started) * 0.9) - 1]
    return f"{_number(_median(started)):>8}{_number(ninety):>7}{_number(users):>7}{_number(seconds):>6}"


def _median(numbers: Sequence[float]) -> float:
    return statistics.median_high(numbers)


def _number(value: float) -> str:
    return "–" if value >= NEVER else f"{value:.0f}"


def main() -> None:
    parts = {
        "planted": print_planted,
        "margins": print_margins,
        "power": print_power,
        "false-alarms": print_false_alarms,
    }
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", choices=parts, action="append")
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--processes", type=int, default=2)
    chosen = parser.parse_args()
    with ProcessPoolExecutor(chosen.processes) as pool:
        for part in chosen.part or parts:
            parts[part](pool, chosen.runs)


if __name__ == "__main__":
    main()
