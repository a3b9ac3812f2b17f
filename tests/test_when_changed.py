"""Tests of the image, the chart, Ray and dashboards run when what they test has changed, or when they are asked for."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from support.when_changed import KEPT, SUBJECTS, TESTS, Subject, WhenChanged

CHART = Subject(("chart",), ("charts/*", "settings.py"))


@pytest.fixture
def chosen(tmp_path: Path) -> WhenChanged:
    """A checkout whose chart has two tests, in a run of everything."""
    for name in (
        "charts/values.yaml",
        "settings.py",
        "tests/chart/test_pod.py",
        "tests/chart/test_schema.py",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    kept = tmp_path / "tests" / "last_run.json"
    return WhenChanged(tmp_path, kept, everything=True, asked=[tmp_path / "tests"], subjects={"chart": CHART})


def finish(chosen: WhenChanged, *outcomes: str) -> None:
    for outcome in outcomes:
        report = SimpleNamespace(
            nodeid="tests/chart/test_pod.py::test_it@group", when="call", outcome=outcome
        )
        chosen.pytest_runtest_logreport(report)  # type: ignore[arg-type]
    chosen.pytest_sessionfinish()


def unchanged(chosen: WhenChanged, **other: object) -> frozenset[str]:
    return replace(chosen, everything=False, **other).unchanged()  # type: ignore[arg-type]


def test_a_subject_is_left_out_until_a_file_of_it_changes(chosen: WhenChanged) -> None:
    assert unchanged(chosen) == frozenset()
    finish(chosen, "passed", "passed")
    assert unchanged(chosen) == {"chart"}
    assert chosen.unchanged() == frozenset(), "--everything"
    (chosen.root / "README.md").write_text("nothing of the chart")
    assert unchanged(chosen) == {"chart"}
    for name in ("charts/values.yaml", "tests/chart/test_pod.py", "charts/another.yaml"):
        (chosen.root / name).write_text("changed")
        assert unchanged(chosen) == frozenset(), name
        finish(chosen)
        assert unchanged(chosen) == {"chart"}


@pytest.mark.parametrize("outcomes", [("passed", "failed"), ("passed", "skipped"), ()])
def test_only_what_passed_whole_is_kept(chosen: WhenChanged, outcomes: tuple[str, ...]) -> None:
    finish(chosen, *outcomes)
    assert not chosen.kept.exists()


def test_a_run_of_one_file_keeps_nothing(chosen: WhenChanged) -> None:
    finish(replace(chosen, asked=[chosen.root / "tests/chart/test_pod.py"]), "passed")
    assert not chosen.kept.exists()


def test_what_a_command_names_is_run(chosen: WhenChanged) -> None:
    finish(chosen, "passed")
    assert unchanged(chosen, asked=[chosen.root / "tests/chart/test_pod.py"]) == frozenset()


def test_fast_tests_are_never_left_out(chosen: WhenChanged) -> None:
    slow, fast = (
        SimpleNamespace(path=chosen.root / "tests/chart/test_pod.py", get_closest_marker={"slow": marker}.get)
        for marker in (True, None)
    )
    assert (chosen.subject_of(slow), chosen.subject_of(fast)) == ("chart", None)  # type: ignore[arg-type]


def test_each_pattern_names_files() -> None:
    assert set(json.loads(KEPT.read_text())) <= set(SUBJECTS)
    for name, subject in SUBJECTS.items():
        for pattern in subject.sources:
            assert any(TESTS.parent.glob(pattern)), f"{name}: {pattern}"
        assert all((TESTS / part).exists() for part in subject.tests), name
