"""`loraplex batch`: submit, status, wait, cancel and results, against routes of OpenAI's shapes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from typer.testing import CliRunner

from loraplex.app.cli import create_cli
from loraplex.app.commands import batch as command
from support.http.api_server import RunningServer, serve_app

KEY = "lpx_test_key"
LINE = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "m"}}


class FakeBatches:
    """Files and batches; each look at a batch brings it a line further, up to `end`."""

    def __init__(self) -> None:
        self.uploaded: list[tuple[str, str, bytes]] = []
        self.created: list[dict[str, Any]] = []
        self.deleted: list[str] = []
        self.away: set[int] = set()
        self.end = "completed"
        self.looks = 0

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/v1/files", self._upload, methods=["POST"]),
                Route("/v1/files/{id}", self._delete, methods=["DELETE"]),
                Route("/v1/files/{id}/content", self._content),
                Route("/v1/batches", self._create, methods=["POST"]),
                Route("/v1/batches/{id}", self._get),
                Route("/v1/batches/{id}/cancel", self._cancel, methods=["POST"]),
            ]
        )

    async def _upload(self, request: Request) -> Response:
        if request.headers["authorization"] != f"Bearer {KEY}":
            error = {"message": "No such key.", "code": "invalid_api_key", "type": "x", "param": None}
            return JSONResponse({"error": error}, 401)
        body = await request.body()
        self.uploaded.append(
            (request.headers["content-type"].split(";")[0], body.split(b'"')[1].decode(), body)
        )
        return JSONResponse({"id": "file-1", "object": "file"})

    async def _create(self, request: Request) -> Response:
        self.created.append(await request.json())
        if self.created[-1]["endpoint"] == "/v1/nothing":
            error = {"message": "No such route.", "code": "invalid_value", "type": "x", "param": None}
            return JSONResponse({"error": error}, 400)
        return JSONResponse(self._batch("validating", 0))

    async def _get(self, request: Request) -> Response:
        if request.path_params["id"] != "batch_1":
            error = {"message": "No batch.", "code": "batch_not_found", "type": "x", "param": None}
            return JSONResponse({"error": error}, 404)
        self.looks += 1
        if self.looks in self.away:
            error = {"message": "The server drains.", "code": "draining", "type": "x", "param": None}
            return JSONResponse({"error": error}, 503)
        done = self.looks >= 3
        return JSONResponse(self._batch(self.end if done else "in_progress", min(self.looks, 3)))

    async def _delete(self, request: Request) -> Response:
        self.deleted.append(request.path_params["id"])
        return JSONResponse({})

    async def _cancel(self, request: Request) -> Response:
        return JSONResponse(self._batch("cancelling", 1))

    def _batch(self, status: str, count: int) -> dict[str, Any]:
        return {
            "id": "batch_1",
            "status": status,
            "endpoint": "/v1/chat/completions",
            "request_counts": {"total": 3, "completed": count, "failed": 0},
            "output_file_id": "file-2" if status == "completed" else None,
            "error_file_id": "file-3" if status == "failed" else None,
            "errors": {"data": [{"message": "line 2 is no JSON", "line": 2}]} if status == "failed" else None,
        }

    async def _content(self, request: Request) -> Response:
        return Response(b'{"custom_id": "a"}\n' * 3)


@pytest.fixture
def plane() -> FakeBatches:
    return FakeBatches()


@pytest.fixture
def server(plane: FakeBatches, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningServer]:
    monkeypatch.setattr(command, "LOOK_S", 0.0)
    with serve_app(plane.app()) as running:
        yield running


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    file = tmp_path / "night.jsonl"
    file.write_text(json.dumps(LINE) + "\n")
    return file


def run(server: RunningServer, *args: str, key: str = KEY) -> Any:
    environment = {"LORAPLEX_URL": server.url, "LORAPLEX_API_KEY": key}
    return CliRunner(env=environment).invoke(create_cli(), ["batch", *args])


def test_a_file_is_submitted_and_its_batch_is_printed_alone(
    server: RunningServer, plane: FakeBatches, lines: Path
) -> None:
    done = run(server, "submit", str(lines))
    assert (done.exit_code, done.stdout) == (0, "batch_1\n"), done.output
    ((kind, _, body),) = plane.uploaded
    assert kind == "multipart/form-data"
    assert b'name="purpose"\r\n\r\nbatch' in body
    assert lines.read_bytes() in body
    assert plane.created == [
        {"input_file_id": "file-1", "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    ]


def test_waiting_ends_with_the_batch(server: RunningServer, plane: FakeBatches, lines: Path) -> None:
    done = run(server, "submit", str(lines), "--wait", "--endpoint", "/v1/embeddings")
    assert done.exit_code == 0, done.output
    assert "3 of 3 answered, 0 failed" in done.stdout
    assert plane.created[0]["endpoint"] == "/v1/embeddings"
    assert json.loads(run(server, "wait", "batch_1", "--json").stdout)["status"] == "completed"


def test_waiting_outlasts_a_restart_of_the_server(server: RunningServer, plane: FakeBatches) -> None:
    plane.away = {2, 3}
    assert run(server, "wait", "batch_1").exit_code == 0
    plane.away, plane.looks = {1}, 0
    first = run(server, "wait", "batch_1")
    assert first.exit_code == 1, "nothing was seen of it before"
    assert "[draining]" in first.output


def test_a_batch_that_failed_says_why_and_is_a_failure(
    server: RunningServer, plane: FakeBatches, lines: Path
) -> None:
    plane.end = "failed"
    done = run(server, "wait", "batch_1")
    assert done.exit_code == 1
    assert "line 2 is no JSON" in done.stdout
    assert "batch results batch_1 --errors" in done.stderr
    assert run(server, "submit", str(lines), "--wait").exit_code == 1


def test_results_are_the_file_of_answers(server: RunningServer, plane: FakeBatches, tmp_path: Path) -> None:
    early = run(server, "results", "batch_1")
    assert early.exit_code == 1
    assert "batch batch_1 is in_progress: its files come when it has ended" in early.output
    plane.looks = 3
    assert run(server, "results", "batch_1").stdout == '{"custom_id": "a"}\n' * 3
    assert run(server, "results", "batch_1", "-o", str(tmp_path / "out")).exit_code == 0
    assert (tmp_path / "out").read_text().count("\n") == 3
    assert "no line has failed" in run(server, "results", "batch_1", "--errors").output


def test_status_shows_how_far_it_is(server: RunningServer) -> None:
    done = run(server, "status", "batch_1")
    assert "1 of 3 answered" in done.stdout
    assert "batch_not_found" in run(server, "status", "batch_2").output


def test_cancelling_shows_what_is_kept(server: RunningServer) -> None:
    done = run(server, "cancel", "batch_1")
    assert done.exit_code == 0, done.output
    assert "cancelling" in done.stdout
    assert "1 of 3 answered" in done.stdout


def test_a_file_whose_batch_is_refused_is_deleted(
    server: RunningServer, plane: FakeBatches, lines: Path
) -> None:
    done = run(server, "submit", str(lines), "--endpoint", "/v1/nothing")
    assert (done.exit_code, plane.deleted) == (1, ["file-1"])
    assert "No such route." in done.output


def test_what_is_wrong_is_said_in_a_line(server: RunningServer, lines: Path) -> None:
    assert (
        "[invalid_api_key] Give one that is valid with --api-key"
        in run(server, "submit", str(lines), key="no").output
    )
    lines.write_text("oh\n")
    assert "is no JSON" in run(server, "submit", str(lines)).output
    lines.write_text("\n")
    assert "is empty: each line is a request" in run(server, "submit", str(lines)).output
    lines.write_text('{"custom_id": "a"}\n')
    assert "has no 'url'" in run(server, "submit", str(lines)).output
