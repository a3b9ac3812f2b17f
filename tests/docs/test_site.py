"""The documentation site builds without a broken link, and loads nothing from other servers; packages are typed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.markdown import ROOT

PORTIONS = ("server", "adapters", "kernels", "admin", "migrations")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site. A broken link, a missing anchor, and a page that is not in the nav of mkdocs.yml fail it."""
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(folder)],
        check=False,
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


def test_every_page_is_built(site: Path) -> None:
    pages = [path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")]
    built = [
        site / page.parent / ("index.html" if page.stem == "README" else f"{page.stem}/index.html")
        for page in pages
    ]
    assert [str(path) for path in built if not path.is_file()] == []


def test_pages_load_nothing_from_other_servers(site: Path) -> None:
    loads = re.compile(r"<(?:script|img|iframe|source)\b[^>]*\bsrc=[\"']?((?:https?:)?//[^\"'\s>]+)")
    styles = re.compile(
        r"<link\b(?=[^>]*\brel=[\"']?(?:stylesheet|preconnect|preload|icon))[^>]*\bhref=[\"']?(\w+://[^\"'\s>]+)"
    )
    found = {}
    for page in site.rglob("*.html"):
        text = page.read_text("utf-8")
        if outside := loads.findall(text) + styles.findall(text):
            found[page.relative_to(site).as_posix()] = outside
    assert found == {}


def test_every_package_says_that_it_is_typed() -> None:
    """`loraplex` is a namespace without a folder of its own, so each package in it needs a marker (PEP 561)."""
    packages = [
        path for portion in PORTIONS for path in (ROOT / portion / "loraplex").iterdir() if path.is_dir()
    ]
    untyped = [
        path.relative_to(ROOT).as_posix()
        for path in packages
        if path.name != "__pycache__" and not (path / "py.typed").is_file()
    ]
    assert untyped == [], "add an empty file py.typed"
