"""`loraplex engine`: one engine that dials a server."""

from __future__ import annotations

from typing import Any

import typer

from loraplex.app.commands.server import with_settings
from loraplex.app.setting_groups import ENGINE_SETTINGS
from loraplex.app.settings import Settings
from loraplex.app.supported_platform import require_supported_platform
from loraplex.engine.ipc.quick_imports import quick_imports


def create_engine_command() -> Any:
    return with_settings(
        _engine,
        only=ENGINE_SETTINGS,
        join=typer.Option(..., "--join", metavar="<host:port>", help="The server's --engine-port"),
        replica=typer.Option(
            None, "--replica", metavar="<name>", help="Its name at the server (default: this machine's)"
        ),
    )


def _engine(settings: Settings, *, join: str, replica: str | None) -> None:
    require_supported_platform()
    with quick_imports():
        from loraplex.app.engines.process import run_engine

    raise typer.Exit(run_engine(settings, join, replica))
