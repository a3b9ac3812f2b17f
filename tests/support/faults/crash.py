"""Uploads and deletions in a process that dies, or whose disk fails, at a chosen step.

`CrashHost` starts one process that has everything imported; it forks a child for each run, which serves the admin plane
to itself over real files and a real database. `python crash.py` is that process: jobs come as lines of JSON, one
answer each.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import io
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tarfile
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
from sqlalchemy.exc import OperationalError

from loraplex.adapters.store.fault_points import FaultPoint
from loraplex.control.catalog.series import SeriesRules
from loraplex.control.types import Refusal
from support.adapters.drafts import make_adapter
from support.faults.damage import flip_a_bit
from support.faults.witness import Seen, Witness
from support.http.admin_plane import ARCH, AdminPlane, admin_client, warm_up
from support.servers.live_server import importable_tests

FILES = ("adapter_config.json", "adapter_model.safetensors")
COMMITS = frozenset(
    {
        FaultPoint.COMMIT_VERSION,
        FaultPoint.COMMIT_DURABLE,
        FaultPoint.COMMIT_LOST,
        FaultPoint.COMMIT_CHECK,
        FaultPoint.COMMIT_REMOVAL,
        FaultPoint.MARK_CORRUPT,
    }
)
COMMITTED = frozenset(
    {FaultPoint.VERSION_COMMITTED, FaultPoint.CHECK_COMMITTED, FaultPoint.REMOVAL_COMMITTED}
)
"""Steps that change nothing themselves: one can die at them, and they cannot fail."""
OPENING = 3
"""Steps that a store takes when it is opened."""


@dataclass(frozen=True)
class Point:
    """One announced step."""

    step: FaultPoint
    path: str | None
    to: str | None

    @property
    def name(self) -> str:
        return str(self.step) if self.path is None else f"{self.step} {Path(self.path).name[:12]}"


class Recorder:
    """A fault that only takes note."""

    def __init__(self) -> None:
        self.points: list[Point] = []

    def __call__(self, step: FaultPoint, path: Path | None = None, to: Path | None = None, /) -> None:
        self.points.append(Point(step, None if path is None else str(path), None if to is None else str(to)))


class KillAt(Recorder):
    """Ends the process by SIGKILL in place of the step with this number."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self._index = index

    def __call__(self, step: FaultPoint, path: Path | None = None, to: Path | None = None, /) -> None:
        if len(self.points) == self._index:
            os.kill(os.getpid(), signal.SIGKILL)
        super().__call__(step, path, to)


class FailAt(Recorder):
    """Raises what a disk raises in place of the step with this number."""

    def __init__(self, index: int, code: int) -> None:
        super().__init__()
        self._index = index
        self._code = code

    def __call__(self, step: FaultPoint, path: Path | None = None, to: Path | None = None, /) -> None:
        super().__call__(step, path, to)
        if len(self.points) != self._index + 1:
            return
        if step in COMMITS:
            raise database_error(self._code)
        raise OSError(self._code, os.strerror(self._code))


def database_error(code: int) -> OperationalError:
    """What the database raises where its disk gives this errno."""
    cause = sqlite3.OperationalError("the database's disk")
    cause.sqlite_errorname = "SQLITE_FULL" if code in (errno.ENOSPC, errno.EDQUOT) else "SQLITE_IOERR_WRITE"
    return OperationalError("COMMIT", {}, cause)


# What there is to begin with, and what is done then.


def adapter_bytes(root: Path, seed: int) -> dict[str, bytes]:
    made = make_adapter(root / f"made-{seed}", ARCH, seed=seed)
    return {path.name: path.read_bytes() for path in (made.config, made.tensors)}


