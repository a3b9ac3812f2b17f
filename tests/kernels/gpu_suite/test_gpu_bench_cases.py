"""The GPU suite's cases for attention and the fused kernels run anywhere, and notice what is wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bench.gpu import attention, fused
from bench.gpu.kv import codes as kv_codes
from bench.gpu.linears import fp8
from bench.gpu.timing import Ceilings
from loraplex.kernels.attention import triton_attention
from loraplex.kernels.layers import triton_norm, triton_rope
from loraplex.kernels.linear import triton_fp8

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

pytestmark = [
    pytest.mark.usefixtures("quick_interpreter"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]


@pytest.mark.parametrize(
    "case", attention.small_cases() + attention.engine_cases(small=True), ids=lambda case: case.name
)
def test_small_attention_cases_are_right(case):
    result = attention.run_case(case, DEVICE, Ceilings())
    assert result["ok"], result
    assert result["floor_ms"] > 0
    assert (result["graph_ms"] is None) == (DEVICE.type == "cpu")


def test_small_fused_cases_are_right():
    results = fused.small_cases(DEVICE)
    assert all(result["ok"] for result in results), results
    assert len({result["case"] for result in results}) == len(results)


@pytest.mark.parametrize("case", kv_codes.attention_cases(small=True), ids=lambda case: case.name)
def test_attention_over_codes_is_right(case):
    result = kv_codes.run_attention(case, DEVICE, Ceilings())
    assert result["ok"], result
    assert result["error"] < result["codes_error"] < 0.05
    assert (result["b_ms"] is None) == (DEVICE.type == "cpu")


def test_codes_are_written_behind_rope_and_nowhere_else(monkeypatch):
    (case,) = kv_codes.rope_cases(small=True)
    assert kv_codes.run_rope(case, DEVICE, Ceilings())["ok"]
    true = triton_rope.rope_and_write_kv

    def elsewhere(heads, num_heads, cos, sin, cache, slots):
        true(heads, num_heads, cos, sin, cache, slots + 1)

    monkeypatch.setattr(triton_rope, "rope_and_write_kv", elsewhere)
    assert not kv_codes.run_rope(case, DEVICE)["ok"]


@pytest.mark.parametrize("case", fp8.small_cases(), ids=lambda case: case.name)
def test_small_cases_of_8_bit_floats_are_right(case):
    result = fp8.run_case(case, DEVICE, Ceilings())
    assert result["ok"], result


def test_a_wrong_scale_of_8_bit_floats_is_noticed(monkeypatch):
    true = triton_fp8.pack_floats
    monkeypatch.setattr(
        triton_fp8,
        "pack_floats",
        lambda weight, *rest, **named: true(replace(weight, scales=weight.scales * 1.01), *rest, **named),
    )
    assert not fp8.run_case(fp8.small_cases()[1], DEVICE)["ok"]


def test_a_wrong_number_is_noticed(monkeypatch):
    true = triton_attention.paged_attention
    monkeypatch.setattr(
        triton_attention, "paged_attention", lambda *args, **kwargs: true(*args, **kwargs) * 1.01
    )
    assert not attention.run_case(attention.small_cases()[0], DEVICE)["ok"]
    right = triton_norm.add_rms_norm
    monkeypatch.setattr(triton_norm, "add_rms_norm", lambda x, *rest: right(x * 1.01, *rest))
    assert not fused.norm_case(2, 8, DEVICE, dtype=torch.float32)["ok"]


def test_every_full_case_has_a_plan():
    for case in (
        *attention.full_cases(),
        *attention.engine_cases(small=False),
        *kv_codes.attention_cases(small=False),
    ):
        plan = attention.make_plan(case, torch.device("cpu"))
        num_bytes, flops = attention.work(case)
        assert plan.num_ints > 0
        assert num_bytes > 0
        assert flops > 0


def test_the_floor_of_the_8b_decode_is_its_keys_and_values():
    case = attention.full_cases()[0]
    num_bytes, _ = attention.work(case)
    assert num_bytes == 64 * 1024 * 2 * 8 * 128 * 2 + 2 * 64 * 32 * 128 * 2
