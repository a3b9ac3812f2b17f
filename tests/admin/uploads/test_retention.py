"""`--keep-versions`: what a new version deletes, and what it never does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from loraplex.control.audit.log import AuditFilter
from loraplex.control.release_types import ReleaseTarget
from support.adapters.drafts import make_adapter
from support.http.admin_plane import ADMIN_TOKEN, ARCH
from support.http.whole_server import WholeServer, bearer, whole_server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WholeServer]:
    folder = tmp_path_factory.mktemp("allowed")
    with whole_server(
        tmp_path_factory.mktemp("server"), adapter_sources=f"file://{folder}", keep_versions=2
    ) as running:
        running.plane.make_tenant("acme")
        yield running
        running.settle()
        running.plane.check_integrity()


def add(server: WholeServer, name: str, seed: int) -> str:
    folder = Path(server.installation.settings.adapter_sources[0].removeprefix("file://")) / f"{name}-{seed}"
    folder.mkdir()
    make_adapter(folder, ARCH, seed=seed)
    url = f"{server.admin_url}/admin/v1/tenants/acme/adapters/{name}/versions"
    made = server.http.post(url, json={"source": f"file://{folder}"}, headers=bearer(ADMIN_TOKEN))
    assert made.status_code == 201, made.text
    return str(made.json()["digest"])


def living(server: WholeServer, name: str) -> list[str]:
    versions = server.plane.services.catalog.list_versions("acme", name).items
    return [info.version for info in versions if info.state != "deleted"]


def test_released_and_pinned_versions_stay(server: WholeServer) -> None:
    catalog, releases = server.plane.services.catalog, server.plane.services.releases
    digests = [add(server, "support", seed) for seed in (1, 2, 3)]
    # v1 is released, as the first one; v2 and v3 are the newest two.
    assert living(server, "support") == ["v1", "v2", "v3"]
    catalog.set_pin("acme", "support", "v2", True)
    releases.put("acme", "support", [ReleaseTarget("v3", 100), ReleaseTarget("v1", 0)])
    add(server, "support", 4)
    add(server, "support", 5)
    assert living(server, "support") == ["v1", "v2", "v3", "v4", "v5"]
    releases.promote("acme", "support", "v5")
    catalog.set_pin("acme", "support", "v2", False)
    add(server, "support", 6)
    assert living(server, "support") == ["v5", "v6"]
    store = server.plane.services.artifacts.store
    assert not any(store.holds(digest) for digest in digests)
    assert set(digests) <= set(server.plane.engine.drops)
    rows = server.plane.services.audit.list(AuditFilter(action="version.delete")).items
    assert len([row for row in rows if row.after == {"keep_versions": 2}]) == 4


def test_bytes_that_another_name_has_stay(server: WholeServer) -> None:
    first = add(server, "one", 11)
    assert add(server, "two", 11) == first
    server.plane.services.releases.promote("acme", "one", "v1")
    for seed in (12, 13):
        add(server, "one", seed)
    server.plane.services.releases.promote("acme", "one", "v3")
    add(server, "one", 14)
    assert living(server, "one") == ["v3", "v4"]
    assert server.plane.services.artifacts.store.holds(first)
    assert living(server, "two") == ["v1"]
