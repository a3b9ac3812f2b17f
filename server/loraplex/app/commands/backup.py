"""`loraplex backup`."""

from __future__ import annotations

import sys
from pathlib import Path

from loraplex.app.backup.run import make_backup
from loraplex.app.commands.output import Output, size
from loraplex.app.settings import Settings


def backup(settings: Settings, directory: Path, *, as_json: bool) -> None:
    """Raises LoraplexError."""

    def on_stage(stage: str) -> None:
        if sys.stderr.isatty():
            print(f"copying: {stage}", file=sys.stderr)

    out = Output(as_json)
    manifest = make_backup(settings, directory, on_stage=on_stage)
    if as_json:
        out.json(manifest)
        return
    database, artifacts, secrets = manifest["database"], manifest["artifacts"], manifest["secrets"]
    out.line(f"{database['file']}: {database['server']}, schema {database['schema']}")
    out.line(f"artifacts: {artifacts['count']} ({size(artifacts['bytes'])})")
    if artifacts["corrupt"]:
        out.line(f"  without {len(artifacts['corrupt'])} that the server knows to be corrupt")
    for name, place in secrets.items():
        if place != name:
            out.line(f"{name} is not in it: restore with the server's own --{name}")
    held = [name for name, place in secrets.items() if place == name]
    out.line(
        f"{directory} is complete" + (f". It holds {' and '.join(held)}: keep it secret." if held else ".")
    )
