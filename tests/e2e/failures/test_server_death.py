"""kill -9 of the server: what it had promised is there afterwards, and nothing else."""

from __future__ import annotations

import contextlib
import json
import socket
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import update

from loraplex.adapters.store.fault_points import FaultPoint
from loraplex.control.db.batch_tables import BatchPart
from loraplex.control.db.database import Database, utc_now
from support.control.integrity import check_integrity
from support.http import multipart
from support.servers.live_server import (
    ADAPTER_FILES,
    TINY_TORCH,
    LiveServer,
    Shop,
    checked,
    importable_tests,
    sse_events,
    wait_gone,
    write_tiny_adapter,
)

pytestmark = pytest.mark.slow

BIG = 8 << 20


@pytest.fixture(scope="module")
def served(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LiveServer, str]]:
    """One for all: each test starts it again."""
    folder = tmp_path_factory.mktemp("served")
    with LiveServer(tiny_model, folder / "data", **TINY_TORCH) as server:
        server.create_tenant("acme")
        server.upload("acme", "early", write_tiny_adapter(folder / "early", seed=1))
        yield server, server.create_key("acme")


@contextlib.contextmanager
def slow_upload(server: LiveServer, name: str, length: int) -> Iterator[socket.socket]:
    """The head of an upload whose body will have `length` bytes, on a raw connection."""
    with socket.create_connection(("127.0.0.1", server.admin_port), timeout=60) as sock:
        head = (
            f"POST /admin/v1/tenants/acme/adapters/{name}/versions HTTP/1.1\r\nHost: localhost\r\n"
            f"Authorization: Bearer {server.admin_token}\r\nContent-Type: {multipart.CONTENT_TYPE}\r\n"
            f"Content-Length: {length}\r\n\r\n"
        )
        sock.sendall(head.encode())
        yield sock


def staged(server: LiveServer) -> list[Path]:
    return list((server.data_dir / "artifacts" / "staging").iterdir())


def staged_bytes(server: LiveServer) -> int:
    return sum(file.stat().st_size for folder in staged(server) for file in folder.glob("*"))


def stored(server: LiveServer) -> set[str]:
    return {folder.name for folder in (server.data_dir / "artifacts" / "sha256").glob("*/*")}


def adapters(server: LiveServer) -> dict[str, Any]:
    return {row["name"]: row for row in checked(server.admin.get("tenants/acme/adapters"))["data"]}


def versions(server: LiveServer, name: str) -> list[dict[str, Any]]:
    return list(checked(server.admin.get(f"tenants/acme/adapters/{name}/versions"))["data"])


