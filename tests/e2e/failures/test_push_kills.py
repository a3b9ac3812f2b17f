"""kill -9 of a server in a stream of pushes to a series, and power cuts that tear what was not on the disk."""

from __future__ import annotations

import json
import os
import random
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from loraplex.control.catalog.versions import version_number
from loraplex.control.db.database import Database
from support.control.integrity import check_integrity
from support.servers.live_server import TINY_TORCH, LiveServer, checked, write_tiny_adapter

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SERIES = "tenants/acme/adapters/run/series"
KILLS = 12


@pytest.fixture(scope="module")
def served(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LiveServer, Path]]:
    folder = tmp_path_factory.mktemp("pushed")
    config = json.loads((write_tiny_adapter(folder / "config") / "adapter_config.json").read_text())
    with LiveServer(tiny_model, folder / "data", **TINY_TORCH) as server:
        server.create_tenant("acme")
        rules = {"keep_last": 4, "check_every": 1000, "config": config}
        checked(server.admin.put(SERIES, json=rules))
        yield server, folder


class Stream:
    """A thread that pushes one version after the other until its server is gone. `answered`: digests by version."""

    def __init__(self, server: LiveServer, folder: Path, seed: int) -> None:
        self.answered: dict[str, str] = {}
        self._server, self._folder, self._seed = server, folder, seed
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def is_running(self) -> bool:
        return len(self.answered) > 1

    def join(self) -> None:
        self._thread.join(60)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        headers = {"content-type": "application/octet-stream"}
        for seed in range(self._seed, self._seed + 10_000):
            made = write_tiny_adapter(self._folder / "next", seed=seed)
            body = (made / "adapter_model.safetensors").read_bytes()
            try:
                answer = self._server.admin.post(f"{SERIES}/versions", content=body, headers=headers)
            except httpx.TransportError:
                return
            version = checked(answer, 200, 201)
            self.answered[version["version"]] = version["digest"]


def rows(server: LiveServer) -> list[dict[str, Any]]:
    return list(checked(server.admin.get("tenants/acme/adapters/run/versions?limit=500"))["data"])


def ask(server: LiveServer, key: str, model: str) -> httpx.Response:
    with server.client(key) as client:
        body = {"model": model, "prompt": "one", "max_tokens": 2, "temperature": 0}
        return client.post("/v1/completions", json=body)


def tear_what_is_not_durable(server: LiveServer, newest: str) -> set[str]:
    """Imitate a power cut: the files of versions that are not durable lose their ends. The newest version counts as
    one of them. Returns those versions."""
    with closing(sqlite3.connect(server.data_dir / "loraplex.db")) as database, database:
        database.execute(
            "UPDATE adapter_versions SET durable = 0 WHERE number = ?", (version_number(newest),)
        )
        found = database.execute(
            "SELECT number, digest FROM adapter_versions WHERE NOT durable AND state IN ('ready', 'validating')"
        ).fetchall()
    for _, digest in found:
        shelf = server.data_dir / "artifacts" / "sha256" / digest[:2] / digest
        os.truncate(shelf / "adapter_model.safetensors", 64)
    return {f"v{number}" for number, _ in found}


def test_no_kill_in_a_stream_of_pushes_leaves_half_a_version(served: tuple[LiveServer, Path]) -> None:
    """Each kill comes at a random moment. Of every second one the power is cut too: what was not on the disk is torn,
    and only that is lost. Each other version that was answered for is there, or retired."""
    server, folder = served
    key = server.create_key("acme")
    moments = random.Random(58)
    num_pushed = num_lost = 0
    lost: set[str] = set()
    for number in range(KILLS):
        stream = Stream(server, folder, seed=1 + number * 10_000)
        server.wait(stream.is_running)
        time.sleep(moments.uniform(0, 0.3))
        server.kill()
        stream.join()
        torn = (
            tear_what_is_not_durable(server, max(stream.answered, key=version_number))
            if number % 2
            else set()
        )
        server.start()
        server.wait(lambda: all(row["durable"] for row in rows(server) if row["state"] == "ready"))
        database = Database(f"sqlite:///{server.data_dir / 'loraplex.db'}")
        check_integrity(database, server.data_dir / "artifacts")  # each ready version's bytes are hashed
        database.close()
        lost |= torn
        found = {row["version"]: row for row in rows(server)}
        assert {version for version, row in found.items() if row["state"] == "lost"} == lost
        for version, digest in stream.answered.items():
            assert found[version]["digest"] == digest
            assert found[version]["state"] in (("lost",) if version in lost else ("ready", "retired")), (
                version
            )
        for version in torn:
            answer = ask(server, key, f"run@{version}")
            assert answer.status_code == 404
            assert "is lost" in answer.json()["error"]["message"]
        assert ask(server, key, "run").status_code == 200
        assert len(server.logged("version_lost")) >= len(torn)
        num_pushed, num_lost = num_pushed + len(stream.answered), num_lost + len(torn)
    assert num_lost >= KILLS // 2
    print(f"{KILLS} kills, {num_pushed} pushes answered, {num_lost} lost by power cuts")
