"""What a command raises, and where it becomes one line on stderr."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

from loraplex.adapters.errors import LoraplexError
from loraplex.app.commands.output import printable


class CommandFailed(LoraplexError):
    """A command could not do what it was asked; the message says why and what to do. `details` are further lines,
    `body` the server's own answer for --json."""

    code = "command_failed"

    def __init__(self, message: str, *, details: tuple[str, ...] = (), body: Any = None) -> None:
        super().__init__(message)
        self.details = details
        self.body = body


class CommandGroup(TyperGroup):
    """The program's root: turns our errors into one line on stderr and exit code 1; bugs keep their traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except LoraplexError as error:
            typer.echo(f"loraplex: {printable(error.message)}", err=True)
            for line in getattr(error, "details", ()):
                typer.echo(f"  {printable(line)}", err=True)
            raise typer.Exit(1) from None
        except UnicodeEncodeError as error:
            if error.reason != "surrogates not allowed":  # a terminal that can't show what is printed
                raise
            typer.echo("loraplex: what was given is not UTF-8; is the terminal's encoding another?", err=True)
            raise typer.Exit(1) from None
