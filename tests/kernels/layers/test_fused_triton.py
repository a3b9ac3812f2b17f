"""Norms, RoPE with the KV write and gated activations in Triton, against their references and against float64."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from loraplex.kernels.attention import torch_attention as attention_torch
from loraplex.kernels.layers import activation, norm, rope, triton_activation, triton_norm, triton_rope
from support.kernels.poison import poison_new_memory
from support.kernels.triton_interpreter import repair_bfloat16

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
DTYPES = list(TOLERANCE)

pytestmark = [
    pytest.mark.usefixtures("quick_interpreter"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch):
    poison_new_memory(monkeypatch)
    if DEVICE.type == "cpu":
        repair_bfloat16(monkeypatch)


def draw(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def rms(x, weight, eps):
    x, weight = x.double(), weight.double()
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def close(got, want, dtype, times=1.0):
    tolerance = TOLERANCE[dtype] * times
    torch.testing.assert_close(got.double(), want.double(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [1, 5, 576, 2304])
@pytest.mark.parametrize("weights", ["own", "float32"])
def test_residual_and_norm(dtype, columns, weights):
    x, residual = draw(5, columns, dtype=dtype), draw(5, columns, dtype=dtype, seed=1)
    # Gemma's weights are near 1 and in float32.
    weight = draw(columns, dtype=dtype, seed=2) if weights == "own" else 1 + draw(columns, seed=2) * 0.01
    total, kept = residual.clone(), x.clone()
    reference = norm.add_rms_norm(x, total, weight, 1e-5)
    got = triton_norm.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(x, kept)
    assert got.dtype is residual.dtype is dtype
    assert torch.equal(residual, total)
    close(got, rms(residual, weight, 1e-5), dtype)
    close(got, reference, dtype, times=3)
    assert torch.equal(triton_norm.rms_norm(residual, weight, 1e-5), got)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sum_is_scaled_after_it_was_rounded(dtype):
    x, residual = draw(5, 40, dtype=dtype), draw(5, 40, dtype=dtype, seed=1)
    weight, total = draw(40, seed=2), residual.clone()
    reference = norm.add_rms_norm(x, total, weight, 1e-5, 0.7)
    got = triton_norm.add_rms_norm(x, residual, weight, 1e-5, 0.7)
    assert torch.equal(residual, total)
    close(got, reference, dtype, times=3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_groups_of_a_row_have_norms_of_their_own(dtype):
    """Nemotron-H's Mamba-2 has such norms."""
    x, weight = draw(5, 3 * 40, dtype=dtype), draw(3, 24, dtype=dtype, seed=2)
    got = triton_norm.rms_norm(x[:, 8:80], weight, 1e-5)
    assert got.shape == (5, 72)
    close(got, rms(x[:, 8:80].unflatten(1, (3, 24)), weight, 1e-5).flatten(1), dtype)
    with pytest.raises(ValueError, match=r"no norm of \[5, 120\] with a weight of \[3, 24\]"):
        triton_norm.rms_norm(x, weight, 1e-5)


def test_heads_of_a_wider_row_are_normed_as_they_lie():
    wide = draw(3, 7, 64)
    heads, weight = wide[:, 2:5], draw(64, seed=1)
    got = triton_norm.rms_norm(heads, weight, 1e-6)
    assert got.is_contiguous()
    close(got, rms(heads, weight, 1e-6), torch.float32)


