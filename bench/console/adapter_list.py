"""The list of all adapters in a real Chromium, by filter and order: from the click to the rows on the page.

    PYTHONPATH=tests python -m bench.console.adapter_list [--postgres] [--adapters 10000] [--requests 300000]
                                                          [--rounds 5]

40 tenants share the adapters, which have a version and a release each; the requests ended in the last day. Printed are
the median and the longest of the rounds in seconds of the wall, and the median of the server's processor time with that
of the driver. What is shown first after a start is a line of its own: the server has read no request yet.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
from sqlalchemy import insert, text

from loraplex.control.db.database import Database
from loraplex.control.db.tables import Usage
from support.console.browser import Screen, chromium
from support.control.many_adapters import copy_adapter
from support.control.plane import ControlPlane, use_database
from support.control.usage import ended
from support.http.admin_plane import ADMIN_TOKEN
from support.http.quiet import errors_alone
from support.http.whole_server import whole_server
from support.servers.postgres import postgres_server

TENANTS = 40
AT_ONCE = 10_000
"""Rows of the ledger that are inserted together."""
SORTS = ("name", "errors", "requests", "tokens", "first_token", "last_used", "bytes", "created")
CHOICES = (
    *(f"hours={hours}&sort={sort}&order=desc" for hours in (1, 6, 24) for sort in SORTS),
    "hours=24&order=asc",
    "hours=24&sort=first_token&order=asc",
    "hours=24&tenant=t7",
    "hours=24&search=99",
    "hours=24&tag=eu",
    "hours=24&state=ready",
    "hours=24&state=corrupt",
    "hours=24&release=none",
    "hours=24&release=released",
    "hours=24&release=running",
    "hours=24&base=served",
    "hours=24&base=other",
    "hours=24&min_errors=1",
    "hours=24&min_error_rate=0.01&sort=errors&order=desc",
)
"""Each filter and order that the page offers."""


def fill(root: Path, num_adapters: int, num_requests: int) -> None:
    """Adapters and requests like those of one upload, under names and times of their own."""
    with closing(ControlPlane(root)) as plane:
        plane.tenants.create("t0")
        plane.add("t0", "like")
        for number in range(1, TENANTS):
            plane.tenants.create(f"t{number}")
        names = [(f"t{number % TENANTS}", f"adapter-{number}") for number in range(num_adapters)]
        copy_adapter(plane.database, ("t0", "like"), names)
        for tenant, name in names[:50]:
            plane.catalog.set_tags(tenant, name, ["eu"])
        _fill_ledger(plane.database, names, num_requests)


def _fill_ledger(database: Database, names: list[tuple[str, str]], num_requests: int) -> None:
    rng, now = random.Random(1), datetime.now(UTC)
    ago = sorted((rng.randrange(86_000) for _ in range(num_requests)), reverse=True)  # as they ended
    for start in range(0, num_requests, AT_ONCE):
        ledger = [
            ended(tenant_id=tenant, adapter=name, first_token_s=rng.random(), completion_tokens=9,
                  status="internal_error" if rng.random() < 0.01 else "stop", at=now - timedelta(seconds=seconds))
            for seconds in ago[start : start + AT_ONCE]
            for tenant, name in (rng.choice(names),)
        ]  # fmt: skip
        with database.write() as session:
            session.execute(insert(Usage), [msgspec.structs.asdict(row) for row in ledger])
    if database.on_postgres:
        with database.write() as session:  # as its own daemon does within a minute
            session.execute(text("ANALYZE"))


LIST_SHOWN = """async chosen => {
    const began = performance.now();
    location.hash = "#/all-adapters?" + chosen;
    while (!document.querySelector("[data-testid=total-adapters]")) await new Promise(requestAnimationFrame);
    return (performance.now() - began) / 1000;
}"""


def show(screen: Screen, chosen: str) -> tuple[float, float]:
    """Seconds of the wall and of this process from another page to the list."""
    screen.page.evaluate("location.hash = '#/audit'")
    screen["audit-row"].first.wait_for()
    began = time.process_time()
    return screen.page.evaluate(LIST_SHOWN, chosen), time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--postgres", action="store_true")
    parser.add_argument("--adapters", type=int, default=10_000)
    parser.add_argument("--requests", type=int, default=300_000)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    with errors_alone(), tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        if given.postgres:
            use_database(root, postgres_server().clear())
        fill(root, given.adapters, given.requests)
        with whole_server(root) as server, chromium() as browser:
            screen = Screen(browser.new_page()).sign_in(f"{server.admin_url}/", ADMIN_TOKEN)
            print("| asked | median s | longest s | processor s |\n|---|---|---|---|")
            first = show(screen, "hours=24")
            print(f"| first after the start, hours=24 | {first[0]:.3f} | {first[0]:.3f} | {first[1]:.3f} |")
            for chosen in CHOICES:
                walls, processor = zip(*(show(screen, chosen) for _ in range(given.rounds)), strict=True)
                middle = statistics.median
                print(
                    f"| {chosen} | {middle(walls):.3f} | {max(walls):.3f} | {middle(processor):.3f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
