"""The command line's admin commands against a running admin plane."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from structlog.testing import capture_logs
from typer.testing import CliRunner, Result

from loraplex.app.cli import create_cli
from support.adapters.drafts import make_adapter
from support.http.admin_plane import ADMIN_TOKEN, ARCH, AdminPlane
from support.http.api_server import RunningServer, serve_app


@dataclass
class Shell:
    """Runs `loraplex` commands against one server."""

    plane: AdminPlane
    server: RunningServer
    root: Path

    def run(self, *args: str, token: str | None = ADMIN_TOKEN, url: str | None = None) -> Result:
        environment = {"LORAPLEX_ADMIN_URL": url or self.server.url, "COLUMNS": "200"}
        if token is not None:
            environment["LORAPLEX_ADMIN_TOKEN"] = token
        return CliRunner().invoke(create_cli(), list(args), env=environment)

    def ok(self, *args: str, **options: Any) -> str:
        result = self.run(*args, **options)
        assert result.exit_code == 0, result.output
        return result.stdout

    def json(self, *args: str, **options: Any) -> Any:
        return json.loads(self.ok(*args, "--json", **options))

    def fails(self, *args: str, **options: Any) -> str:
        """What it says on stderr; exit code 1, nothing on stdout, no traceback."""
        result = self.run(*args, **options)
        assert result.exit_code == 1, result.output
        assert result.stdout == ""
        assert result.stderr.startswith("loraplex: ")
        assert "Traceback" not in result.stderr
        return result.stderr

    def adapter(self, name: str = "a", **options: Any) -> str:
        make_adapter(self.root / name, ARCH, **options)
        return str(self.root / name)


@contextmanager
def shell_in(root: Path, **options: Any) -> Iterator[Shell]:
    """A server with an admin plane in `root`. It shares this process: its log lines must not land in what a command
    prints. `options` are of `AdminPlane`."""
    plane = AdminPlane(root, **options)
    with capture_logs(), serve_app(plane.app) as server:
        yield Shell(plane, server, root)
    plane.close()
