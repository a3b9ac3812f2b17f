"""Messages are for people: values in them are written as the person wrote them, and not as Python does."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from loraplex.adapters.store.files import shown

ROOT = Path(__file__).parents[2]
PORTIONS = ("adapters", "admin", "migrations", "server")
"""Errors of kernels are for their callers, not for users."""


def reprs(source: str) -> list[int]:
    """Lines of f-strings that write a value as Python does."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FormattedValue) and (node.conversion == ord("r") or is_of_python(node.value))
    ]


def is_of_python(value: ast.expr) -> bool:
    """A tuple, as a shape is, or a set, with Python's brackets and quotes; or what `repr` makes."""
    if isinstance(value, ast.Attribute) and value.attr == "shape":
        return True
    return (
        isinstance(value, ast.Call)
        and isinstance(value.func, ast.Name)
        and value.func.id in ("tuple", "set", "repr")
    )


def test_the_check_finds_what_it_is_for() -> None:
    assert reprs("f'{x!r}'") == reprs("f'{tuple(x)}'") == reprs("f'{repr(x)}'") == [1]
    assert reprs("f'{a.shape}'") == [1]
    assert reprs("f'{x} {x.y!s}'") == []


@pytest.mark.parametrize("portion", PORTIONS)
def test_no_message_has_a_value_as_python_writes_it(portion: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in sorted((ROOT / portion).rglob("*.py"))
        for line in reprs(path.read_text("utf-8"))
    ]
    assert found == []


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "null"),
        (True, "true"),
        (1.5, "1.5"),
        ([1, None, "a"], '[1, null, "a"]'),
        ({"a": False}, '{"a": false}'),
        ("text", "'text'"),
        ("two\nlines", "'two\\nlines'"),
        ("x" * 100, f"'{'x' * 80}...'"),
        (list(range(100)), None),
    ],
)
def test_a_value_of_an_upload_is_shown_as_json_has_it(value: object, words: str | None) -> None:
    told = shown(value)
    assert told.isascii()
    assert len(told) <= 85
    assert words is None or told == words
