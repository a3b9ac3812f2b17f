"""Writes the settings of `loraplex serve` into the schema of the chart's values.

    python tools/chart_settings.py

`properties.settings` of `charts/loraplex/values.schema.json` is made from `Settings`; the rest of that file is written
by hand. A test compares the two.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo

from loraplex.app.setting_types import parse_size, parse_size_or_auto
from loraplex.app.settings import SECRET_SETTINGS, Settings

SCHEMA = Path(__file__).resolve().parents[1] / "charts/loraplex/values.schema.json"
SIZE = r"^\s*[0-9]+(\.[0-9]+)?\s*([kKmMgG]?[bB]|[kKmMgG]([iI][bB])?)?\s*$"
"""What `parse_size` reads."""
WIDTH = 150
REQUIRED = ("model", "host", "port", "admin_host", "admin_port", "data_dir", "drain_grace", "drain_timeout")
"""Those that templates read: the chart's values have a default for each."""
CHART_RULES: dict[str, dict[str, Any]] = {
    # With 0 the server takes a free port, which no Service knows. Ports below 1024 may need a capability.
    "port": {"minimum": 1024},
    "admin_port": {"minimum": 1024},
    # The volume is mounted at its parent.
    "data_dir": {"pattern": "^(/[A-Za-z0-9._-]+){2,}$"},
}
"""What a pod needs beyond the product's own rules."""


def settings_schema() -> dict[str, Any]:
    """The schema of the values' map `settings`. Secrets are not in it, and so are refused."""
    made = Settings.model_json_schema()["properties"]
    return {
        "description": "Made by tools/chart_settings.py from the product's settings",
        "type": "object",
        "additionalProperties": False,
        "required": list(REQUIRED),
        "properties": {
            name: _one(field, made[name]) | CHART_RULES.get(name, {})
            for name, field in Settings.model_fields.items()
            if name not in SECRET_SETTINGS
        },
    }


def _one(field: FieldInfo, made: dict[str, Any]) -> dict[str, Any]:
    rule = {key: value for key, value in made.items() if key not in ("title", "default", "format")}
    readers = {getattr(part, "func", None) for part in field.metadata}
    if not readers.isdisjoint({parse_size, parse_size_or_auto}):
        described = {"description": rule.pop("description")}
        rules = rule.get("anyOf", [rule])
        return {**described, "anyOf": [*rules, {"type": "string", "pattern": SIZE}]}
    return rule


def with_settings(schema: dict[str, Any]) -> str:
    """The text of the file, with the settings as they are now."""
    schema["properties"]["settings"] = settings_schema()
    return _json(schema) + "\n"


def _json(value: Any, indent: str = "", before: int = 0) -> str:
    """JSON with what fits into a line on one; `before` characters stand before it there."""
    line = json.dumps(value, ensure_ascii=False)
    parts = [*value.values()] if isinstance(value, dict) else value if isinstance(value, list) else []
    if len(indent) + before + len(line) < WIDTH or not any(isinstance(part, dict | list) for part in parts):
        return line
    inner = indent + "  "
    if isinstance(value, dict):
        heads = [f"{json.dumps(key)}: " for key in value]
        parts = [
            head + _json(part, inner, len(head)) for head, part in zip(heads, value.values(), strict=True)
        ]
    else:
        parts = [_json(part, inner) for part in value]
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    return opening + "\n" + ",\n".join(inner + part for part in parts) + "\n" + indent + closing


def main() -> int:
    SCHEMA.write_text(with_settings(json.loads(SCHEMA.read_text("utf-8"))), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
