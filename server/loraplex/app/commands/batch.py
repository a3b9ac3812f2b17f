"""`loraplex batch`: many requests in one file, answered when nobody else asks."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from loraplex.app.commands.shared.client import decoded, http_client, refused, unreachable
from loraplex.app.commands.shared.errors import CommandFailed, json_failures
from loraplex.app.commands.shared.options import DEFAULT_URL, ApiKeyOption, JsonOption, UrlOption
from loraplex.app.commands.shared.paths import segment
from loraplex.app.output import Output

if TYPE_CHECKING:
    import httpx

LOOK_S = 2.0
"""Between two looks at a batch that is waited for."""
PATIENCE_S = 600.0
"""How long a batch is waited for while no server answers."""
MAX_FIRST_LINE = 4 << 20
"""Bytes of a line that a server takes."""
_ENDED = ("completed", "failed", "expired", "cancelled")

BatchId = Annotated[str, typer.Argument(metavar="ID", help="As submit printed it")]


def create_batch_commands() -> typer.Typer:
    app = typer.Typer(no_args_is_help=True, help="Submit files of requests, and fetch their answers.")
    app.command("submit", help="Upload a file of JSON lines, and have its requests answered.")(submit)
    app.command("status", help="Show a batch.")(status)
    app.command("wait", help="Wait until a batch has ended.")(wait)
    app.command("cancel", help="End a batch early; what is answered is kept.")(cancel)
    app.command("results", help="Write a batch's answers, a JSON line each.")(results)
    return app


def submit(
    file: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="A JSON line for each request")],
    api_key: ApiKeyOption,
    endpoint: Annotated[
        str | None, typer.Option(help="The route of all lines [default: the url of the first]")
    ] = None,
    waits: Annotated[bool, typer.Option("--wait", help="Wait until the batch has ended")] = False,
    url: UrlOption = DEFAULT_URL,
    as_json: JsonOption = False,
) -> None:
    with _batches(url, api_key, as_json) as (plane, out):
        endpoint = endpoint or _first_url(file)
        with file.open("rb") as content:
            sent = plane.call(
                "POST", "/v1/files", data={"purpose": "batch"}, files={"file": (file.name, content)}
            )
        asked = {"input_file_id": sent["id"], "endpoint": endpoint, "completion_window": "24h"}
        try:
            batch = plane.call("POST", "/v1/batches", json=asked)
        except CommandFailed:
            plane.call("DELETE", f"/v1/files/{segment(sent['id'])}")
            raise
        if waits:
            out.note(f"batch {batch['id']}")
            _wait(plane, out, batch["id"])
        else:
            out.done(batch, batch["id"])
            out.note(f"See 'loraplex batch wait {batch['id']}'.")


def status(
    batch_id: BatchId, api_key: ApiKeyOption, url: UrlOption = DEFAULT_URL, as_json: JsonOption = False
) -> None:
    with _batches(url, api_key, as_json) as (plane, out):
        _tell(out, plane.batch(batch_id))


def wait(
    batch_id: BatchId, api_key: ApiKeyOption, url: UrlOption = DEFAULT_URL, as_json: JsonOption = False
) -> None:
    """Exit code 1 where it did not complete."""
    with _batches(url, api_key, as_json) as (plane, out):
        _wait(plane, out, batch_id)


def cancel(
    batch_id: BatchId, api_key: ApiKeyOption, url: UrlOption = DEFAULT_URL, as_json: JsonOption = False
) -> None:
    with _batches(url, api_key, as_json) as (plane, out):
        _tell(out, plane.call("POST", f"/v1/batches/{segment(batch_id)}/cancel"))


def results(
    batch_id: BatchId,
    api_key: ApiKeyOption,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Into this file, not stdout")] = None,
    errors: Annotated[bool, typer.Option("--errors", help="The lines that failed instead")] = False,
    url: UrlOption = DEFAULT_URL,
) -> None:
    with _batches(url, api_key, False) as (plane, out):
        batch = plane.batch(batch_id)
        file_id = batch.get("error_file_id" if errors else "output_file_id")
        if file_id is None:
            if batch["status"] not in _ENDED:
                raise CommandFailed(
                    f"batch {batch_id} is {batch['status']}: its files come when it has ended. "
                    f"'loraplex batch wait {batch_id}' waits for that."
                )
            what = "no line has failed" if errors else "no line has an answer"
            raise CommandFailed(f"{what} in batch {batch_id}, which is {batch['status']}.")
        if output is None:
            plane.download(file_id, sys.stdout.buffer.write)
            sys.stdout.buffer.flush()
            return
        with output.open("wb") as target:
            plane.download(file_id, target.write)
        out.line(f"written to {output}")


class _Away(CommandFailed):
    """No server answers, or it cannot for now."""


class _Plane:
    """The data plane's routes of files and batches."""

    def __init__(self, client: httpx.Client, url: str) -> None:
        self._client = client
        self._url = url

    def call(self, method: str, path: str, **options: Any) -> Any:
        """Raises CommandFailed."""
        import httpx

        try:
            response = self._client.request(method, path, **options)
        except httpx.HTTPError as error:
            raise _Away(str(unreachable(self._url, error, "--url"))) from error
        body = decoded(response.url.host, response, "data plane")
        if response.is_success:
            return body
        failed = refused(response.status_code, body, "--api-key")
        raise _Away(str(failed), body=failed.body) if response.status_code == 503 else failed

    def batch(self, batch_id: str) -> Any:
        return self.call("GET", f"/v1/batches/{segment(batch_id)}")

    def download(self, file_id: str, write: Callable[[bytes], Any]) -> None:
        """Raises CommandFailed."""
        import httpx

        try:
            with self._client.stream("GET", f"/v1/files/{segment(file_id)}/content") as response:
                if not response.is_success:
                    response.read()
                    body = decoded(response.url.host, response, "data plane")
                    raise refused(response.status_code, body, "--api-key")
                for piece in response.iter_bytes():
                    write(piece)
        except httpx.HTTPError as error:
            raise unreachable(self._url, error, "--url") from error


