"""A client that pushes adapters to a real server, and times each stage."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import psutil

from support.servers.live_server import ADAPTER_FILES, LiveServer, checked, write_real_adapter

RANK = 16
SITES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SCOPES = ["inference", "adapters:read", "adapters:write", "adapters:train"]
PROMPT = "The quick brown fox jumps over the lazy dog."
LOOK_S = 0.02
"""Pause between two looks at a version's state."""
Spans = dict[str, list[tuple[float, ...]]]


def write_adapter(folder: Path, seed: int) -> dict[str, bytes]:
    write_real_adapter(folder, rank=RANK, targets=SITES, dtype="BF16", seed=seed, scale=0.01)
    return {name: (folder / name).read_bytes() for name in ADAPTER_FILES}


class Pushes:
    """Uploads of one name of a server, and pushes to its series `lane`. `spans`: by stage (wall, server's processor,
    engine's processor)."""

    def __init__(self, server: LiveServer, key: str) -> None:
        self.spans: Spans = defaultdict(list)
        self.loads: dict[str, list[float]] = defaultdict(list)
        self._server = server
        self._client = server.client(key)
        self._processes = [psutil.Process(pid) for pid in (server.pid, server.engine_pid() or 0)]

    def push(self, files: Mapping[str, bytes]) -> None:
        path = "/admin/v1/tenants/acme/adapters/run/versions"
        with self._stage("upload -> first token"):
            with self._stage("upload: form, disk, structure, row"):
                form = {name: (name, data) for name, data in files.items()}
                version = checked(self._client.post(path, files=form, params={"wait": False}), 202)
            with self._stage("check: load, measure, reference, row"):
                while version["state"] == "validating":
                    time.sleep(LOOK_S)
                    version = checked(self._client.get(f"{path}/{version['version']}"))
                assert version["state"] == "ready", version
            with self._stage("first token"):
                self._complete(f"run@{version['version']}")
        with self._stage("floor: first token of a resident version"):
            self._complete(f"run@{version['version']}")
        for row in checked(self._server.admin.get("cache", params={"limit": 100}))["data"]:
            if row["version"] == version["version"]:
                for stage, seconds in row["load_seconds"].items():
                    self.loads[stage].append(seconds)

    def begin_series(self, config: bytes) -> None:
        """Make a series that has the numbers of its first version checked, and of no other."""
        rules = {"keep_last": 4, "check_every": 10_000, "config": json.loads(config)}
        checked(self._client.put("/admin/v1/tenants/acme/adapters/lane/series", json=rules))

    def push_to_series(self, tensors: bytes) -> None:
        path = "/admin/v1/tenants/acme/adapters/lane/series/versions"
        with self._stage("series: push -> first token"):
            with self._stage("series: push"):
                kind = {"content-type": "application/octet-stream"}
                version = checked(self._client.post(path, content=tensors, headers=kind), 201)
                assert version["state"] == "ready", version
            with self._stage("series: first token"):
                self._complete(f"lane@{version['version']}")

    def _complete(self, model: str) -> None:
        asked = {"model": model, "prompt": PROMPT, "max_tokens": 1, "temperature": 0}
        checked(self._client.post("/v1/completions", json=asked))

    @contextmanager
    def _stage(self, name: str) -> Iterator[None]:
        before, began = self._processor_s(), time.perf_counter()
        yield
        wall = time.perf_counter() - began
        used = (after - earlier for earlier, after in zip(before, self._processor_s(), strict=True))
        self.spans[name].append((wall, *used))

    def _processor_s(self) -> list[float]:
        times = [process.cpu_times() for process in self._processes]
        return [float(each.user + each.system) for each in times]
