"""A backup of a server under load, and a server on an empty machine that was restored from it."""

from __future__ import annotations

import itertools
import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.servers.live_server import (
    TINY_TORCH,
    LiveServer,
    checked,
    post_version,
    run_command,
    write_tiny_adapter,
)

pytestmark = pytest.mark.slow

LORAPLEX = (sys.executable, "-m", "loraplex.app.cli")
TENANT = "tenants/acme/adapters"


def say(server: LiveServer, key: str, model: str) -> str:
    body = {"model": model, "prompt": "one", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    with server.client(key) as client:
        return str(checked(client.post("/v1/completions", json=body))["choices"][0]["text"])


class Load:
    """Uploads, deletions and answers, each in a thread, until the block ends."""

    def __init__(self, server: LiveServer, key: str, root: Path) -> None:
        self.server, self.key, self.root = server, key, root
        self.num_answers = self.num_uploads = 0
        self.failures: list[str] = []
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=run) for run in (self._ask, self._change)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _ask(self) -> None:
        while not self._stop.is_set():
            try:
                say(self.server, self.key, f"kept-{self.num_answers % 3}")
            except Exception as error:
                self.failures.append(repr(error))
            self.num_answers += 1

    def _change(self) -> None:
        """Each upload is deleted a little later."""
        headers = {"authorization": f"Bearer {self.server.admin_token}"}
        with httpx.Client(
            base_url=self.server.admin_url + "/admin/v1/", headers=headers, timeout=60
        ) as admin:
            for number in itertools.count():
                if self._stop.is_set():
                    return
                folder = write_tiny_adapter(self.root / "passing", seed=100 + number)
                files = {path.name: (path.name, path.read_bytes()) for path in folder.iterdir()}
                answers = [post_version(admin, f"{TENANT}/passing-{number}/versions", files)]
                if number >= 2:
                    answers.append(admin.delete(f"{TENANT}/passing-{number - 2}"))
                self.failures += [answer.text for answer in answers if not answer.is_success]
                self.num_uploads += 1


def test_a_server_restored_from_a_backup_under_load_is_the_same(tiny_model: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    with LiveServer(tiny_model, data, dtype="float32", **TINY_TORCH) as server:
        server.create_tenant("acme")
        key = server.create_key("acme", scopes=["inference", "adapters:read"])
        for number in range(3):
            folder = write_tiny_adapter(tmp_path / f"kept-{number}", seed=number)
            server.upload("acme", f"kept-{number}", folder)
        expected = [say(server, key, f"kept-{number}") for number in range(3)]
        with Load(server, key, tmp_path) as load:
            server.wait(lambda: load.num_answers > 3 and load.num_uploads > 3)
            manifests, began = [], time.monotonic()
            for turn in range(2):
                made = run_command(
                    [*LORAPLEX, "backup", str(tmp_path / f"b{turn}"), "--data-dir", str(data), "--json"]
                )
                assert made.code == 0, made.stderr
                manifests.append(json.loads(made.stdout))
            seconds = (time.monotonic() - began) / 2
        assert load.failures == []
        assert server.logged("request_failed") == []
        assert server.stop() == 0
    copy = tmp_path / "restored"
    done = run_command([*LORAPLEX, "restore", str(tmp_path / "b1"), "--data-dir", str(copy)])
    assert done.code == 0, done.stderr
    with LiveServer(tiny_model, copy, dtype="float32", **TINY_TORCH) as server:
        assert [say(server, key, f"kept-{number}") for number in range(3)] == expected
        adapters = checked(server.admin.get(TENANT, params={"limit": 500}))["data"]
        versions: list[Any] = [
            version
            for adapter in adapters
            for version in checked(server.admin.get(f"{TENANT}/{adapter['name']}/versions"))["data"]
        ]
        assert {version["state"] for version in versions} == {"ready"}
        assert sorted(version["digest"] for version in versions) == manifests[1]["artifacts"]["digests"]
        usage = checked(server.admin.get("usage"))
        assert usage["data"], usage
        with server.client(key) as client:
            downloaded = client.get(f"/admin/v1/{TENANT}/kept-1/versions/v1/archive")
        assert downloaded.status_code == 200
        assert server.logged("usage_journal_damaged") == []
        assert server.logged("artifact_damaged") == []
    verified = run_command([*LORAPLEX, "audit", "verify", "--data-dir", str(copy)])
    assert verified.code == 0, verified.stderr
    print(
        f"\nbackup under load: {seconds:.1f} s each; meanwhile {load.num_answers} answers, {load.num_uploads} uploads; "
        f"{len(versions)} versions restored"
    )
