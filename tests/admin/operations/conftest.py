from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.control.plane import use_database
from support.http.admin_plane import AdminPlane
from support.servers.postgres import need_programs, postgres_server


@pytest.fixture(params=["sqlite", "postgresql"])
def plane(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[AdminPlane]:
    """acme has pirate with v1, which is released, v2 and v3; rival has nothing."""
    if request.param == "postgresql":
        need_programs()
        use_database(tmp_path, postgres_server().clear())
    made = AdminPlane(tmp_path)
    for tenant in ("acme", "rival"):
        made.make_tenant(tenant)
    for seed in (1, 2, 3):
        made.make_adapter("pirate", seed=seed)
    yield made
    made.close()
