"""A Python that lacks what a GPU machine lacks: nothing can be installed there but wheels that were taken along."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

INSTALLED = (
    "torch", "triton", "transformers", "numpy", "ml_dtypes", "safetensors", "pytest", "hypothesis", "peft",
)  # fmt: skip
"""What such a machine has, with what these need."""
WHEELS = Path(__file__).parents[3] / "bench/gpu/wheels.txt"
"""What `make gpu-wheels` fetches: names, whose versions are in constraints.txt."""

_HIDE = """
import sys

HIDDEN = frozenset({hidden!r})


class Hiding:
    def __init__(self, finder):
        self._finder = finder

    def __getattr__(self, name):
        return getattr(self._finder, name)

    def find_spec(self, name, *rest):
        return None if name.partition(".")[0] in HIDDEN else self._finder.find_spec(name, *rest)


sys.meta_path[:] = [Hiding(finder) for finder in sys.meta_path]
"""


QUICKLY = """
from support.kernels.quick_interpreter import quicken_interpreter

quicken_interpreter()
"""
"""More for `write_sitecustomize`."""


def gpu_environment(*before: Path) -> dict[str, str]:
    """Of a process that interprets kernels, with nothing of ours but the files. `before`: first in its path."""
    root = Path(__file__).parents[3]
    parts = [*before, root, *(root / part for part in ("tests", "server", "adapters", "kernels"))]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, parts)),
        "TRITON_INTERPRET": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }


def wheels() -> list[str]:
    """The packages of `make gpu-wheels`."""
    return WHEELS.read_text("utf-8").split()


def hidden_modules() -> list[str]:
    """Top-level modules that are installed here and that a GPU machine lacks."""
    there = _with_requirements([*INSTALLED, *wheels()])
    found = packages_distributions()
    return sorted(
        module
        for module, names in found.items()
        if module not in sys.stdlib_module_names
        and module not in ("loraplex", "pip", "setuptools")
        and not any(canonicalize_name(name) in there for name in names)
    )


def write_sitecustomize(folder: Path, more: str = "") -> None:
    """A process with `folder` first in PYTHONPATH does not find those modules. `more` Python is run in it too."""
    (folder / "sitecustomize.py").write_text(_HIDE.format(hidden=hidden_modules()) + more, "utf-8")


def _with_requirements(names: Iterable[str]) -> set[str]:
    found: set[str] = set()
    waiting = [canonicalize_name(name) for name in names]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found.add(name)
        try:
            needed = [Requirement(text) for text in requires(name) or ()]
        except PackageNotFoundError:
            continue
        waiting += [
            canonicalize_name(one.name)
            for one in needed
            if one.marker is None or one.marker.evaluate({"extra": ""})
        ]
    return found