def test_a_norm_refuses_what_it_can_not_read():
    x = draw(4, 8)
    for bad in (
        lambda: triton_norm.rms_norm(x.T, draw(4), 1e-5),
        lambda: triton_norm.rms_norm(x, draw(7), 1e-5),
    ):
        with pytest.raises(ValueError, match=r"contiguous|weight"):
            bad()
    with pytest.raises(ValueError, match="added"):
        triton_norm.add_rms_norm(x, draw(3, 8), draw(8), 1e-5)
    assert triton_norm.rms_norm(x[:0], draw(8), 1e-5).shape == (0, 8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gelu", [False, True])
@pytest.mark.parametrize("inner", [1, 7, 1500])
def test_gated_activations(dtype, gelu, inner):
    x = draw(3, 2 * inner, dtype=dtype) * 6
    x[0, 0], x[1, 0] = -300, 300
    got = triton_activation.act_and_mul(x, gelu)
    close(got, activation.act_and_mul(x.double(), gelu), dtype)
    close(got, activation.act_and_mul(x, gelu), dtype, times=4)
    assert got.shape == (3, inner)
    wide = torch.cat((x, x), 1)[:, : 2 * inner]
    assert torch.equal(triton_activation.act_and_mul(wide, gelu), got)
    assert triton_activation.act_and_mul(x[:0], gelu).shape == (0, inner)


@pytest.mark.parametrize("gelu", [False, True])
def test_a_gate_may_lie_apart_from_what_it_is_for(gelu):
    gate_up = draw(3, 74)
    wide = draw(3, 200)
    wide[:, 50:87] = gate_up[:, 37:]
    gate = gate_up[:, :37].contiguous()
    got = triton_activation.act_and_mul(gate, gelu, wide[:, 50:87])
    assert torch.equal(got, triton_activation.act_and_mul(gate_up, gelu))
    close(got, activation.act_and_mul(gate, gelu, wide[:, 50:87]), torch.float32, times=4)
    with pytest.raises(ValueError, match="a gate of"):
        triton_activation.act_and_mul(gate, gelu, wide[:, 50:88])


def test_an_activation_refuses_halves_that_are_not_equal():
    with pytest.raises(ValueError, match="gate and up"):
        triton_activation.act_and_mul(draw(2, 7), False)


def kv_cache(blocks, block_size, kv_heads, head_dim, dtype):
    return torch.full((blocks, block_size, 2, kv_heads, head_dim), float("nan"), dtype=dtype, device=DEVICE)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "rotated", "dtype", "slot_dtype"),
    [
        (4, 2, 16, 16, torch.float32, torch.int32),
        (3, 1, 10, 6, torch.float32, torch.int64),  # what lies beyond the rotated part stays
        (14, 2, 64, 64, torch.float16, torch.int32),
        (12, 3, 128, 128, torch.bfloat16, torch.int32),
        (2, 2, 96, 96, torch.float16, torch.int32),
    ],
)
@pytest.mark.parametrize("normed", [None, "own", "float32"])
def test_rotation_and_kv_write_are_those_of_the_references(
    heads, kv_heads, head_dim, rotated, dtype, slot_dtype, normed
):
    rows, block_size = 5, 4
    qkv = draw(rows, heads + 2 * kv_heads, head_dim, dtype=dtype)
    positions = torch.tensor([0, 1, 7, 5000, 3], device=DEVICE)
    inv_freq = (1.0 / 10000.0 ** (torch.arange(0, rotated, 2) / rotated)).to(DEVICE)
    cos, sin = rope.rope_cos_sin(positions, inv_freq, 1.2)
    slots = torch.tensor([9, 2, 27, -1, 0], dtype=slot_dtype, device=DEVICE)
    weights = {}
    if normed:
        weight_dtype = dtype if normed == "own" else torch.float32
        weights = {
            "q_norm": draw(head_dim, dtype=weight_dtype, seed=1),
            "k_norm": draw(head_dim, dtype=weight_dtype, seed=2),
            "eps": 1e-6,
        }
    want = qkv.clone()
    queries, keys = want[:, :heads], want[:, heads : heads + kv_heads]
    if normed:
        queries.copy_(norm.rms_norm(queries, weights["q_norm"], 1e-6))
        keys.copy_(norm.rms_norm(keys, weights["k_norm"], 1e-6))
    rope.apply_rope(want[:, : heads + kv_heads], cos, sin)
    want_cache = kv_cache(8, block_size, kv_heads, head_dim, dtype)
    real = slots >= 0
    kv = want[:, heads:].reshape(rows, 2, kv_heads, head_dim)
    attention_torch.write_kv(kv[real], want_cache, SimpleNamespace(slots=slots[real].long()))
    before, cache = qkv.clone(), kv_cache(8, block_size, kv_heads, head_dim, dtype)
    triton_rope.rope_and_write_kv(qkv, heads, cos, sin, cache, slots, **weights)
    torch.testing.assert_close(
        qkv[:, :heads].double(), queries.double(), atol=2 * TOLERANCE[dtype], rtol=2 * TOLERANCE[dtype]
    )
    assert torch.equal(qkv[:, heads:], before[:, heads:])
    assert torch.equal(cache.isnan(), want_cache.isnan())
    tolerance = 2 * TOLERANCE[dtype]
    torch.testing.assert_close(cache, want_cache, atol=tolerance, rtol=tolerance, equal_nan=True)
    values = torch.nan_to_num(cache[:, :, 1].float())
    assert torch.equal(values, torch.nan_to_num(want_cache[:, :, 1].float()))


