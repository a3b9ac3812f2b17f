"""Options that are on or off: `--flag`, `--no-flag`, and `--flag true` or `false`, as a file or a variable has them."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperCommand


class SwitchCommand(TyperCommand):
    """A command whose options with a `--no-` form take a value too, as `--flag false` or `--flag=false`, and whose help
    has a section for each panel."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        forms = {
            param.opts[0]: {"true": param.opts[0], "false": param.secondary_opts[0]}
            for param in self.params
            if param.secondary_opts
        }
        return super().parse_args(ctx, _as_flags(args, forms))

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Options in a section for each panel, in the panels' order; those without one come last."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                sections.setdefault(getattr(param, "rich_help_panel", None) or "Options", []).append(record)
        for panel in sorted(sections, key=lambda panel: panel == "Options"):
            with formatter.section(panel):
                formatter.write_dl(sections[panel])


def _as_flags(args: list[str], forms: dict[str, dict[str, str]]) -> list[str]:
    """`args` with each value of an option in `forms` replaced by the flag that means it."""
    plain: list[str] = []
    position = 0
    while position < len(args):
        given = args[position]
        position += 1
        if given == "--":
            return [*plain, *args[position - 1 :]]
        option, equals, value = given.partition("=")
        if option not in forms:
            plain.append(given)
            continue
        if not equals and position < len(args) and args[position].lower() in forms[option]:
            value = args[position]
            position += 1
        elif equals and value.lower() not in forms[option]:
            raise typer.BadParameter(f"{option} is true or false, and not '{value}'.")
        plain.append(forms[option][value.lower() or "true"])
    return plain
