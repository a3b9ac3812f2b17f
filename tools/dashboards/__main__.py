"""Writes the dashboards. A test compares them with the committed files."""

from __future__ import annotations

from pathlib import Path

from tools.dashboards.boards import BOARDS
from tools.dashboards.grafana import to_json

FOLDER = Path(__file__).resolve().parents[2] / "charts/loraplex/dashboards"

if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for board in BOARDS:
        (FOLDER / f"{board.uid}.json").write_text(to_json(board), "utf-8")
