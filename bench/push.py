"""The time of a push by stage, from the upload to the first token, beside the least that it could take.

    PYTHONPATH=tests python -m bench.push MODEL [--pushes 8] [--threads 1]

MODEL is the directory of SmolLM2-135M-Instruct. A real server with its engine gets adapters of rank 16 on all seven
linears, each with values of its own, one after the other: in turns an upload of a name, and a push of other values to
a series, whose numbers are checked for the first version alone. An upload has three stages that a client sees: the
upload until its answer (`?wait=false`), the check of its numbers, and the first token of a request for the new version.
A push to a series has two. For each the table has seconds of the wall and of the processor, in the server and in the
engine: others may use the machine beside the bench, and only the wall has their time in it. Figures are medians, with
the most of the wall.

The second table has the parts of the server's work on the same files, called here in one thread, in seconds of that
thread and of the wall. The floor is the bytes hashed once, copied once, and the first token of a version that is on the
device.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil

from loraplex.adapters.admission.base_model import load_base_spec
from loraplex.adapters.admission.inspection import inspect_adapter
from loraplex.adapters.store.artifact_store import ArtifactStore
from loraplex.adapters.store.files import CONFIG_NAME, TENSORS_NAME, digest_upload
from loraplex.admin.uploads.multipart import UploadParser
from support.servers.live_server import ADAPTER_FILES, SMALL, LiveServer, checked, write_real_adapter

RANK = 16
SITES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SCOPES = ["inference", "adapters:read", "adapters:write", "adapters:train"]
PROMPT = "The quick brown fox jumps over the lazy dog."
LOOK_S = 0.02
"""Pause between two looks at a version's state."""
BODY_CHUNK = 64 << 10
"""Bytes of a body in one message of the HTTP server."""
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


class Parts:
    """The server's own work on an upload, part by part. `spans`: (seconds of the thread, wall)."""

    def __init__(self, model: Path, work: Path) -> None:
        self.spans: Spans = defaultdict(list)
        self._base = load_base_spec(model)
        self._store = ArtifactStore(work / "store")

    def take(self, files: Mapping[str, bytes]) -> None:
        body, kind = _form(files)
        parser = UploadParser(kind, max_bytes=1 << 30)
        chunks = [body[start : start + BODY_CHUNK] for start in range(0, len(body), BODY_CHUNK)]
        pieces = self._time("form", lambda: [piece for chunk in chunks for piece in parser.feed(chunk)])
        with self._store.begin_staging() as staging:
            data: dict[str, bytearray] = defaultdict(bytearray)
            for part, piece in pieces:
                data[part.value] += piece

            def write() -> None:
                for name, content in data.items():
                    (staging.directory / name).write_bytes(content)

            self._time("disk: write", write)
            files_at = (staging.directory / CONFIG_NAME, staging.directory / TENSORS_NAME)
            digest = self._time("hash", lambda: digest_upload(*files_at))

            def inspect(deep: bool) -> Callable[[], Any]:
                return lambda: inspect_adapter(*files_at, self._base, max_rank=64, deep=deep, digest=digest)

            self._time("structure: names and shapes", inspect(False))
            self._time("structure: with every value", inspect(True))
            self._time("disk: flush and publish", lambda: self._store.commit(staging, digest))
        raw = files[TENSORS_NAME]
        self._time("floor: hash in memory", lambda: hashlib.sha256(raw).digest())
        self._time("floor: copy", lambda: bytearray(raw))

    def _time(self, name: str, work: Callable[[], Any]) -> Any:
        wall, own = time.perf_counter(), time.thread_time()
        made = work()
        self.spans[name].append((time.thread_time() - own, time.perf_counter() - wall))
        return made


def _form(files: Mapping[str, bytes]) -> tuple[bytes, str]:
    """The body of an upload, and its content type."""
    form = {name: (name, data) for name, data in files.items()}
    request = httpx.Request("POST", "http://server/", files=form)
    return request.read(), request.headers["content-type"]


def print_table(columns: str, spans: Spans) -> None:
    print(f"\n| {columns} |\n|{'---|' * (columns.count('|') + 1)}")
    for name, found in spans.items():
        values = [statistics.median(each) for each in zip(*found, strict=True)]
        most = max(each[0] for each in found)
        print(f"| {name} | {' | '.join(f'{value:.3f}' for value in (*values, most))} |")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=lambda given: Path(given).resolve())
    parser.add_argument("--pushes", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch)
        uploads = [write_adapter(work / str(seed), seed) for seed in range(arguments.pushes + 1)]
        sizes = {len(files[TENSORS_NAME]) for files in uploads}
        with LiveServer(arguments.model, work / "data", threads=arguments.threads, **SMALL) as server:
            server.create_tenant("acme")
            key = server.create_key("acme", scopes=SCOPES)
            pushes = Pushes(server, key)
            pushes.begin_series(uploads[0][CONFIG_NAME])
            for number, files in enumerate(uploads):
                pushes.push(files)
                pushes.push_to_series(write_adapter(work / f"lane{number}", 1000 + number)[TENSORS_NAME])
                if not number:  # the first ones fill caches, and the series' is checked
                    pushes.spans.clear()
                    pushes.loads.clear()
        parts = Parts(arguments.model, work)
        for files in uploads:
            parts.take(files)
    print(f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, bytes {sizes}")
    print_table("stage | wall s | server s | engine s | most wall s", pushes.spans)
    loads = ", ".join(f"{stage} {statistics.median(found):.3f}" for stage, found in pushes.loads.items())
    print(f"\nThe engine's load by stage, seconds of the wall: {loads}.")
    print_table("part | thread s | wall s | most thread s", parts.spans)


if __name__ == "__main__":
    main()
