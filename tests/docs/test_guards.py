"""What `make check` runs looks at every package, and its own tools find what is planted. (check_prose: test_prose.)"""

from __future__ import annotations

import re
import tomllib
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

from support import markdown
from support.markdown import ROOT

PORTIONS = ("adapters", "admin", "kernels", "migrations", "server")


def packages() -> set[str]:
    folders = [path for portion in PORTIONS for path in (ROOT / portion / "loraplex").iterdir()]
    return {f"loraplex.{path.name}" for path in folders if (path / "py.typed").is_file()}


def recipe() -> str:
    return markdown.read("Makefile").partition("\ncheck:")[2].partition("\n\n")[0]


@pytest.fixture(scope="module")
def layout() -> ModuleType:
    spec = spec_from_file_location("check_layout", ROOT / "tools/check_layout.py")
    assert spec
    assert spec.loader
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_make_check_runs_every_guard_and_none_is_allowed_to_fail() -> None:
    needs, *targets = [line for line in recipe().splitlines() if not line.startswith("\t")]
    assert needs.split() == [line.partition(":")[0] for line in targets]
    lines = [line.strip() for line in recipe().splitlines() if line.startswith("\t")]
    tools = [re.split(r"\s", line.removeprefix("$(BIN)/").removeprefix("python "))[0] for line in lines]
    assert tools == [
        *("mypy", "ruff", "ruff", "lint-imports", "deptry"),
        *("tools/check_layout.py", "tools/check_prose.py"),
        "$(CLIENTS)/console/node_modules/.bin/tsc",
    ]
    assert [line for line in lines if line.startswith("-") or re.search(r"\|\||;|\|", line)] == []


def test_every_package_is_checked() -> None:
    assert set(re.findall(r"-p (\S+)", recipe())) == packages(), "mypy"
    assert set(re.findall(r"deptry (.*)", recipe())[0].split()) == set(PORTIONS), "deptry"
    linter = tomllib.loads(markdown.read("pyproject.toml"))["tool"]["importlinter"]
    assert set(linter["root_packages"]) == packages(), "import-linter"
    layers = {name for row in linter["contracts"][0]["layers"] for name in row.split(" | ")}
    assert packages() - layers == {"loraplex.contrib"}, "import-linter's layers"


def test_the_table_of_the_layout_has_every_package(layout: ModuleType) -> None:
    assert set(layout.ROOT_PACKAGES) == packages()
    assert set(layout.SOURCE) == set(PORTIONS)


def test_too_many_files_and_too_long_a_file_are_found(layout: ModuleType) -> None:
    fits = {Path(f"a/{n}.py"): layout.MAX_LINES for n in range(layout.MAX_FILES)}
    assert layout.too_large(fits) == []
    found = layout.too_large(fits | {Path("a/more.py"): 1, Path("b/long.py"): layout.MAX_LINES + 1})
    assert [line.partition(":")[0] for line in found] == ["a", "b/long.py"]


def test_too_long_a_function_is_found(
    layout: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout, "ROOT", tmp_path)
    paths = [Path(f"{portion}/of.py") for portion in ("server", "kernels")]
    for path in paths:
        (tmp_path / path).parent.mkdir()
        body = "    pass\n" * layout.MAX_FUNCTION_LINES
        (tmp_path / path).write_text(f"def fits():\n{body[9:]}\n\nasync def long():\n{body}")
    (found,) = layout.too_large(dict.fromkeys(paths, 1))
    assert found.startswith("server/of.py:83: long has 81 lines")


def test_the_layout_looks_at_the_files_of_the_checkout(layout: ModuleType) -> None:
    lines = layout.python_files()
    assert lines[Path("tools/check_layout.py")] > 100
    assert {path.parts[0] for path in lines} >= {*PORTIONS, "tests", "tools"}
