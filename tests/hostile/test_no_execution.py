"""No module of the product reads a pickle, evaluates a text or loads code that came with a model."""

from __future__ import annotations

import ast

import pytest

from support.markdown import ROOT

PORTIONS = ("server", "adapters", "kernels", "admin", "migrations")
EXECUTES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "code", "runpy"}
"""Modules that run what they read."""
CALLS = {"eval", "exec", "compile", "__import__"}
LOADS = {"torch.load", "numpy.load", "np.load", "yaml.load", "os.system", "os.popen"}
ALLOWED = {
    # Compiled kernels, in a directory that only the server's user can write: see docs/operations.md.
    "kernels/loraplex/kernels/numba_runtime/cache.py: pickle",
}


def found_in(source: str) -> set[str]:
    """What a source imports or calls that would execute data."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names} & EXECUTES
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found |= {str(node.module).partition(".")[0]} & EXECUTES
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            found |= {name} & (CALLS | LOADS)
            for keyword in node.keywords:
                value = keyword.value.value if isinstance(keyword.value, ast.Constant) else None
                if keyword.arg in ("trust_remote_code", "shell", "allow_pickle") and value is not False:
                    found.add(f"{keyword.arg}=")
    return found


def test_nothing_that_is_read_is_executed() -> None:
    found = {
        f"{path.relative_to(ROOT).as_posix()}: {name}"
        for portion in PORTIONS
        for path in (ROOT / portion / "loraplex").rglob("*.py")
        for name in found_in(path.read_text("utf-8"))
    }
    assert found == ALLOWED


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("import pickle", "pickle"),
        ("from pickle import loads", "pickle"),
        ("import torch\ntorch.load(path, weights_only=True)", "torch.load"),
        ("eval(text)", "eval"),
        ("AutoConfig.from_pretrained(path, trust_remote_code=given)", "trust_remote_code="),
        ("subprocess.run(text, shell=True)", "shell="),
    ],
)
def test_it_would_be_found(source: str, name: str) -> None:
    assert found_in(source) == {name}


def test_a_harmless_source_passes() -> None:
    assert found_in("import re\nmodel.eval()\nre.compile('a')\nf(trust_remote_code=False)") == set()
