"""Asking before something is destroyed."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask")]


def confirm(question: str, yes: bool) -> None:
    """Ask for confirmation at a terminal; "no" ends the command. A script is not asked."""
    if not yes and sys.stdin.isatty():
        typer.confirm(question, abort=True)