@contextmanager
def _batches(url: str, api_key: str, as_json: bool) -> Iterator[tuple[_Plane, Output]]:
    out = Output(as_json)
    with json_failures(out), http_client(url, api_key) as client:
        yield _Plane(client, url), out


def _first_url(file: Path) -> str:
    with file.open("rb") as lines:
        first = lines.readline(MAX_FIRST_LINE)
    if not first.strip():
        raise CommandFailed(f"the first line of {file} is empty: each line is a request as JSON.")
    try:
        asked = json.loads(first)
    except ValueError as error:
        raise CommandFailed(f"the first line of {file} is no JSON: {error}.") from error
    url = asked.get("url") if isinstance(asked, dict) else None
    if not isinstance(url, str):
        raise CommandFailed(f"the first line of {file} has no 'url', such as /v1/chat/completions.")
    return url


def _counts(batch: Any) -> tuple[int, int, int]:
    counts = batch.get("request_counts") or {}
    return counts.get("total", 0), counts.get("completed", 0), counts.get("failed", 0)


def _until_ended(plane: _Plane, out: Output, batch_id: str) -> Any:
    """The batch when it has ended; a bar on stderr shows how far it is, at a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=out.as_json or not console.is_terminal) as bar:
        task = bar.add_task(batch_id, total=None)
        seen = -math.inf
        while True:
            try:
                batch = plane.batch(batch_id)
            except _Away:
                if time.monotonic() - seen > PATIENCE_S:
                    raise
                bar.update(task, description="no server answers")
                time.sleep(LOOK_S)
                continue
            seen = time.monotonic()
            total, completed, failed = _counts(batch)
            bar.update(task, description=batch["status"], total=total or None, completed=completed + failed)
            if batch["status"] in _ENDED:
                return batch
            time.sleep(LOOK_S)


def _wait(plane: _Plane, out: Output, batch_id: str) -> None:
    _tell(out, batch := _until_ended(plane, out, batch_id))
    if batch.get("error_file_id") and not out.as_json:
        out.note(f"See 'loraplex batch results {batch_id} --errors'.")
    if batch["status"] != "completed":
        raise typer.Exit(1)


def _tell(out: Output, batch: Any) -> None:
    total, completed, failed = _counts(batch)
    found = (batch.get("errors") or {}).get("data") or ()
    lines = f"{completed} of {total} answered, {failed} failed"
    if out.as_json:
        out.json(batch)
        return
    out.fields(
        {
            "batch": batch["id"],
            "status": batch["status"],
            "endpoint": batch["endpoint"],
            "lines": lines,
            "answers": batch.get("output_file_id"),
            "failures": batch.get("error_file_id"),
            **({"why": [error.get("message") for error in found]} if found else {}),
        }
    )
