"""The `loraplex` program. Each group of commands lives in `loraplex.app.commands`."""

from __future__ import annotations

import typer

from loraplex.app.commands.adapter import create_adapter_commands
from loraplex.app.commands.audit import create_audit_commands
from loraplex.app.commands.bench import bench
from loraplex.app.commands.chat import chat
from loraplex.app.commands.errors import CommandGroup
from loraplex.app.commands.key import create_key_commands
from loraplex.app.commands.options import admin_command
from loraplex.app.commands.release import create_release_commands
from loraplex.app.commands.tenant import create_tenant_commands
from loraplex.app.commands.usage import usage


def create_cli() -> typer.Typer:
    """The whole program. Exit codes: 0 done, 1 failed (one line on stderr says why), 2 wrong usage."""
    from loraplex.app.server_commands import register_server_commands

    app = typer.Typer(
        name="loraplex",
        cls=CommandGroup,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        help="Serve many tenants' LoRA adapters from one base model.",
    )
    register_server_commands(app)
    app.command("chat")(chat)
    app.command("bench")(bench)
    app.add_typer(create_tenant_commands(), name="tenant")
    app.add_typer(create_key_commands(), name="key")
    app.add_typer(create_adapter_commands(), name="adapter")
    app.add_typer(create_release_commands(), name="release")
    app.add_typer(create_audit_commands(), name="audit")
    app.command("usage", help="Sum up what was used.")(admin_command(usage))
    return app


def main() -> None:
    """The entry point of the `loraplex` script."""
    create_cli()()


if __name__ == "__main__":
    main()
