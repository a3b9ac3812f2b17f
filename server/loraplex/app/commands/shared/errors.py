"""The error of a command, and its one line on stderr."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer
from typer.core import TyperGroup

from loraplex.adapters.errors import LoraplexError
from loraplex.app.output import Output, printable


class CommandFailed(LoraplexError):
    """A command could not do what it was asked; the message says why and what to do. `details` are further lines,
    `body` the server's own answer for --json."""

    code = "command_failed"

    def __init__(self, message: str, *, details: tuple[str, ...] = (), body: Any = None) -> None:
        super().__init__(message)
        self.details = details
        self.body = body


class WrongUsage(typer.BadParameter):
    """An option is missing, or does not go with another; the message says which."""

    def format_message(self) -> str:
        return self.message


class CommandGroup(TyperGroup):
    """The program's root: turns wrong usage into one line on stderr and exit code 2, our errors into one line and exit
    code 1; bugs keep their traceback."""

    def make_context(self, *args: Any, **options: Any) -> Any:
        try:
            return super().make_context(*args, **options)
        except typer.TyperException as error:
            raise _wrong_usage(error) from None

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except typer.TyperException as error:
            raise _wrong_usage(error) from None
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


def _wrong_usage(error: typer.TyperException) -> Exception:
    """The exit to raise once the error is reported."""
    if type(error).__name__ == "NoArgsIsHelpError":  # no public class; the help is the report
        typer.echo(error.format_message(), nl=bool(error.format_message()))
    else:
        command = getattr(getattr(error, "ctx", None), "command_path", "loraplex")
        message = " ".join(error.format_message().split()).rstrip(".").replace(": Value error, ", ": ")
        typer.echo(f"loraplex: {printable(message)}; see '{command} --help'.", err=True)
    return typer.Exit(error.exit_code)


@contextmanager
def json_failures(out: Output) -> Iterator[None]:
    """With --json a failure is JSON on stdout, beside its line on stderr: what the server answered, where it did."""
    try:
        yield
    except LoraplexError as error:
        if out.as_json:
            answer = getattr(error, "body", None)
            code = answer.get("code") if isinstance(answer, dict) else None
            shown = {"code": code or error.code, "message": error.message}
            out.json({"error": shown if answer is None else shown | {"answer": answer}})
        raise
