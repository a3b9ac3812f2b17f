"""The guard of releases under few users: false alarms, what is found, and how many users a pass needs.

    PYTHONPATH=tests:. python -m bench.release_guard_few [--part PART]… [--runs 1000] [--processes 2]

PART is false-alarms, units, found or needs; all of them where none is given. Users come again and again in turn, with
a look after each round (`support.releases.few_users`). Prints how often a version is called worse that is the same,
beside what counting each request of a sticky user would do; what is found of a version whose answers are cut at their
limit, and after how many of its answers; and how often a gross fault has been found by the number of users that the
guard names (`power`).
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor

from loraplex.lifecycle.release_guard.rules import Rules
from support.releases.few_users import A_A, Few, needed, verdicts

PLANTED = (
    *(Few(18, 7, share=share, kind="steady", cut=1.0) for share in (0.5, 0.25, 0.1)),
    Few(18, 7, kind="alike", cut=1.0),
    Few(40, 7, kind="alike", cut=0.5),
    *(Few(18, 12, "request", share=share, kind="steady", cut=1.0) for share in (0.5, 0.25, 0.1)),
    Few(18, 12, "request", kind="alike", cut=0.5),
)


def _run(job: tuple[Few, int, bool]) -> tuple[str, int]:
    few, seed, as_requests = job
    verdict, answers = verdicts(few, seed, as_requests=as_requests)
    return verdict.kind, answers


def run(
    pool: ProcessPoolExecutor, few: Few, runs: int, *, as_requests: bool = False
) -> list[tuple[str, int]]:
    return list(pool.map(_run, [(few, seed, as_requests) for seed in range(runs)], chunksize=8))


def print_false_alarms(pool: ProcessPoolExecutor, runs: int, cases: Sequence[Few] = A_A) -> None:
    print(
        f"\nThe same version called worse, percent of {runs} runs (allowed: 1), and verdicts of the others\n"
    )
    print(f"{'':44}{'worse':>8}{'pass':>8}{'hold':>8}")
    for few in cases:
        kinds = [kind for kind, _ in run(pool, few, runs)]
        print(
            f"{_name(few):44}" + "".join(f"{kinds.count(k) / runs:8.1%}" for k in ("breach", "pass", "hold"))
        )


def print_units(pool: ProcessPoolExecutor, runs: int) -> None:
    print(f"\nThe same, were each request of a sticky user a unit, percent of {runs} runs\n")
    for few in (case for case in A_A if case.unit == "user" and case.users > 1):
        found = [kind for kind, _ in run(pool, few, runs, as_requests=True)]
        print(f"{_name(few):44}{found.count('breach') / runs:8.1%}")


def print_found(pool: ProcessPoolExecutor, runs: int) -> None:
    print(
        f"\nAnswers of the candidate cut at their limit: percent found of {runs} runs, and its answers until then\n"
    )
    print(f"{'':52}{'found':>8}{'median':>8}{'most':>8}")
    for few in PLANTED:
        found = sorted(answers for kind, answers in run(pool, few, runs) if kind == "breach")
        name = f"{_name(few)}, {few.share:.0%} on it, {few.cut:.0%} cut"
        median = f"{statistics.median_high(found):8}{found[-1]:8}" if found else f"{'–':>8}{'–':>8}"
        print(f"{name:52}{len(found) / runs:8.0%}{median}")


def print_needs(pool: ProcessPoolExecutor, runs: int) -> None:
    print(f"\nUsers that a pass needs, and percent of {runs} runs that had found a gross fault by then\n")
    print(f"{'the candidate has':20}{'half cut':>22}{'numbers larger':>22}")
    for share in (0.5, 0.25, 0.1, 0.02):
        cells = []
        for metric in ("length_share", "output_length"):
            rules = Rules({name: margin for name, margin in Rules().margins.items() if name == metric})
            jobs = [(Few(1, share=share), seed, metric, _as_beside_others(rules)) for seed in range(runs)]
            found = list(pool.map(_needed, jobs, chunksize=8))
            cells.append(
                f"{statistics.median(n for n, _ in found):9.0f} {sum(hit for _, hit in found) / runs:9.0%}"
            )
        print(f"{share:<20.0%}" + "".join(f"{cell:>22}" for cell in cells))


def _as_beside_others(rules: Rules) -> Rules:
    """One metric alone with the part of the false alarms that it has beside the others."""
    whole = Rules()
    (name,) = rules.margins
    return Rules(rules.margins, whole.max_false_alarm * whole.share(name), 0)


def _needed(job: tuple[Few, int, str, Rules]) -> tuple[int, bool]:
    few, seed, metric, rules = job
    return needed(few, seed, metric, rules)


def _name(few: Few) -> str:
    unit = "each request" if few.unit == "request" else "sticky"
    heavy = ", one sends half" if few.heavy and few.users > 1 else ""
    return f"{few.users} user{'' if few.users == 1 else 's'} {few.kind}{heavy}, {unit}"


def main() -> None:
    parts = {
        "false-alarms": print_false_alarms,
        "units": print_units,
        "found": print_found,
        "needs": print_needs,
    }
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", choices=parts, action="append")
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--processes", type=int, default=2)
    chosen = parser.parse_args()
    with ProcessPoolExecutor(chosen.processes) as pool:
        for part in chosen.part or parts:
            parts[part](pool, chosen.runs)


if __name__ == "__main__":
    main()