def say(server: LiveServer, key: str, model: str) -> str:
    body = {"model": model, "prompt": "one", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    with server.client(key) as client:
        return str(checked(client.post("/v1/completions", json=body))["choices"][0]["text"])


def upload_body(folder: Path) -> bytes:
    return multipart.files(*((folder / part).read_bytes() for part in ADAPTER_FILES))


def test_an_upload_that_was_under_way_leaves_nothing(served: tuple[LiveServer, str], tmp_path: Path) -> None:
    """Killed with a large part half written, and with a whole upload that lacks its last byte."""
    server, key = served
    before = {model: say(server, key, model) for model in ("early", "tiny")}
    held = stored(server)
    late = write_tiny_adapter(tmp_path / "late", seed=2)
    large = multipart.files((late / "adapter_config.json").read_bytes(), bytes(BIG))
    whole = upload_body(late)
    with (
        slow_upload(server, "half", len(large)) as first,
        slow_upload(server, "almost", len(whole)) as second,
    ):
        for piece in multipart.in_pieces(large[: BIG // 2], 64 << 10):
            first.sendall(piece)
        second.sendall(whole[:-1])
        server.wait(lambda: len(staged(server)) == 2 and staged_bytes(server) > BIG // 4)
        server.kill()
    assert staged_bytes(server) > BIG // 4  # the kill left something to sweep

    server.start()
    assert staged(server) == []
    (swept,) = server.logged("store_swept")
    assert swept["staging"] == 2
    assert swept["bytes"] > BIG // 4
    assert set(adapters(server)) == {"early"}
    assert stored(server) == held
    assert {model: say(server, key, model) for model in before} == before
    with server.client(key) as client:
        for name in ("half", "almost"):
            answer = client.post("/v1/completions", json={"model": name, "prompt": "a"})
            assert answer.status_code == 404
    assert server.upload("acme", "almost", tmp_path / "late")["version"] == "v1"
    assert say(server, key, "almost") != before["tiny"]


def test_a_version_that_was_answered_for_is_there(served: tuple[LiveServer, str], tmp_path: Path) -> None:
    """Killed right after each 201, and with whole uploads in flight that nobody answered: those are there whole or
    not at all."""
    server, key = served
    there = set(adapters(server))
    promised = {}
    for number in range(3):
        folder = write_tiny_adapter(tmp_path / f"p{number}", seed=10 + number)
        promised[f"p{number}"] = server.upload("acme", f"p{number}", folder)["digest"]
    second = server.upload("acme", "early", write_tiny_adapter(tmp_path / "early2", seed=20))
    assert second["version"] == "v2"
    with contextlib.ExitStack() as stack:
        for number in range(4):
            body = upload_body(write_tiny_adapter(tmp_path / f"q{number}", seed=30 + number))
            sock = stack.enter_context(slow_upload(server, f"q{number}", len(body)))
            sock.sendall(body)
        server.kill()

    server.start()
    assert staged(server) == []
    found = adapters(server)
    assert {*there, *promised} <= set(found) <= {*there, *promised, *(f"q{n}" for n in range(4))}
    answers = set()
    digests = set()
    # Those that were killed before their numbers were checked are checked now.
    server.wait(lambda: {v["state"] for name in found for v in versions(server, name)} == {"ready"})
    for name in found:
        for version in versions(server, name):
            digests.add(version["digest"].removeprefix("sha256:"))
            answers.add(say(server, key, f"{name}@{version['version']}"))
    assert {digest.removeprefix("sha256:") for digest in promised.values()} <= digests
    assert stored(server) == digests
    assert len(answers) == len(digests)
    # A second version takes no traffic by the crash.
    assert say(server, key, "early") == say(server, key, "early@v1") != say(server, key, "early@v2")
    for number in range(4):  # the same upload again is the version that is there, or the first one
        assert server.upload("acme", f"q{number}", tmp_path / f"q{number}")["version"] == "v1"


def test_the_engine_goes_with_the_server_and_streams_break_off(served: tuple[LiveServer, str]) -> None:
    server, key = served
    engine = server.engine_pid()
    assert engine is not None
    body = {"model": "early", "prompt": "one", "max_tokens": 100_000, "stream": True, "ignore_eos": True}
    with server.client(key) as client, client.stream("POST", "/v1/completions", json=body) as answer:
        events = sse_events(answer.iter_lines())
        next(events)
        server.process.kill()
        with pytest.raises(Exception, match=r"(?i)closed|reset|incomplete|disconnect"):
            list(events)
    server.wait_exit()
    wait_gone(engine)
    server.start()
    assert say(server, key, "early")


def end_leases(server: LiveServer) -> None:
    """As if a minute had passed."""
    database = Database(f"sqlite:///{server.data_dir / 'loraplex.db'}")
    try:
        with database.write() as session:
            session.execute(update(BatchPart).values(until=utc_now() - timedelta(seconds=1)))
    finally:
        database.close()


def test_the_lines_of_a_killed_server_are_answered_by_the_next(served: tuple[LiveServer, str]) -> None:
    """Its lease ends, and the lines without an answer are taken: none is lost, and none is there twice."""
    server, key = served
    path, count = "/v1/completions", 300
    body = {"model": "early", "prompt": "one", "max_tokens": 200, "ignore_eos": True}
    lines = [
        json.dumps({"custom_id": f"r{number}", "method": "POST", "url": path, "body": body})
        for number in range(count)
    ]
    with Shop(server, key).openai() as client:
        file = client.files.create(file=("in.jsonl", "\n".join(lines).encode()), purpose="batch")
        made = client.batches.create(input_file_id=file.id, endpoint=path, completion_window="24h")

        def counts() -> int:
            found = client.batches.retrieve(made.id).request_counts
            assert found is not None
            return found.completed

        server.wait(lambda: counts() > 10)
        server.kill()
    server.start()
    with Shop(server, key).openai() as client:
        assert 10 < counts() < count, "it was killed in the middle"
        assert client.batches.retrieve(made.id).status == "in_progress"
        end_leases(server)
        server.wait(lambda: client.batches.retrieve(made.id).status == "completed", 180)
        done = client.batches.retrieve(made.id)
        assert (counts(), done.error_file_id) == (count, None)
        written = client.files.content(done.output_file_id or "").text.splitlines()
        assert [json.loads(line)["custom_id"] for line in written] == [
            f"r{number}" for number in range(count)
        ]


UPLOAD_STEPS = (
    FaultPoint.STAGE,
    FaultPoint.RECEIVE_CREATE,
    FaultPoint.RECEIVE_WRITE,
    FaultPoint.FLUSH_STAGED,
    FaultPoint.FLUSH_FILE,
    FaultPoint.FLUSH_FOLDER,
    FaultPoint.FLUSH_SHELVES,
    FaultPoint.PUBLISH,
    FaultPoint.FLUSH_SHELF,
    FaultPoint.COMMIT_VERSION,
    FaultPoint.VERSION_COMMITTED,
    FaultPoint.COMMIT_CHECK,
    FaultPoint.CHECK_COMMITTED,
)
ADMITTED_STEPS = {FaultPoint.VERSION_COMMITTED, FaultPoint.COMMIT_CHECK, FaultPoint.CHECK_COMMITTED}
REMOVAL_STEPS = (
    FaultPoint.COMMIT_REMOVAL,
    FaultPoint.REMOVAL_COMMITTED,
    FaultPoint.RETIRE,
    FaultPoint.FLUSH_RETIRED,
    FaultPoint.PURGE,
)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_the_real_server_killed_at_the_named_steps(tiny_model: Path, tmp_path: Path) -> None:
    """The same server dies once at each step of an upload and of a deletion; after each start it answers as before."""
    server = LiveServer(tiny_model, tmp_path / "data", **TINY_TORCH)
    plain, armed = list(server.command), tmp_path / "armed"
    script = Path(__file__).parents[2] / "support" / "faults" / "dying_serve.py"
    server.environment["PYTHONPATH"] = importable_tests()
    kept = write_tiny_adapter(tmp_path / "kept", seed=1)

    def check(answer: str) -> None:
        database = Database(f"sqlite:///{server.data_dir / 'loraplex.db'}")
        check_integrity(database, server.data_dir / "artifacts")
        database.close()
        assert say(server, key, "kept") == answer

    with server:
        server.create_tenant("acme")
        key = server.create_key("acme")
        server.upload("acme", "kept", kept)
        answer = say(server, key, "kept")
        for number, step in enumerate((*UPLOAD_STEPS, *REMOVAL_STEPS)):
            name = f"n{number}"
            folder = write_tiny_adapter(tmp_path / name, seed=100 + number)
            removes = step in REMOVAL_STEPS
            if removes:
                server.upload("acme", name, folder)
            assert server.stop() == 0
            server.command[:] = [
                sys.executable,
                str(script),
                str(step),
                str(armed),
                *plain[plain.index("serve") :],
            ]
            server.start()
            armed.touch()
            with pytest.raises(httpx.TransportError):
                if removes:
                    server.admin.delete(f"tenants/acme/adapters/{name}")
                else:
                    server.upload("acme", name, folder)
            server.wait_exit()
            assert not armed.exists(), f"nothing died at {step}"
            server.command[:] = plain
            server.start()
            check(answer)
            there = name in adapters(server)
            if not removes:
                assert there == (step in ADMITTED_STEPS)
            assert server.upload("acme", name, folder)["state"] == "ready"
            say(server, key, name)
            check(answer)
    print(f"{len(UPLOAD_STEPS) + len(REMOVAL_STEPS)} deaths at named steps; nothing lost, nothing left")
