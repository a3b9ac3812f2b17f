"""Clients that others wrote, as they are shipped, and vLLM's own tests of its entrypoints, against `loraplex serve`.

    make clients
    PYTHONPATH=tests python -m clients.outside run [guidellm] [lm_eval] [vllm] [--tests PATTERN …] [--out FILE.json]
    PYTHONPATH=tests python -m clients.outside table FILE.json [--before FILE.json]

`run` takes about 25 minutes on two cores and keeps what it fetched in --work, outside of the repository. Results are
added to what FILE.json has already. `table` prints the tables of docs/compatibility.md.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from pathlib import Path
from typing import Any

from clients.outside import benchmark_clients, tables, vllm_source, vllm_tests
from loraplex.app.base_model.source import model_cache_dir

PARTS = ("guidellm", "lm_eval", "vllm")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    run = commands.add_parser("run", help="run them and keep the results")
    run.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all")
    run.add_argument("--tests", nargs="+", default=[], metavar="PATTERN", help="of vLLM's test files; all")
    run.add_argument(
        "--work", type=Path, default=model_cache_dir().parent / "outside", help="what is fetched"
    )
    run.add_argument("--out", type=Path, default=Path("build/outside.json"))
    run.set_defaults(command=_run)
    table = commands.add_parser("table", help="print the tables")
    table.add_argument("results", type=Path)
    table.add_argument("--before", type=Path, help="results of an earlier commit")
    table.set_defaults(command=_table)
    arguments = parser.parse_args()
    arguments.command(arguments)


def _run(arguments: argparse.Namespace) -> None:
    unknown = set(arguments.parts) - set(PARTS)
    if unknown:
        raise SystemExit(f"No such part: {', '.join(sorted(unknown))}. There are {', '.join(PARTS)}.")
    parts = arguments.parts or PARTS
    arguments.work.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    results["commit"] = _commit()
    for part in parts:
        if part != "vllm":
            _keep(arguments.out, results, {part: benchmark_clients.run(part, arguments.work)})
            continue
        files = {file["path"]: file for file in results.get("vllm", {}).get("files", [])}
        for file in vllm_tests.run(arguments.work, arguments.tests):
            files[file["path"]] = {**file, "commit": results["commit"]}
            ran = {"version": vllm_source.VERSION, "files": [files[path] for path in sorted(files)]}
            _keep(arguments.out, results, {"vllm": ran})
    print(tables.summary(results))


def _keep(out: Path, results: dict[str, Any], new: dict[str, Any]) -> None:
    """A run that is cut short has kept what it found."""
    results |= new
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(results, indent=1) + "\n")


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=7"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def _table(arguments: argparse.Namespace) -> None:
    before = json.loads(arguments.before.read_text()) if arguments.before else None
    print(tables.page(json.loads(arguments.results.read_text()), before))


if __name__ == "__main__":
    main()
