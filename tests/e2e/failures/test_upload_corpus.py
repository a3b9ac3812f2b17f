"""Hostile uploads against the real server: none gets out of staging, none costs memory, none is a server error."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.fuzz.corpus import MARK, Corpus, Upload, escaped
from support.http import multipart
from support.servers.live_server import (
    ADAPTER_FILES,
    TINY_TORCH,
    LiveServer,
    checked,
    importable_tests,
    write_tiny_adapter,
)

pytestmark = pytest.mark.slow

CAP = 24 << 20
AUDITED = Path(__file__).parents[2] / "support" / "faults" / "audited_serve.py"
HEADERS = {"content-type": multipart.CONTENT_TYPE}


@dataclass
class Watched:
    """A server of whose changes to the file system a log is kept."""

    server: LiveServer
    log: Path
    files: dict[str, bytes]

    @property
    def store(self) -> Path:
        return self.server.data_dir / "artifacts"

    def changes(self) -> list[tuple[str, str, bool]]:
        return [tuple(json.loads(line)) for line in self.log.read_text().splitlines()]

    def memory(self, field: str) -> int:
        """Bytes of the server's resident memory: VmRSS now, VmHWM at its highest."""
        status = Path(f"/proc/{self.server.pid}/status").read_text()
        return int(status.partition(f"{field}:")[2].split()[0]) << 10

    def forget_peak(self) -> None:
        Path(f"/proc/{self.server.pid}/clear_refs").write_text("5")

    def tree(self) -> set[str]:
        """What lies around the store, without the database's own files."""
        root = self.server.data_dir
        return {
            str(path)
            for path in [*root.parent.iterdir(), *root.iterdir()]
            if not path.name.startswith("loraplex.db")
        }


@pytest.fixture
def watched(tiny_model: Path, tmp_path: Path) -> Iterator[Watched]:
    folder = write_tiny_adapter(tmp_path / "good", seed=1)
    server = LiveServer(
        tiny_model,
        tmp_path / "data",
        environment={"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": importable_tests()},
        max_adapter_upload=CAP,
        **TINY_TORCH,
    )
    log = tmp_path / "changes"
    store = server.data_dir / "artifacts"
    serve = server.command.index("serve")
    server.command[:serve] = [sys.executable, str(AUDITED), str(log), str(store)]
    with server:
        server.create_tenant("acme")
        server.upload("acme", "early", folder)
        yield Watched(server, log, {name: (folder / name).read_bytes() for name in ADAPTER_FILES})


def post_all(watched: Watched, uploads: Iterator[Upload], threads: int) -> Counter[int]:
    """The statuses of the answers. Each is a problem document that tells nothing of the inside, or a version."""
    token = watched.server.admin_token
    url = f"{watched.server.admin_url}/admin/v1/tenants/acme/adapters/hostile/versions"
    statuses: Counter[int] = Counter()

    def one(upload: Upload) -> None:
        with httpx.Client(timeout=120, headers={"authorization": f"Bearer {token}", **HEADERS}) as client:
            answer = client.post(url, content=upload.body)
        body: dict[str, Any] = answer.json()
        assert answer.status_code < 500, f"{upload.label}: {answer.text}\n{watched.server.log_tail()}"
        if upload.fits:
            assert answer.status_code in (200, 201), f"{upload.label}: {answer.text}"
        if answer.status_code >= 400:
            assert answer.headers["content-type"] == "application/problem+json", upload.label
            assert str(watched.server.data_dir) not in answer.text, upload.label
            assert body["code"] != "internal_error"
            assert body["detail"].isprintable(), upload.label
        statuses[answer.status_code] += 1

    with ThreadPoolExecutor(threads) as pool:
        for done in pool.map(one, uploads):
            assert done is None
    return statuses


def check(watched: Watched, seeds: range, *, mutations: int, threads: int) -> None:
    around, noted, before = watched.tree(), len(watched.changes()), watched.memory("VmRSS")
    watched.forget_peak()
    statuses: Counter[int] = Counter()
    for seed in seeds:
        statuses += post_all(watched, Corpus(seed, watched.files, CAP).uploads(mutations=mutations), threads)
    peak = watched.memory("VmHWM") - before
    changes = watched.changes()[noted:]
    outside = [change for change in changes if not change[2]]
    print(
        f"{statuses.total()} uploads: {dict(sorted(statuses.items()))}; "
        f"{len(changes)} changes of files, {len(outside)} outside of the store; "
        f"peak memory {peak / CAP:.2f} x the cap above the baseline"
    )
    assert outside == []
    opened = {change[1] for change in changes if change[0] == "open"}
    assert opened
    staging = str(watched.store / "staging")
    assert all(Path(path).parent.parent == Path(staging) for path in opened)
    assert {Path(path).name for path in opened} <= {*ADAPTER_FILES, "upload"}
    assert watched.tree() == around
    assert escaped(watched.server.data_dir.parent) == []
    assert not any(Path(root, MARK).exists() for root in ("/tmp", "/", ".", ".."))
    assert peak <= 2 * CAP
    assert list((watched.store / "staging").iterdir()) == []
    assert set(statuses) <= {200, 201, 400, 408, 413, 415, 422}
    assert statuses[422] > 50
    # What was taken is whole, and the neighbour answers.
    versions = checked(watched.server.admin.get("tenants/acme/adapters/hostile/versions"))["data"]
    stored = {path.name for path in (watched.store / "sha256").glob("*/*")}
    assert {row["digest"] for row in versions} <= stored
    with watched.server.client(watched.server.create_key("acme")) as client:
        body = {"model": "early", "prompt": "one", "max_tokens": 4}
        assert checked(client.post("/v1/completions", json=body))["choices"]


def test_hostile_uploads_stay_in_staging_and_cost_no_memory(watched: Watched) -> None:
    check(watched, range(1), mutations=60, threads=2)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_hostile_uploads_of_many_seeds(watched: Watched) -> None:
    check(watched, range(1, 4), mutations=2500, threads=4)
