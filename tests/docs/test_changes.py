"""How many files a change names, counted on changes that are made: each is a patch of a copy of the tree, and a program
that shows that it works there.

A patch that does not apply any more is made again: apply it by hand to a copy, and write `git diff -U1` of it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.markdown import ROOT

CHANGES = Path(__file__).with_name("changes")
PORTIONS = ("adapters", "admin", "kernels", "migrations", "server")
MOST = {"sampling_parameter": 6, "quantised_format": 4, "engine_command": 4, "limit_of_a_new_kind": 4}


def files_of(name: str) -> set[str]:
    return set(re.findall(r"^\+\+\+ b/(.+)$", (CHANGES / f"{name}.patch").read_text("utf-8"), re.MULTILINE))


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tree")
    for portion in (*PORTIONS, "docs"):
        shutil.copytree(
            ROOT / portion, folder / portion, ignore=shutil.ignore_patterns("__pycache__", "static")
        )
    return folder


def test_every_change_has_its_patch_and_its_program() -> None:
    assert {path.stem for path in CHANGES.glob("*.patch")} == set(MOST)
    assert {path.stem for path in CHANGES.glob("*.py")} == set(MOST)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] if name == "sampling_parameter" else []) for name in MOST],
)
def test_a_change_names_few_files_and_works(name: str, tree: Path) -> None:
    files = files_of(name)
    assert 1 < len(files) <= MOST[name], sorted(files)
    program = [sys.executable, str(CHANGES / f"{name}.py")]
    path = os.pathsep.join([*(str(tree / portion) for portion in PORTIONS), str(ROOT / "tests")])
    environment = os.environ | {"PYTHONPATH": path}
    before = subprocess.run(program, env=environment, capture_output=True, text=True, check=False)
    assert before.returncode != 0, "the change is there already"
    apply = ["git", "apply", "--unidiff-zero", str(CHANGES / f"{name}.patch")]
    applied = subprocess.run(apply, cwd=tree, capture_output=True, text=True, check=False)
    assert applied.returncode == 0, applied.stderr
    try:
        done = subprocess.run(program, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    finally:
        subprocess.run([*apply[:2], "-R", *apply[2:]], cwd=tree, check=True)
