"""Checks how files lie in folders, and prints the table of a decision record.

    python tools/check_layout.py            # exit status 1 if a folder, a file or a function is too large
    python tools/check_layout.py --table    # sizes of the code, and how its packages import each other

"A package" below is a folder with Python files in it.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import grimp

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ("adapters", "admin", "kernels", "migrations", "server")
MAX_FILES = 18
MAX_LINES = 450
MAX_FUNCTION_LINES = 80
KERNELS = "kernels"
"""Functions there may be longer: a GPU's or numba's program is one function."""
ROOT_PACKAGES = (
    "loraplex.adapters",
    "loraplex.admin",
    "loraplex.api",
    "loraplex.app",
    "loraplex.contrib",
    "loraplex.control",
    "loraplex.engine",
    "loraplex.http",
    "loraplex.kernels",
    "loraplex.migrations",
    "loraplex.lifecycle",
    "loraplex.serving",
)


def python_files() -> dict[Path, int]:
    """Lines of every Python file that git tracks, by its path from the root."""
    command = ["git", "ls-files", "*.py"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout  # noqa: S603 - ours
    files = [Path(line) for line in listed.splitlines() if (ROOT / line).is_file()]
    return {path: len((ROOT / path).read_bytes().splitlines()) for path in files}


def too_large(files: dict[Path, int]) -> list[str]:
    """One line for each folder, each file and each function above its limit."""
    folders = Counter(path.parent for path in files if path.parts[-2:-1] != ("versions",))
    found = [
        f"{folder}: {count} files; a folder has at most {MAX_FILES}: group them by theme"
        for folder, count in sorted(folders.items())
        if count > MAX_FILES
    ]
    found += [
        f"{path}: {lines} lines; a file has at most {MAX_LINES}: split it by theme"
        for path, lines in sorted(files.items())
        if lines > MAX_LINES
    ]
    found += [
        f"{path}:{line}: {name} has {lines} lines; a function has at most {MAX_FUNCTION_LINES}: cut it into parts"
        for path in sorted(files)
        if path.parts[0] in SOURCE and path.parts[0] != KERNELS
        for line, name, lines in functions(path)
        if lines > MAX_FUNCTION_LINES
    ]
    return found


def functions(path: Path) -> Iterator[tuple[int, str, int]]:
    """First line, name and number of lines of each function of a file."""
    for node in ast.walk(ast.parse((ROOT / path).read_bytes())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.lineno, node.name, (node.end_lineno or node.lineno) - node.lineno + 1


def arrows() -> tuple[int, int, int]:
    """Pairs of packages where a module of one imports a module of the other: all, those between two root packages, and
    those that exist in both directions."""
    graph = grimp.build_graph(*[name for name in ROOT_PACKAGES if has_package(name)])
    packages = {name for name in graph.modules if graph.find_children(name)}

    def package_of(module: str) -> str:
        return module if module in packages else module.rpartition(".")[0]

    pairs = {
        (package_of(module), package_of(imported))
        for module in graph.modules
        for imported in graph.find_modules_directly_imported_by(module)
    }
    pairs = {(one, other) for one, other in pairs if one != other}
    across = {(one, other) for one, other in pairs if one.split(".")[1] != other.split(".")[1]}
    mutual = {pair for pair in pairs if pair[::-1] in pairs}
    return len(pairs), len(across), len(mutual) // 2


def has_package(name: str) -> bool:
    return any((ROOT / folder / Path(*name.split("."))).is_dir() for folder in SOURCE)


def table(files: dict[Path, int]) -> str:
    source = {path: lines for path, lines in files.items() if path.parts[0] in SOURCE}
    tests = {path: lines for path, lines in files.items() if path.parts[0] == "tests"}
    rows: list[tuple[str, object]] = []
    for name, part in (("source", source), ("tests", tests)):
        folders = Counter(path.parent for path in part)
        largest = ", ".join(f"{folder} {count}" for folder, count in folders.most_common(3))
        longest = ", ".join(f"{path} {part[path]}" for path in sorted(part, key=part.__getitem__)[:-4:-1])
        rows += [
            (f"{name}: files", len(part)),
            (f"{name}: lines", f"{sum(part.values()):,}"),
            (f"{name}: folders", len(folders)),
            (f"{name}: folders above {MAX_FILES} files", sum(n > MAX_FILES for n in folders.values())),
            (f"{name}: largest folders", largest),
            (f"{name}: longest files", longest),
        ]
    pairs, across, mutual = arrows()
    rows += [
        ("imports between packages, all", pairs),
        ("imports between root packages", across),
        ("pairs of packages that import each other", mutual),
        ("words of docs/architecture.md", len((ROOT / "docs/architecture.md").read_text().split())),
    ]
    return "\n".join(f"| {name} | {value} |" for name, value in rows)


def main() -> int:
    files = python_files()
    if "--table" in sys.argv[1:]:
        print(table(files))
        return 0
    found = too_large(files)
    print("\n".join(found) or "layout: nothing found")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
