"""The documentation site builds without a broken link, and loads nothing from other servers; packages are typed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.markdown import ROOT

PORTIONS = ("server", "adapters", "kernels", "admin", "migrations")


def build(checkout: Path, site: Path) -> subprocess.CompletedProcess[str]:
    """What `make docs` runs, into another folder."""
    recipe = re.search(r"^\t.*-m (mkdocs build .*)$", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    assert recipe, "no target builds the site"
    return subprocess.run(
        [sys.executable, "-m", *recipe[1].split(), "--site-dir", str(site)],
        check=False,
        cwd=checkout,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site. A broken link, a missing anchor, and a page that is not in the nav of mkdocs.yml fail it."""
    folder = tmp_path_factory.mktemp("site")
    built = build(ROOT, folder)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


def test_faults_fail_the_build_by_name(tmp_path: Path) -> None:
    """A small site with our configuration, then one fault of each kind. (--quiet hides warnings from --strict.)"""
    configured = (ROOT / "mkdocs.yml").read_text("utf-8").partition("\nnav:\n")[0]
    nav = '\nnav: [{Start: [README.md]}, CONTRIBUTING.md, SECURITY.md, CHANGELOG.md, "part/*.md"]\n'
    (tmp_path / "mkdocs.yml").write_text(configured + nav)
    (tmp_path / "tools").mkdir()
    shutil.copy(ROOT / "tools/docs_site.py", tmp_path / "tools")
    for top in ("CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"):
        (tmp_path / top).write_text("# Top\n")
    page = tmp_path / "docs/part/page.md"
    page.parent.mkdir(parents=True)
    (tmp_path / "README.md").write_text("# Top\n\nIn short.\n\n## What you get\n\nIn long.\n")
    (tmp_path / "docs/README.md").write_text(
        "# All\n\nNot shown.\n\n## List\n\n[page.md](part/page.md), [code](../tools/docs_site.py)\n"
    )
    page.write_text(
        "# Page\n\n[`code`](../../tools/docs_site.py), `[no](link.md)`, [up](../../SECURITY.md#top)\n"
    )
    sound = build(tmp_path, tmp_path / "site")
    assert sound.returncode == 0, sound.stdout + sound.stderr
    home = (tmp_path / "site/index.html").read_text("utf-8")
    assert "In short." in home, "the README's first half"
    assert '<a href="part/page/">Page</a>, code' in home, "a page's title as the text of a link"
    assert "In long." not in home
    assert "Not shown." not in home

    (tmp_path / "docs/outside.md").write_text("# Not in the menu\n")
    page.write_text(
        "# Page\n\n[one](gone.md), [two](../README.md#gone), [`three`](../../tools/gone.py), [four](/gone/)\n"
    )
    broken = build(tmp_path, tmp_path / "site")
    assert broken.returncode != 0
    for fault in ("outside.md", "'gone.md'", "#gone", "tools/gone.py", "'/gone/'"):
        assert fault in broken.stderr, (fault, broken.stderr)


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
