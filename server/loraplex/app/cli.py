"""The `loraplex` program: the table of its commands, which live in `loraplex.app.commands` and are imported only when
they are asked for: a help page, a completion and `--version` wait for no library."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from loraplex.app.commands.shared.errors import CommandGroup
from loraplex.app.commands.shared.switches import SwitchCommand
from loraplex.engine.ipc.quick_imports import quick_imports


@dataclass(frozen=True, slots=True)
class _Command:
    """`load` returns the function of a command, or of a group the Typer that holds its commands."""

    help: str
    load: Callable[[], Any]
    is_group: bool = False


def create_cli(wanted: str | None = None) -> typer.Typer:
    """The program. Of the top-level commands only `wanted` is loaded, the others are there by name and help; None
    loads all. Exit codes: 0 done, 1 failed (one line on stderr says why), 2 wrong usage."""
    app = typer.Typer(
        name="loraplex",
        cls=CommandGroup,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        help="Serve many tenants' LoRA adapters from one base model.",
    )
    app.callback()(_root)
    for name, command in _commands().items():
        if wanted not in (None, name):
            app.command(name, help=command.help)(_not_loaded)
        elif command.is_group:
            app.add_typer(command.load(), name=name, help=command.help, no_args_is_help=True)
        else:
            app.command(name, cls=SwitchCommand, help=command.help)(command.load())
    return app


def main() -> None:
    """The entry point of the `loraplex` script."""
    with quick_imports():
        program = create_cli(wanted_command(sys.argv[1:], os.environ))
    program(prog_name="loraplex")


def wanted_command(arguments: Sequence[str], environment: Mapping[str, str]) -> str:
    """The top-level command of a command line, or of the one that a shell wants completed; "" where there is none
    yet."""
    if "_LORAPLEX_COMPLETE" in environment:
        line = environment.get("COMP_WORDS") or environment.get("_TYPER_COMPLETE_ARGS", "")
        arguments = line.split()[1:]
    return next((word for word in arguments if not word.startswith("-")), "")


def _show_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        typer.echo(f"loraplex {version('loraplex')}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit"),
    ] = False,
) -> None:
    pass


def _not_loaded() -> None:
    raise AssertionError("main() loads the command that is run")


def _commands() -> dict[str, _Command]:
    """In the order of the help page."""
    return {
        "quickstart": _Command("Fetch a small model, serve it, and ask it and its adapters.", _quickstart),
        "serve": _Command("Serve a base model and its tenants' adapters.", _serve),
        "engine": _Command("Run one engine that dials a server, here or on another machine.", _engine),
        "doctor": _Command("Check this machine, the settings and the data directory.", _doctor),
        "plan": _Command("Say what fits onto a device, how fast, and with which settings.", _plan),
        "migrate": _Command("Bring the database to this version's schema, as serve does.", _migrate),
        "backup": _Command("Copy what a server needs into a directory, while it serves.", _backup),
        "restore": _Command("Make an empty data directory and database from a backup.", _restore),
        "tenant": _Command("Create, list, show, change and delete tenants.", _tenant, is_group=True),
        "key": _Command("Create, list, change, rotate and revoke a tenant's API keys.", _key, is_group=True),
        "adapter": _Command("Upload, list, show, delete and pin adapters.", _adapter, is_group=True),
        "release": _Command("Say which versions of an adapter take its traffic.", _release, is_group=True),
        "batch": _Command("Submit files of requests, and fetch their answers.", _batch, is_group=True),
        "usage": _Command("Sum up the requests and tokens that were used.", _usage),
        "audit": _Command("Read the audit log, and check that nobody changed it.", _audit, is_group=True),
        "chat": _Command("Ask a model once, or hold a conversation at a terminal.", _chat),
    }


def _quickstart() -> Any:
    from loraplex.app.commands.server import quickstart

    return quickstart


def _serve() -> Any:
    from loraplex.app.commands.server import create_serve_command

    return create_serve_command()


def _engine() -> Any:
    from loraplex.app.commands.engine import create_engine_command

    return create_engine_command()


def _doctor() -> Any:
    from loraplex.app.commands.server import create_doctor_command

    return create_doctor_command()


def _plan() -> Any:
    from loraplex.app.commands.plan import plan

    return plan


def _migrate() -> Any:
    from loraplex.app.commands.server import create_migrate_command

    return create_migrate_command()


def _backup() -> Any:
    from loraplex.app.commands.server import create_backup_command

    return create_backup_command()


def _restore() -> Any:
    from loraplex.app.commands.server import create_restore_command

    return create_restore_command()


def _tenant() -> Any:
    from loraplex.app.commands.tenant import create_tenant_commands

    return create_tenant_commands()


def _key() -> Any:
    from loraplex.app.commands.key import create_key_commands

    return create_key_commands()


def _adapter() -> Any:
    from loraplex.app.commands.adapter import create_adapter_commands

    return create_adapter_commands()


def _release() -> Any:
    from loraplex.app.commands.release import create_release_commands

    return create_release_commands()


def _batch() -> Any:
    from loraplex.app.commands.batch import create_batch_commands

    return create_batch_commands()


def _usage() -> Any:
    from loraplex.app.commands.shared.options import admin_command
    from loraplex.app.commands.usage import usage

    return admin_command(usage, of_all_tenants=True)


def _audit() -> Any:
    from loraplex.app.commands.audit import create_audit_commands

    return create_audit_commands()


def _chat() -> Any:
    from loraplex.app.commands.chat import chat

    return chat


if __name__ == "__main__":
    main()
