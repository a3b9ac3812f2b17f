"""The word list: what it finds and what it leaves alone. `make check` runs it over all: tests/docs/test_guards.py."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

from support.markdown import ROOT


def load() -> ModuleType:
    spec = spec_from_file_location("check_prose", ROOT / "tools/check_prose.py")
    assert spec
    assert spec.loader
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


prose = load()


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("It is read anew.", "anew"),
        ("Rows, likewise, wait.", "likewise"),
        ("A tenant has so\nmany adapters.", "so many"),
        ("Whoever asks gets it.", "Whoever"),
        ("Two rows, one of which waits.", "of which"),
        ("The flights of a step.", "flights"),
        ("What the config comes to is kept.", "What the config comes to"),
        ("An adapter that has to go.", "has to go"),
        ("It draws a token.", "draws a token"),
        ("All, but for one.", "but for"),
        ("It waits for ever.", "for ever"),
        ("Somebody waits for it.", "Somebody"),
        ("It waits. Who comes late waits too.", "Who comes late waits …"),
    ],
)
def test_words_to_avoid_are_found(text: str, found: str) -> None:
    assert [finding.text for finding in prose.check_text(text)] == [found]


@pytest.mark.parametrize(
    "text",
    [
        "Steps in flight, an in-flight step, and a request in\nflight.",
        "`anew` and ``of which`` in code.",
        "```\nlikewise\n```",
        "[a link](likewise.md)",
        "Who may call what?",
        "Go to the place that comes next. Renewed. A drawing.",
    ],
)
def test_code_questions_and_other_words_are_left_alone(text: str) -> None:
    assert list(prose.check_text(text)) == []


def test_a_docstring_begins_with_its_subject() -> None:
    source = '"""Sizes of a step."""\nA = 1\n"""Of a step."""\n\ndef f():\n    """What it is."""\n'
    assert [(found.line, found.text) for found in prose.fragments(source)] == [(3, "Of …"), (6, "What …")]
    assert list(prose.fragments('"""Ofelia, Bytes of a step, Formats."""')) == []


def test_lines_are_those_of_the_file(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# One\n\n```\nanew\n```\n\nTwo, anew.\n")
    assert [finding.line for finding in prose.check_file(page)] == [7]
    code = tmp_path / "code.py"
    code.write_text(
        '"""Says what.\n\nRead anew."""\n\nlikewise = 1\n"""Likewise a docstring."""\nname = "anew"\n'
    )
    assert [(finding.line, finding.text) for finding in prose.check_file(code)] == [
        (3, "anew"),
        (6, "Likewise"),
    ]


@pytest.mark.parametrize(
    ("subject", "good"),
    [
        ("scheduler: defer prefills of over-served tenants", True),
        ("api, admin: share the bearer parser", True),
        ('Revert "scheduler: defer prefills"', True),
        ("Defer prefills", False),
        ("scheduler: " + "x" * 70, False),
        ("scheduler: put prefills off anew", False),
    ],
)
def test_a_subject_names_its_area_and_is_short(subject: str, good: bool) -> None:
    assert (list(prose.check_subject(subject)) == []) is good


def test_a_finding_fails_the_tool(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    page.write_text("Whoever reads this.\n")
    assert prose.main([str(page)]) == 1
    assert f"{page}:1: 'Whoever'" in capsys.readouterr().out
