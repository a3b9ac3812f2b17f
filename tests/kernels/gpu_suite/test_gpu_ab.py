"""`--ab` runs both sides of a switch in turns, and notices where they differ."""

from __future__ import annotations

import pytest
import torch

from bench.gpu import catalogue, report, suite
from bench.gpu.case import Bench
from bench.gpu.decoding import switches
from loraplex.kernels.attention.library_kernel import TorchPrompts
from loraplex.kernels.lora.triton_lora import LoraLauncher

pytestmark = pytest.mark.usefixtures("quick_interpreter")


@pytest.fixture
def bench():
    return Bench(torch.device("cpu"))


FEW = ("programs", "splits", "fused", "prompt-rows", "kv-codes", "int4", "fp8")
"""Switches of the short version."""


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(FEW, marks=pytest.mark.slow),
        pytest.param(tuple(name for name in switches.SWITCHES if name != "humming"), marks=pytest.mark.soak),
    ],
)
def test_both_sides_of_every_switch_compute_the_same(bench, names, tmp_path):
    cases = catalogue.small_ab(*names)
    results = {}
    for case in cases:
        row = case.run(bench)
        assert row["ok"], row
        assert row["a"] != row["b"]
        assert row["a_ms"] > 0 < row["b_ms"]
        results[case.key] = {"case": case.key, "status": "ok", "rows": [row]}
    run = {"identity": {"device": "none", "commit": "abc"}, "environment": {}, "started": "", "command": ""}
    report.write_report(tmp_path, [run], list(results), results)
    told = (tmp_path / "results.md").read_text()
    assert all(switches.SWITCHES[name].b in told for name in names)


def test_prompts_are_compared_with_each_library(bench, monkeypatch, tmp_path):
    cases = catalogue.small_ab("prefill")
    assert [case.key for case in cases] == ["prefill/torch: 37 of 37", "prefill/torch: 37 of 98"]
    row = cases[1].run(bench)
    assert row["ok"], row
    assert (row["a"], row["b"]) == ("triton", "torch")
    results = {cases[1].key: {"case": cases[1].key, "status": "ok", "rows": [row]}}
    run = {"identity": {"device": "none", "commit": "abc"}, "environment": {}, "started": "", "command": ""}
    report.write_report(tmp_path, [run], list(results), results)
    assert "by a library (b)" in (tmp_path / "results.md").read_text()
    true = TorchPrompts.run
    monkeypatch.setattr(TorchPrompts, "run", lambda *args, **options: true(*args, **options) * 1.05)
    assert not cases[0].run(bench)["ok"]


def test_a_side_that_computes_something_else_is_noticed(bench, monkeypatch):
    (case,) = catalogue.small_ab("pdl")
    right = LoraLauncher.shrink
    sides = []
    make = switches.SwitchBench._sides_of

    def broken(self, name):
        both = make(self, name)
        sides.append(both[1].rig.source.lora.layers)
        return both

    def wrong(self, layer, group, x):
        right(self, layer, group, x * 1.5 if sides and self._planner is sides[0]._planner else x)

    monkeypatch.setattr(switches.SwitchBench, "_sides_of", broken)
    monkeypatch.setattr(LoraLauncher, "shrink", wrong)
    assert not case.run(bench)["ok"]


def test_the_cases_for_a_gpu_are_all_three_sizes_of_each_switch():
    keys = [case.key for case in catalogue.full_ab("programs")]
    assert keys == [
        "ceilings/device",
        "ab/programs: 64 rows, 8 adapters, rank 16",
        "ab/programs: 64 rows, 64 adapters, rank 16",
        "ab/programs: 256 rows, 64 adapters, rank 16",
    ]


def test_codes_of_kv_are_compared_at_two_contexts():
    assert [case.key for case in catalogue.full_ab("kv-codes")][1:] == [
        f"ab/kv-codes: 64 rows, 8 adapters, rank 16, context {context}" for context in ("1,024", "4,096")
    ]


def test_forms_of_weights_are_compared_in_steps_of_few_rows():
    assert [case.key for case in catalogue.full_ab("int4", "fp8")][1:] == [
        f"ab/{name}: {rows} rows, {adapters} adapters, rank 16"
        for name in ("int4", "fp8")
        for rows, adapters in ((1, 1), (16, 8), (64, 8))
    ]


def test_an_unknown_switch_is_refused_with_those_there_are(capsys, tmp_path):
    assert set(suite.AB_NAMES) == {*switches.SWITCHES, "prefill"}
    with pytest.raises(SystemExit):
        suite.main(["--out", str(tmp_path), "--ab", "luck"])
    told = capsys.readouterr().err
    assert "luck" in told
    assert all(name in told for name in suite.AB_NAMES)
