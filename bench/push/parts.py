"""The parts of the server's work on an upload, called in one thread."""

from __future__ import annotations

import hashlib
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx

from bench.push.client import Spans
from loraplex.adapters.admission.base_model import load_base_spec
from loraplex.adapters.admission.inspection import inspect_adapter
from loraplex.adapters.admission.inspection_cache import KnownStructures
from loraplex.adapters.store.artifact_store import ArtifactStore
from loraplex.adapters.store.files import CONFIG_NAME, TENSORS_NAME, digest_upload
from loraplex.admin.uploads.multipart import UploadParser

BODY_CHUNK = 64 << 10
"""Bytes of a body in one message of the HTTP server."""


class Parts:
    """The server's own work on an upload, part by part. `spans`: (seconds of the thread, wall)."""

    def __init__(self, model: Path, work: Path) -> None:
        self.spans: Spans = defaultdict(list)
        self._base = load_base_spec(model)
        self._structures = KnownStructures(self._base)
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
            whole = self._time("structure: with every value", inspect(True))
            self._structures.remember(*files_at, whole)
            self._time("structure known: hash and values", lambda: self._structures.inspect(*files_at))
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