def test_gates_behind_queries_change_nothing_and_stay():
    heads, dim = 3, 12
    plain, gates = draw(2, heads + 2 * 2, dim), draw(2, heads, dim, seed=1)
    between = torch.stack((plain[:, :heads], gates), 2).flatten(1, 2)
    gated = torch.cat((between, plain[:, heads:]), 1)
    cos, sin = rope.rope_cos_sin(torch.tensor([3, 40], device=DEVICE), torch.rand(4, device=DEVICE))
    caches = [kv_cache(2, 4, 2, dim, torch.float32).zero_() for _ in range(2)]
    given = {"q_norm": draw(dim, seed=2), "k_norm": draw(dim, seed=3), "eps": 1e-6}
    slots = torch.tensor([5, 0], device=DEVICE)
    triton_rope.rope_and_write_kv(plain, heads, cos, sin, caches[0], slots, **given)
    triton_rope.rope_and_write_kv(gated, heads, cos, sin, caches[1], slots, **given, gated=True)
    assert torch.equal(gated[:, : 2 * heads : 2], plain[:, :heads])
    assert torch.equal(gated[:, 1 : 2 * heads : 2], gates)
    assert torch.equal(*caches)


def test_a_value_that_is_not_finite_goes_to_the_cache_as_it_is():
    qkv = draw(1, 4, 8)
    qkv[0, 3] = float("inf")
    cos, sin = rope.rope_cos_sin(torch.tensor([3], device=DEVICE), torch.ones(4, device=DEVICE))
    cache = kv_cache(2, 4, 1, 8, torch.float32)
    triton_rope.rope_and_write_kv(qkv, 2, cos, sin, cache, torch.tensor([5], device=DEVICE))
    assert (cache[1, 1, 1] == float("inf")).all()


def test_heads_that_do_not_fit_are_refused():
    qkv, cache, slots = draw(2, 4, 8), kv_cache(2, 4, 1, 8, torch.float32), torch.zeros(2, dtype=torch.int32)
    cos, sin = rope.rope_cos_sin(torch.tensor([3, 4]), torch.ones(4))
    for change in (
        {"num_heads": 3},
        {"cache": cache.half()},
        {"slots": slots[:1]},
        {"cos": cos[..., :2]},
        {"heads": qkv[..., :6]},
    ):
        given = {
            "heads": qkv,
            "num_heads": 2,
            "cos": cos,
            "sin": sin,
            "cache": cache,
            "slots": slots,
        } | change
        with pytest.raises(ValueError, match="do not fit"):
            triton_rope.rope_and_write_kv(**given)
    with pytest.raises(ValueError, match="both"):
        triton_rope.rope_and_write_kv(qkv, 2, cos, sin, cache, slots, q_norm=draw(8))
    with pytest.raises(ValueError, match="size 8"):
        triton_rope.rope_and_write_kv(qkv, 2, cos, sin, cache, slots, q_norm=draw(8), k_norm=draw(7))
