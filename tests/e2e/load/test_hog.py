"""A short chat beside one request that could fill the whole batch (`bench.hog_server` in short). The scheduling is
tested without a clock in tests/engine/scheduling/test_places.py."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from bench.hog_server import measure
from support.servers.live_server import SERVED_NAME, SMALL, LiveServer


@pytest.mark.soak
def test_one_request_of_64_sequences_keeps_nobody_waiting(real_model_dir: Path, tmp_path: Path) -> None:
    settings = SMALL | {"threads": 0, "served_model_name": SERVED_NAME}
    with LiveServer(real_model_dir, tmp_path / "data", **settings) as server:
        seen = measure(server, ["batch"], requests=5, tokens=2, settle_s=3.0, limit_s=30.0)
    waits = {name: of.waits for name, of in seen.items()}
    print({name: [round(wait, 3) for wait in of] for name, of in waits.items()})
    assert len(waits["batch"]) == 5
    # 3 s where a chat alone takes 0.1 s, as docs/fairness.md has it; a slower machine has as much more.
    assert max(waits["batch"]) <= 30 * statistics.median(waits["alone"])
