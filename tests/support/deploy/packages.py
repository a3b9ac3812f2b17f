"""Which installed packages a distribution needs, so that a test can offer these and no other."""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

from packaging.requirements import Requirement

SITE = Path(sysconfig.get_path("purelib"))


def normal_name(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def needed_packages(*names: str) -> dict[str, importlib.metadata.Distribution]:
    """The named distributions of this environment and all that they require here, by normalised name."""
    found: dict[str, importlib.metadata.Distribution] = {}
    waiting: list[tuple[str, frozenset[str]]] = [(name, frozenset()) for name in names]
    seen: set[tuple[str, frozenset[str]]] = set()
    while waiting:
        name, extras = waiting.pop()
        key = (normal_name(name), extras)
        if key in seen:
            continue
        seen.add(key)
        found[key[0]] = importlib.metadata.distribution(name)
        for line in found[key[0]].requires or []:
            required = Requirement(line)
            marker = required.marker
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in (extras or {""})):
                waiting.append((required.name, frozenset(required.extras)))
    return found


def link_packages(found: Iterable[importlib.metadata.Distribution], folder: Path, target: str) -> None:
    """Into `folder`, a link for each file or folder that these distributions have at the top of this environment's
    site-packages, which is at `target` where the links are read. What is there is replaced."""
    tops = {
        file.parts[0]
        for one in found
        for file in one.files or []
        if file.parts[0] not in ("..", "__pycache__")
    }
    for top in tops:
        assert (SITE / top).exists(), f"{top} is not in {SITE}"
        link = folder / top
        if link.is_dir() and not link.is_symlink():
            shutil.rmtree(link)
        link.unlink(missing_ok=True)
        link.symlink_to(f"{target}/{top}")


def remove_package(folder: Path, name: str) -> None:
    """A distribution that a virtual environment began with, and its files."""
    for one in importlib.metadata.distributions(path=[str(folder)]):
        if normal_name(one.metadata["Name"]) == normal_name(name):
            for top in {file.parts[0] for file in one.files or [] if file.parts[0] != ".."}:
                path = folder / top
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink(missing_ok=True)


def base_python() -> Path:
    """The installation that this environment was made from."""
    return Path(sys.base_prefix)
