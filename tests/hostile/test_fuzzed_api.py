"""Both ports of a server under requests that nobody would send, while another tenant is served."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from pathlib import Path

import httpx
import psutil
import pytest

from support.fuzz.api import ApiFuzzer, both_documents, valid_bodies
from support.http.admin_plane import ADMIN_TOKEN, SERVED_NAME
from support.http.whole_server import bearer, whole_server
from support.servers.live_server import TINY_SIZES, LiveServer, write_tiny_adapter, write_tiny_model

SCOPES = ["inference", "adapters:read", "adapters:write", "adapters:train", "usage:read"]
MAX_GROWTH = 0.10


def test_a_few_hundred_fuzzed_requests(tmp_path: Path) -> None:
    with whole_server(tmp_path) as server:
        server.plane.make_tenant("acme")
        server.plane.make_adapter("support", "acme")
        keys = [server.plane.make_key("acme", *SCOPES), ADMIN_TOKEN, "lpx_nobody_x"]
        urls = {"data": server.data_url, "admin": server.admin_url}
        fuzzer = ApiFuzzer(urls, both_documents(urls), keys, valid_bodies(SERVED_NAME), "fast")
        for number in range(400):
            fuzzer.one(number)
        fuzzer.close()
        assert fuzzer.failures == []
        assert fuzzer.statuses[400] > 50
        server.settle()


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_thousands_of_fuzzed_requests_on_the_real_server(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model")
    adapter = write_tiny_adapter(tmp_path / "adapter")
    with LiveServer(model, tmp_path / "data", served_model_name="tiny", **TINY_SIZES) as server:
        for tenant in ("acme", "quiet"):
            server.create_tenant(tenant)
            server.upload(tenant, "support", adapter)
        quiet = server.create_key("quiet", scopes=SCOPES)
        urls = {"data": server.data_url, "admin": server.admin_url}
        documents, bodies = both_documents(urls), valid_bodies("tiny")
        stop, served, witness_failures = threading.Event(), Counter[int](), list[str]()

        def witness() -> None:
            """The tenant that does nothing wrong."""
            with httpx.Client(timeout=60, headers=bearer(quiet)) as http:
                while not stop.is_set():
                    body = {"model": "support", "prompt": "Hello", "max_tokens": 4, "ignore_eos": True}
                    answer = http.post(f"{server.data_url}/v1/completions", json=body)
                    served[answer.status_code] += 1
                    if answer.status_code != 200:
                        witness_failures.append(answer.text[:300])

        process = psutil.Process(server.pid)
        began, fuzzers, memory = time.monotonic(), list[ApiFuzzer](), list[int]()

        def fuzz(fuzzer: ApiFuzzer, first: int, count: int) -> None:
            for number in range(first, first + count):
                fuzzer.one(number)
                memory.append(process.memory_info().rss)

        watching = threading.Thread(target=witness)
        watching.start()
        try:
            peaks = []
            for round_number in range(4):
                # Some of the requests delete the tenant, or use its limits up.
                if server.admin.get("tenants/acme").status_code == 404:
                    server.create_tenant("acme")
                    server.upload("acme", "support", adapter)
                keys = [
                    server.create_key("acme", scopes=SCOPES),
                    server.create_key("acme"),
                    server.admin_token,
                    "x",
                ]
                made = [ApiFuzzer(urls, documents, keys, bodies, f"{round_number}/{n}") for n in range(4)]
                threads = [threading.Thread(target=fuzz, args=(f, 97 * n, 500)) for n, f in enumerate(made)]
                memory.clear()
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
                peaks.append(max(memory))
                for fuzzer in made:
                    fuzzer.close()
                fuzzers += made
        finally:
            stop.set()
            watching.join()
        statuses = sum((fuzzer.statuses for fuzzer in fuzzers), Counter())
        assert [failure for fuzzer in fuzzers for failure in fuzzer.failures] == []
        assert witness_failures == []
        server.wait(server.idle)
        assert server.engine()["restarts"] == 0
        growth = max(peaks[1:]) / peaks[0] - 1
        print(
            f"\nfuzzed API: {sum(statuses.values())} answers to {16 * 500} requests in "
            f"{time.monotonic() - began:.0f} s, "
            f"{dict(sorted(statuses.items()))}; meanwhile {served[200]} of {sum(served.values())} requests of another "
            f"tenant served; peaks of memory by round {[f'{peak / 1e6:.0f} MB' for peak in peaks]} ({growth:+.1%})"
        )
        assert growth < MAX_GROWTH
    lines = server.log_path.read_text().removesuffix("\n").split("\n")
    shown = [line for line in lines if not line.startswith("admin token (kept in ")]
    assert len(lines) - len(shown) == 1
    assert all(isinstance(json.loads(line), dict) and line.isprintable() for line in shown)
    assert [line for line in shown if '"level": "error"' in line] == []
