"""The console's first view: bytes on the wire, and the time until it can be used, in a real Chromium.

    PYTHONPATH=tests .venv/bin/python -m bench.console.first_view [--views 9]

Each view has an empty cache. `page`: from the navigation until the sign-in is shown. `now`: from the sign-in until the
batch by tenant is shown. Real apps and ports over a scripted engine, on loopback; the median and the longest.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

from loraplex.admin.console.routes import static_files
from loraplex.engine.reports import EngineStats, TenantStats
from support.console.browser import Screen, chromium
from support.http.admin_plane import ADMIN_TOKEN
from support.http.quiet import errors_alone
from support.http.whole_server import whole_server

SENT = """() => ["navigation", "resource"].flatMap(type => performance.getEntriesByType(type))
    .filter(one => !one.name.includes("/admin/v1/")).reduce((sum, one) => sum + one.transferSize, 0)"""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--views", type=int, default=9)
    views = parser.parse_args().views
    files = static_files()
    print(f"files: {len(files)}, {sum(len(file.compressed) for file in files.values()):,} bytes compressed")
    seconds: dict[str, list[float]] = {"page": [], "now": []}
    with errors_alone(), tempfile.TemporaryDirectory() as root, whole_server(Path(root)) as server:
        server.plane.make_tenant("acme")
        server.plane.engine.engine_stats = EngineStats(
            num_running=1, tenants={"acme": TenantStats(running=1)}
        )
        with chromium() as browser:
            for _ in range(views):
                with browser.new_context() as context:
                    screen = Screen(context.new_page())
                    began = time.perf_counter()
                    screen.page.goto(f"{server.admin_url}/", wait_until="commit")
                    screen["secret"].wait_for()
                    seconds["page"].append(time.perf_counter() - began)
                    screen["secret"].fill(ADMIN_TOKEN)
                    began = time.perf_counter()
                    screen["sign-in"].click()
                    screen["batch-row"].first.wait_for()
                    seconds["now"].append(time.perf_counter() - began)
                    sent = screen.page.evaluate(SENT)
    print(f"sent until then: {sent:,} bytes with headers")
    for name, taken in seconds.items():
        print(f"{name}: {statistics.median(taken):.2f} s, at most {max(taken):.2f} s")


if __name__ == "__main__":
    main()
