"""`POST …/versions` with a source, and `loraplex adapter import`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from loraplex.app.cli import create_cli
from loraplex.control.audit.log import AuditFilter
from support.adapters.drafts import make_adapter
from support.http.admin_plane import ADMIN_TOKEN, ARCH, assert_problem
from support.http.whole_server import WholeServer, bearer, whole_server


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("allowed")
    make_adapter(made, ARCH, seed=3)
    return made


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Iterator[WholeServer]:
    with whole_server(tmp_path_factory.mktemp("server"), adapter_sources=f"file://{folder}") as running:
        running.plane.make_tenant("acme")
        yield running
        running.settle()
        running.plane.check_integrity()


def post(server: WholeServer, name: str, body: dict[str, Any]) -> httpx.Response:
    url = f"{server.admin_url}/admin/v1/tenants/acme/adapters/{name}/versions"
    return server.http.post(url, json=body, headers=bearer(ADMIN_TOKEN))


def test_an_import_is_an_upload(server: WholeServer, folder: Path) -> None:
    body = {"source": f"file://{folder}", "serving": {"tool_format": "hermes"}}
    made = post(server, "support", body)
    assert made.status_code == 201
    version = made.json()
    assert (version["version"], version["state"]) == ("v1", "ready")
    assert version["serving"] == {
        "tool_format": "hermes",
        "reasoning_format": None,
        "chat_digest": None,
        "alora": None,
    }
    assert made.headers["location"].endswith("/adapters/support/versions/v1")
    again = post(server, "support", body)
    assert (again.status_code, again.json()["version"]) == (200, "v1")
    rows = server.plane.services.audit.list(AuditFilter(action="version.upload")).items
    assert {row.after["source"] for row in rows if row.after} == {f"file://{folder}"}


def test_a_later_import_takes_no_traffic(server: WholeServer, folder: Path) -> None:
    post(server, "later", {"source": f"file://{folder}"})
    (folder / "two").mkdir()
    make_adapter(folder / "two", ARCH, seed=4)
    assert post(server, "later", {"source": f"file://{folder}/two"}).json()["version"] == "v2"
    release = server.plane.services.releases.get("acme", "later")
    assert [target.version for target in release.targets] == ["v1"]


@pytest.mark.parametrize(
    ("source", "status", "code"),
    [
        ("file:///etc", 403, "source_not_allowed"),
        ("http://127.0.0.1:8001/metrics", 403, "source_not_allowed"),
        ("s3://bucket/adapter", 403, "source_not_allowed"),
        ("hf://org/name@main", 403, "source_not_allowed"),
        ("", 400, "invalid_value"),
    ],
)
def test_what_is_not_allowed(server: WholeServer, source: str, status: int, code: str) -> None:
    assert_problem(post(server, "stolen", {"source": source}), status, code)


def test_what_is_not_known_or_not_there(server: WholeServer, folder: Path) -> None:
    assert_problem(post(server, "x", {"source": f"file://{folder}", "token": "t"}), 400, "unknown_field")
    assert_problem(post(server, "x", {"source": f"file://{folder}/nothing"}), 404, "source_not_found")
    assert server.plane.leftovers() == []


def test_the_command(server: WholeServer, folder: Path) -> None:
    options = ["--tenant", "acme", "--admin-url", server.admin_url, "--admin-token", ADMIN_TOKEN]
    given = ["adapter", "import", "by-hand", f"file://{folder}", "--tag", "eu", "--tag", "beta", *options]
    result = CliRunner().invoke(create_cli(), given)
    assert result.exit_code == 0, result.output
    assert "by-hand: accepted as v1" in result.output
    assert server.plane.services.catalog.get_adapter("acme", "by-hand").tags == ("beta", "eu")
    refused = CliRunner().invoke(create_cli(), ["adapter", "import", "by-hand", "file:///etc", *options])
    assert refused.exit_code != 0