def archive_of(files: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return out.getvalue()


def _digest(plane: AdminPlane, tenant: str = "acme", name: str = "pirate") -> str:
    return plane.services.catalog.get_version(tenant, name, "v1").digest


def _upload(seed: int) -> Callable[[AdminPlane], list[int]]:
    def act(plane: AdminPlane) -> list[int]:
        content = adapter_bytes(plane.root, seed)
        return [send(plane, "POST", VERSIONS, files={name: (name, data) for name, data in content.items()})]

    return act


def _upload_archive(plane: AdminPlane) -> list[int]:
    content = archive_of(adapter_bytes(plane.root, 1))
    return [send(plane, "POST", VERSIONS, files={"archive": ("a.tar.gz", content)})]


def _series(plane: AdminPlane) -> None:
    config = json.loads(adapter_bytes(plane.root, 1)["adapter_config.json"])
    plane.services.series.put("acme", "pirate", SeriesRules(8, 1, config=config))


def _push(plane: AdminPlane) -> list[int]:
    """To a series, and the flush behind it."""
    content = adapter_bytes(plane.root, 1)["adapter_model.safetensors"]
    headers = {"content-type": "application/octet-stream"}
    status = send(plane, "POST", PUSHES, content=content, headers=headers)
    asyncio.run(plane.durability.finish())
    return [status]


def _torn(plane: AdminPlane) -> None:
    """A version that the machine's crash cost: its row is there, and of its bytes a part."""
    with plane.services.artifacts.store.begin_staging() as staging:
        make_adapter(staging.directory, ARCH, seed=1)
        plane.services.catalog.admit("acme", "pirate", staging, durable=False)
    folder = plane.services.artifacts.store.path(_digest(plane))
    os.truncate(folder / "adapter_model.safetensors", 100)


def _import(plane: AdminPlane) -> list[int]:
    adapter_bytes(plane.root, 1)
    return [send(plane, "POST", VERSIONS, json={"source": f"file://{plane.root}/made-1"})]


def _delete(path: str) -> Callable[[AdminPlane], list[int]]:
    return lambda plane: [send(plane, "DELETE", path)]


def _check(ok: bool) -> Callable[[AdminPlane], list[int]]:
    """The verdict on what waits for its check, as far as anything does."""

    def act(plane: AdminPlane) -> list[int]:
        validation = plane.validation
        for info in validation.pending():
            if ok:
                validation.accept(info, {"verdict": "equal"})
            else:
                validation.reject(info, Refusal("numerical_mismatch", "wrong"), {"verdict": "mismatch"})
        return []

    return act


def _restart(plane: AdminPlane) -> list[int]:
    plane.start()
    return []


def _mark(plane: AdminPlane) -> list[int]:
    plane.services.catalog.mark_damaged(_digest(plane))
    return []


def _damaged(plane: AdminPlane) -> None:
    plane.make_adapter("pirate", "acme", seed=1)
    flip_a_bit(plane.services.artifacts.store.path(_digest(plane)))


def _marked(plane: AdminPlane) -> None:
    _damaged(plane)
    plane.services.catalog.mark_damaged(_digest(plane))


def _leftovers(plane: AdminPlane) -> None:
    """An orphan, a half upload, and something that no upload left."""
    store = plane.services.artifacts.store
    plane.make_adapter("orphan", "acme", seed=1)
    folder = store.path(_digest(plane, name="orphan"))
    shutil.copytree(folder, plane.root / "copy")
    plane.services.catalog.delete_adapter("acme", "orphan")
    shutil.copytree(plane.root / "copy", folder)
    store.begin_staging().config_path.write_bytes(b"{")
    (plane.root / "artifacts" / "staging" / "stray").write_bytes(b"x")


VERSIONS = "tenants/acme/adapters/pirate/versions"
PUSHES = "tenants/acme/adapters/pirate/series/versions"


@dataclass(frozen=True)
class Scenario:
    """`prepare` and `act` get a plane with the tenants acme and rival, where rival has an adapter "other"; `act` gives
    the statuses of its answers. `may_go` are the adapters that may be there or not after a death, as TENANT/NAME@vN."""

    name: str
    prepare: tuple[Callable[[AdminPlane], Any], ...]
    act: Callable[[AdminPlane], list[int]]
    may_go: frozenset[str] = frozenset()
    is_upload: bool = False


def _made(name: str, tenant: str, seed: int, *, check: bool = False) -> Callable[[AdminPlane], Any]:
    return lambda plane: plane.make_adapter(name, tenant, seed=seed, check=check)


_MINE, _SECOND, _THEIRS = _made("pirate", "acme", 1), _made("pirate", "acme", 2), _made("parrot", "rival", 1)
_UNCHECKED = _made("pirate", "acme", 1, check=True)
_UNCHECKED_SECOND = _made("pirate", "acme", 2, check=True)
SCENARIOS = {
    row.name: row
    for row in (
        Scenario("first", (), _upload(1), is_upload=True),
        Scenario("archive", (), _upload_archive, is_upload=True),
        Scenario("import", (), _import, is_upload=True),
        Scenario("push", (_series,), _push, is_upload=True),
        Scenario("lost", (_torn,), _restart, frozenset({"acme/pirate@v1"})),
        Scenario("second", (_MINE,), _upload(2), is_upload=True),
        Scenario("again", (_MINE,), _upload(1), is_upload=True),
        Scenario("shared", (_THEIRS,), _upload(1), is_upload=True),
        Scenario("heal", (_marked,), _upload(1), is_upload=True),
        Scenario("delete", (_MINE,), _delete("tenants/acme/adapters/pirate"), frozenset({"acme/pirate@v1"})),
        Scenario(
            "delete shared",
            (_MINE, _THEIRS),
            _delete("tenants/acme/adapters/pirate"),
            frozenset({"acme/pirate@v1"}),
        ),
        Scenario(
            "delete version", (_MINE, _SECOND), _delete(f"{VERSIONS}/v2"), frozenset({"acme/pirate@v2"})
        ),
        Scenario("delete tenant", (_MINE,), _delete("tenants/acme"), frozenset({"acme/pirate@v1"})),
        Scenario("accept", (_UNCHECKED,), _check(True)),
        Scenario("accept second", (_MINE, _UNCHECKED_SECOND), _check(True)),
        Scenario("reject", (_UNCHECKED,), _check(False), frozenset({"acme/pirate@v1"})),
        Scenario("reject shared", (_THEIRS, _UNCHECKED), _check(False), frozenset({"acme/pirate@v1"})),
        Scenario("mark", (_damaged,), _mark, frozenset({"acme/pirate@v1"})),
        Scenario("start", (_leftovers,), _restart),
    )
}


def send(plane: AdminPlane, method: str, path: str, **options: Any) -> int:
    """The status of one request."""

    async def run() -> httpx.Response:
        async with admin_client(plane.app) as client:
            return await client.request(method, path, **options)

    return asyncio.run(run()).status_code


def prepared(scenario: Scenario, root: Path) -> Path:
    """A data directory as it is before the scenario's act."""
    root.mkdir(parents=True)
    plane = AdminPlane(root)
    for tenant in ("acme", "rival"):
        plane.make_tenant(tenant)
    plane.make_adapter("other", "rival", seed=9)
    for step in scenario.prepare:
        step(plane)
    plane.close()
    return root


# The host and its children.


class CrashHost:
    """A context manager; `run` is one act in one child."""

    def __enter__(self) -> Self:
        environment = dict(os.environ, PYTHONPATH=importable_tests())
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)

    def run(self, scenario: str, root: Path, **job: Any) -> Run:
        """With `kill_at=N`, or `fail_at=N` and `code`, or `watch`. The child opens the store, and does not sweep it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(
            json.dumps({"scenario": scenario, "root": str(root), **job}), file=self._process.stdin, flush=True
        )
        status = int(self._process.stdout.readline())
        told = root / "told.json"
        answer = json.loads(told.read_text()) if told.exists() else {"statuses": [], "points": [], "seen": []}
        points = [Point(FaultPoint(step), path, to) for step, path, to in answer["points"]]
        return Run(status, answer["statuses"], points, [Seen(*seen) for seen in answer["seen"]])


@dataclass(frozen=True)
class Run:
    """`status` is the child's, negative for a signal; what it told is there only if it lived. `seen` are its points
    and what it did to files, in order, where it was watched."""

    status: int
    statuses: list[int]
    points: list[Point]
    seen: list[Seen]


def _child(job: dict[str, Any]) -> None:
    fault: Recorder | Witness = Recorder()
    if "kill_at" in job:
        fault = KillAt(job["kill_at"])
    elif "fail_at" in job:
        fault = FailAt(job["fail_at"], job["code"])
    elif "watch" in job:
        fault = Witness(Path(job["root"]) / "artifacts")
    root = Path(job["root"])
    (root / "told.json").unlink(missing_ok=True)
    plane = AdminPlane(root, fault=fault)
    statuses = SCENARIOS[job["scenario"]].act(plane)
    points = [(point.step, point.path, point.to) for point in fault.points]
    seen = (
        [(seen.what, seen.path, seen.announced) for seen in fault.seen] if isinstance(fault, Witness) else []
    )
    (root / "told.json").write_text(json.dumps({"statuses": statuses, "points": points, "seen": seen}))


def _act_once() -> None:
    """What is imported and prepared at the first request is there in each child that is forked afterwards."""
    with tempfile.TemporaryDirectory(prefix="loraplex-crash-") as root:
        for name in ("first", "archive", "delete"):
            plane = AdminPlane(prepared(SCENARIOS[name], Path(root, name)))
            SCENARIOS[name].act(plane)
            plane.start()
            plane.close()


def _host() -> None:
    warm_up()
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        _act_once()
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # its log would stand between the answers
                _child(json.loads(line))
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    _host()
