"""The plans of docs/operations.md, and an operator's first day with the small real model."""

from __future__ import annotations

from pathlib import Path

import pytest

from support import markdown
from support.servers.live_server import free_ports
from support.transcripts import differences, run_steps, shell_environment, steps_of

pytestmark = pytest.mark.slow

USAGE = "loraplex usage --tenant acme --bucket none --group-by adapter"
"""Tells of requests from about a second after their ends; on a busy machine later."""


def section(title: str) -> str:
    return markdown.read("docs/operations.md").partition(f"\n{title}\n")[2].partition("\n## ")[0]


def test_plans_are_as_shown(tmp_path: Path) -> None:
    steps = steps_of(section("## Plan"))
    assert len(steps) > 1
    assert differences(steps, run_steps(steps, tmp_path, shell_environment(), {})) == []


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("real_model_dir")
def test_the_walk_leads_where_the_page_says(tmp_path: Path) -> None:
    steps = steps_of(markdown.read("docs/first-day.md"))
    assert len(steps) > 20
    data_port, admin_port = free_ports(2)
    here = {
        "127.0.0.1:8000": f"127.0.0.1:{data_port}",
        "127.0.0.1:8001": f"127.0.0.1:{admin_port}",
        USAGE: f"for _ in {{1..60}}; do {USAGE} | grep -q '^ mood *3 ' && break; sleep 0.5; done; {USAGE}",
    }
    environment = shell_environment(
        LORAPLEX_ENGINE_SPARE="false",
        LORAPLEX_DRAIN_GRACE="0",
        LORAPLEX_THREADS="1",
        LORAPLEX_PORT=str(data_port),
        LORAPLEX_ADMIN_PORT=str(admin_port),
        LORAPLEX_URL=f"http://127.0.0.1:{data_port}",
        LORAPLEX_ADMIN_URL=f"http://127.0.0.1:{admin_port}",
    )
    (tmp_path / "examples").symlink_to(markdown.ROOT / "examples")
    assert differences(steps, run_steps(steps, tmp_path, environment, here, timeout=560)) == []
