"""The suite's cases of humming-kernels: skipped with a reason where it is not there, else right or wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench.gpu import catalogue, report, worker
from bench.gpu.case import Bench, Skipped
from bench.gpu.linears import humming as cases
from loraplex.kernels.linear import humming
from support.kernels.fake_humming import install_fake

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    asked = humming.obstacle_to
    monkeypatch.setattr(
        humming,
        "obstacle_to",
        lambda device, *, batch_invariant: asked(CUDA, batch_invariant=batch_invariant),
    )
    return install_fake(monkeypatch, tmp_path / "site")


@pytest.mark.parametrize("case", cases.small_cases()[:3], ids=lambda case: case.name)
def test_small_cases_are_right(library, case: cases.HummingCase) -> None:
    row = cases.run_case(case, CPU)
    assert row["ok"], row
    assert row["alone"]


def test_a_row_that_depends_on_the_others_is_told(library, monkeypatch: pytest.MonkeyPatch) -> None:
    true = humming.linear
    monkeypatch.setattr(humming, "linear", lambda x, *rest: true(x, *rest) * (1 if len(x) == 1 else 1.01))
    row = cases.run_case(cases.small_cases()[2], CPU)
    assert (row["alone"], row["ok"]) == (False, False)


def test_every_case_has_a_form_that_the_server_gives_to_the_library() -> None:
    for case in (*cases.small_cases(), *cases.full_cases()):
        assert humming.obstacle_to_group(case.group, case.dtype) is None
        assert case.columns % 64 == case.inputs % 64 == 0


def test_a_wrong_number_is_noticed(library, monkeypatch: pytest.MonkeyPatch) -> None:
    true = humming.linear
    monkeypatch.setattr(humming, "linear", lambda *args: true(*args) * 1.01)
    assert not cases.run_case(cases.small_cases()[1], CPU)["ok"]


def test_without_the_library_cases_and_the_switch_are_skipped_with_a_reason(tmp_path: Path) -> None:
    with pytest.raises(Skipped, match="is for GPUs"):
        cases.run_case(cases.small_cases()[0], CPU)
    (case,) = catalogue.small_ab("humming")
    found = worker.run_one(case, Bench(CPU))
    assert (found["status"], found["note"]) == ("skipped", "humming-kernels is for GPUs")
    run = {"identity": {"device": "none", "commit": "abc"}, "environment": {}, "started": "", "command": ""}
    report.write_report(tmp_path, [run], [case.key], {case.key: found})
    told = (tmp_path / "results.md").read_text()
    assert "1 skipped, 0 not run" in told
    assert f"- {case.key}: humming-kernels is for GPUs" in told
