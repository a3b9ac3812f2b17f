"""`loraplex backup` and `loraplex restore`."""

from __future__ import annotations

import sys
from pathlib import Path

from loraplex.app.backup.restore import restore_backup
from loraplex.app.backup.run import make_backup
from loraplex.app.output import Output, size
from loraplex.app.settings import Settings


def backup(settings: Settings, directory: Path, *, as_json: bool) -> None:
    """Raises LoraplexError."""
    out = Output(as_json)
    manifest = make_backup(settings, directory, on_stage=_show_stage)
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


def restore(settings: Settings, directory: Path, *, as_json: bool) -> None:
    """Raises LoraplexError."""
    out = Output(as_json)
    done = restore_backup(settings, directory, on_stage=_show_stage)
    manifest, data_dir = done.manifest, settings.data_dir
    audit = manifest.database.audit
    anchor = None if audit is None else f"{audit.seq}:{audit.hash}"
    if as_json:
        out.json(
            {
                "backup": manifest.sha256,
                "made_at": manifest.made_at,
                "data_dir": str(data_dir),
                "database": done.database,
                "schema": manifest.database.schema_,
                "artifacts": manifest.artifacts.count,
                "audit_anchor": anchor,
                "notes": done.notes,
            }
        )
        return
    out.line(f"the backup of {manifest.made_at} by version {manifest.loraplex} is whole")
    out.line(f"database: {done.database}, schema {manifest.database.schema_}")
    out.line(f"artifacts: {manifest.artifacts.count} ({size(manifest.artifacts.bytes)})")
    if anchor is not None:
        out.line(f"audit log: anchor {anchor}")
    for note in done.notes:
        out.line(f"  {note}")
    out.line(f"{data_dir} is restored; next: 'loraplex audit verify', then start the server")


def _show_stage(stage: str) -> None:
    if sys.stderr.isatty():
        print(f"copying: {stage}", file=sys.stderr)
