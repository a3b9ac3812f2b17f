"""The schema of log lines, docs/log-line.schema.json."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jsonschema_rs

SCHEMA_FILE = Path(__file__).resolve().parents[3] / "docs/log-line.schema.json"


def log_schema() -> dict[str, Any]:
    return json.loads(SCHEMA_FILE.read_text("utf-8"))


def check_lines(lines: Iterable[str]) -> list[dict[str, Any]]:
    """The lines as objects. Fails for the first that is no JSON, or not by the schema."""
    validator = jsonschema_rs.validator_for(log_schema())
    found = []
    for line in lines:
        try:
            entry = json.loads(line)
        except ValueError:
            raise AssertionError(f"not JSON: {line[:500]}") from None
        problems = [f"{error.instance_path}: {error.message[:300]}" for error in validator.iter_errors(entry)]
        assert not problems, f"{line[:500]}\n{problems}"
        found.append(entry)
    return found
