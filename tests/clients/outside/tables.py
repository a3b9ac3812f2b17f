"""Results as Markdown: what passes, what is missing, why."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from clients.outside.vllm_reasons import DIFFERENT, IN_PROCESS, MISSING, OPEN, OTHER, PASSED, reason

KINDS = (PASSED, MISSING, DIFFERENT, OTHER, OPEN)
MEANINGS = {
    MISSING: "Missing: a feature that Loraplex does not have",
    DIFFERENT: "Different: Loraplex answers otherwise, and means to",
    OTHER: "Not applicable: about another model, vLLM's own options, or its classes in process",
    OPEN: "Unexplained",
}


def explained(file: dict[str, Any]) -> list[tuple[str, str]]:
    """The kind of each test's outcome, and why."""
    return [
        reason(f"{file['path']}::{name}", test["outcome"], test["text"])
        for name, test in file["tests"].items()
    ]


def counts(files: list[dict[str, Any]]) -> Counter[str]:
    """How many of vLLM's tests there are of each kind."""
    return Counter(kind for file in files for kind, _ in explained(file))


def summary(results: dict[str, Any]) -> str:
    lines = [
        f"{part}: {row['case']}: {row['kind']} {row['why']}"
        for part in ("guidellm", "lm_eval")
        for row in results.get(part, {}).get("rows", [])
    ]
    if "vllm" in results:
        lines.append(f"vllm: {dict(counts(results['vllm']['files']))}")
    return "\n".join(lines)


def _without_server(results: dict[str, Any]) -> dict[str, Any]:
    """A file whose every test is about classes in process is as one that is not run."""
    files = [
        {**file, "why": IN_PROCESS, "tests": {}}
        if file["tests"] and all(why == IN_PROCESS for _, why in explained(file))
        else file
        for file in results["vllm"]["files"]
    ]
    return {**results, "vllm": {**results["vllm"], "files": files}}


def page(results: dict[str, Any], before: dict[str, Any] | None) -> str:
    """Every table, for commit `results["commit"]`; with `before`, what the earlier commit gave stands beside it."""
    results = _without_server(results)
    blocks = [
        _clients("guidellm", results, before),
        _clients("lm_eval", results, before),
        _files(results, before),
        *(_reasons(results, kind) for kind in (MISSING, DIFFERENT, OTHER, OPEN)),
        _not_run(results),
    ]
    return "\n\n".join(block for block in blocks if block)


def _clients(part: str, results: dict[str, Any], before: dict[str, Any] | None) -> str:
    if part not in results:
        return ""
    earlier = {row["case"]: _said(row) for row in before[part]["rows"]} if before and part in before else {}
    head = f"| {part} {results[part]['version']} | " + (f"{before['commit']} | " if before else "")
    rows = [
        [row["case"], *([earlier.get(row["case"], "")] if before else []), _said(row)]
        for row in results[part]["rows"]
    ]
    return _table([*head.strip("| ").split(" | "), results["commit"]], rows)


def _said(row: dict[str, str]) -> str:
    """An error of guidellm's is put shortly: it names the server's address and a page about HTTP."""
    if row["kind"] == PASSED:
        return PASSED
    found = re.search(r"error '(\d+ [\w ]+)' for url 'http://[\d.:]+(/[\w/]+)'", row["why"])
    return found.expand(r"\1 from `\2`") if found else row["why"].replace("|", "\\|").replace("\n", " ")


def _files(results: dict[str, Any], before: dict[str, Any] | None) -> str:
    def told(files: dict[str, Any], path: str) -> list[str]:
        kinds = counts([files[path]] if path in files else [])
        return [str(kinds[kind] or "") for kind in KINDS]

    now = {file["path"]: file for file in results["vllm"]["files"] if not file["why"]}
    then = {file["path"]: file for file in before["vllm"]["files"]} if before else {}
    rows = []
    for path in now:
        cells = told(now, path)
        earlier = told(then, path)[0] or "0"
        if before and earlier != (cells[0] or "0"):
            cells[0] = f"{earlier} → {cells[0] or '0'}"
        at = now[path].get("commit", results["commit"])
        note = "" if at == results["commit"] else f" (at {at})"
        rows.append([f"`{path.removesuffix('.py')}`{note}", *cells])
    total = counts(results["vllm"]["files"])
    rows.append(["**all**", *(f"**{total[kind]}**" for kind in KINDS)])
    return _table([f"vLLM {results['vllm']['version']}, tests/", *KINDS], rows)


def _reasons(results: dict[str, Any], kind: str) -> str:
    found: Counter[str] = Counter()
    where: dict[str, set[str]] = {}
    for file in results["vllm"]["files"]:
        for its_kind, why in explained(file):
            if its_kind == kind:
                found[why] += 1
                where.setdefault(why, set()).add(file["path"].rpartition("/")[2].removesuffix(".py"))
    if not found:
        return ""
    rows = [
        [why.replace("|", "\\|"), str(number), ", ".join(f"`{name}`" for name in sorted(where[why]))]
        for why, number in found.most_common()
    ]
    return _table([MEANINGS[kind], "tests", "in"], rows)


def _not_run(results: dict[str, Any]) -> str:
    files: dict[str, list[str]] = {}
    for file in results["vllm"]["files"]:
        if file["why"]:
            files.setdefault(file["why"], []).append(file["path"].rpartition("/")[2].removesuffix(".py"))
    rows = [[why, ", ".join(f"`{name}`" for name in sorted(names))] for why, names in sorted(files.items())]
    return _table(["Files that are not run: they are about", ""], rows) if rows else ""


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
