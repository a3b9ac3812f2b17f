"""The list of all adapters on SQLite, by order of its rows: seconds of the thread and of the wall for a first page.

    PYTHONPATH=tests python -m bench.console.adapter_list [--adapters 10000] [--requests 300000] [--rounds 5]

40 tenants share the adapters, which have a version and a release each; the requests ended in the last day.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import get_args

import msgspec
from sqlalchemy import insert

from loraplex.control.db.tables import Usage
from loraplex.control.usage.overview import OverviewFilter, Overviews, Sort
from support.control.many_adapters import copy_adapter
from support.control.plane import ControlPlane
from support.control.usage import ended

TENANTS = 40
AT_ONCE = 10_000
"""Rows of the ledger that are inserted together."""


def fill(plane: ControlPlane, num_adapters: int, num_requests: int) -> None:
    """Adapters and requests like those of one upload, under names and times of their own."""
    plane.add("t0", "like")
    for number in range(1, TENANTS):
        plane.tenants.create(f"t{number}")
    rng, now = random.Random(1), datetime.now(UTC)
    names = [(f"t{number % TENANTS}", f"adapter-{number}") for number in range(num_adapters)]
    copy_adapter(plane.database, ("t0", "like"), names)
    ago = sorted((rng.randrange(86_000) for _ in range(num_requests)), reverse=True)  # as they ended
    for start in range(0, num_requests, AT_ONCE):
        ledger = [
            ended(tenant_id=tenant, adapter=name, first_token_s=rng.random(), completion_tokens=9,
                  at=now - timedelta(seconds=seconds))
            for seconds in ago[start : start + AT_ONCE]
            for tenant, name in (rng.choice(names),)
        ]  # fmt: skip
        with plane.database.write() as session:
            session.execute(insert(Usage), [msgspec.structs.asdict(row) for row in ledger])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--adapters", type=int, default=10_000)
    parser.add_argument("--requests", type=int, default=300_000)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        plane = ControlPlane(Path(scratch))
        plane.tenants.create("t0")
        fill(plane, given.adapters, given.requests)
        overviews = Overviews(plane.database, plane.base.fingerprint)
        print("| asked of the last | sorted by | thread s | wall s |\n|---|---|---|---|")
        for hours in (1, 24):
            for sort in get_args(Sort):
                spans = []
                for _ in range(given.rounds):
                    began = time.thread_time(), time.monotonic()
                    since = datetime.now(UTC) - timedelta(hours=hours)
                    overviews.read(OverviewFilter(), since=since, sort=sort, descending=True)
                    spans.append((time.thread_time() - began[0], time.monotonic() - began[1]))
                thread, wall = (statistics.median(one) for one in zip(*spans, strict=True))
                print(f"| {hours} h | {sort} | {thread:.3f} | {wall:.3f} |", flush=True)
        plane.close()


if __name__ == "__main__":
    main()
