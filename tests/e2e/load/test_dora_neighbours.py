"""One tenant's DoRA adapters are prepared from the base's weights while others' streams go on."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from support.adapters.drafts import ALL_SITES
from support.servers.live_server import SERVED_NAME, LiveServer, checked, write_real_adapter
from support.servers.live_streams import Neighbour, print_gaps

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]

COUNT = 20
RANK = 16
FILLERS = 40
"""Of 9.5 MiB each: more than device and host memory hold."""


@pytest.fixture
def server(real_model_dir: Path, tmp_path: Path) -> Iterator[LiveServer]:
    with LiveServer(
        real_model_dir,
        tmp_path / "data",
        served_model_name=SERVED_NAME,
        kv_cache_memory="256MiB",
        adapter_memory="256MiB",
        adapter_cpu_memory="64MiB",
    ) as made:
        yield made


def test_twenty_activations_beside_a_stream(server: LiveServer, tmp_path: Path) -> None:
    server.create_tenant("acme")
    server.create_tenant("rival")
    keys = {tenant: server.create_key(tenant) for tenant in ("acme", "rival")}
    # The check of an upload brings it to the device: the last ones fill it, and leave the others cold.
    for kind, count, dora, seed in (
        ("plain", COUNT, False, 0), ("dora", COUNT, True, 0), ("filler", FILLERS, False, 1000),
    ):  # fmt: skip
        for number in range(count):
            folder = write_real_adapter(
                tmp_path / "made", rank=RANK, targets=ALL_SITES, dtype="BF16", dora=dora, seed=seed + number
            )
            server.upload("rival", f"{kind}-{number}", folder)

    def activate(name: str) -> float:
        began = time.monotonic()
        with server.client(keys["rival"]) as client:
            body = {"model": name, "prompt": "One", "max_tokens": 1}
            answer = client.post("/v1/completions", json=body)
        checked(answer)
        assert answer.headers["x-loraplex-adapter-state"] == "cold"
        return time.monotonic() - began

    with Neighbour(server, keys["acme"]) as neighbour:
        server.wait(lambda: len(neighbour.times) > 20)
        began = time.monotonic()
        time.sleep(10)
        quiet = neighbour.gaps(began, time.monotonic())
        print_gaps("quiet", quiet)
        for kind in ("plain", "dora"):
            began = time.monotonic()
            with ThreadPoolExecutor(COUNT) as pool:
                waits = list(pool.map(activate, (f"{kind}-{number}" for number in range(COUNT))))
            ended = time.monotonic()
            gaps = neighbour.gaps(began, ended)
            print_gaps(
                f"{COUNT} activations of {kind}, done after {ended - began:.1f} s (the first after {min(waits):.2f} s)",
                gaps,
            )
            assert gaps, "the stream stood still"
            assert max(gaps) < 10
    assert server.stats()["num_leases"] == 0
