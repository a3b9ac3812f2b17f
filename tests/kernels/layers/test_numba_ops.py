"""What is compiled for the CPU around a layer's products, against the functions it stands for."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import gelu

from loraplex.kernels.attention.kv_codes import head_width
from loraplex.kernels.attention.numba_attention import BLOCK, build_attention_batch
from loraplex.kernels.attention.torch_attention import build_attention_batch as torch_batch
from loraplex.kernels.layers.rope import rope_cos_sin
from loraplex.kernels.numba_backend import numba_ops
from loraplex.kernels.torch_backend import torch_ops
from support.kernels.numba_cache import packed_cache

pytestmark = pytest.mark.slow  # compiling them takes most of a minute

OURS, TORCH = numba_ops(), torch_ops()
DTYPES = [torch.float32, torch.bfloat16]
# A unit in the last place of bfloat16: sums are made in another order.
CLOSE = {torch.float32: {"atol": 1e-6, "rtol": 3e-6}, torch.bfloat16: {"atol": 1e-6, "rtol": 2**-7}}
NAN = float("nan")


def assert_close(got, want):
    assert got.dtype is want.dtype
    torch.testing.assert_close(got, want, equal_nan=True, **CLOSE[want.dtype])


def few_differ(got, want, share=0.01):
    """Rounded the same way, except near ties."""
    assert_close(got, want)
    assert (got != want).float().mean() <= share


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("weights", ["own", "float32"])
@pytest.mark.parametrize("shape", [(1, 576), (5, 37), (300, 576), (2, 3, 64), (4, 1), (0, 16)])
def test_norm(weights, shape, dtype):
    torch.manual_seed(0)
    x = torch.randn(*shape, dtype=dtype) * 3
    weight = torch.randn(shape[-1], dtype=torch.float32 if weights == "float32" else dtype)
    got, want = OURS.rms_norm(x, weight, 1e-5), TORCH.rms_norm(x, weight, 1e-5)
    if dtype is torch.bfloat16:
        few_differ(got, want) if got.numel() else assert_close(got, want)
    else:
        assert_close(got, want)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("weights", ["own", "float32"])
@pytest.mark.parametrize("shape", [(1, 576), (5, 37), (300, 576)])
def test_add_norm(weights, shape, dtype):
    torch.manual_seed(1)
    x, residual = torch.randn(*shape, dtype=dtype), torch.randn(*shape, dtype=dtype)
    weight = torch.randn(shape[-1], dtype=torch.float32 if weights == "float32" else dtype)
    ours, theirs = residual.clone(), residual.clone()
    got, want = OURS.add_rms_norm(x, ours, weight, 1e-5), TORCH.add_rms_norm(x, theirs, weight, 1e-5)
    assert torch.equal(ours, theirs)
    assert_close(got, want)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_sum_is_scaled_after_it_was_rounded_and_may_go_without_a_norm(dtype):
    x, residual, weight = torch.randn(5, 37, dtype=dtype), torch.randn(5, 37, dtype=dtype), torch.randn(37)
    ours, theirs, plain = residual.clone(), residual.clone(), residual.clone()
    got, want = (
        OURS.add_rms_norm(x, ours, weight, 1e-5, 0.7),
        TORCH.add_rms_norm(x, theirs, weight, 1e-5, 0.7),
    )
    assert torch.equal(ours, theirs)
    assert_close(got, want)
    OURS.add(plain, x)
    assert torch.equal(plain, residual + x)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("weights", ["own", "float32"])
def test_groups_of_a_row_are_normed_by_themselves(weights, dtype):
    torch.manual_seed(4)
    x = torch.randn(5, 3 * 37, dtype=dtype) * torch.logspace(-2, 2, 3).repeat_interleave(37).to(dtype)
    weight = torch.randn(3, 37, dtype=torch.float32 if weights == "float32" else dtype)
    got = OURS.rms_norm(x, weight, 1e-5)
    (assert_close if dtype is torch.float32 else few_differ)(got, TORCH.rms_norm(x, weight, 1e-5))
    for number in range(3):
        span = slice(37 * number, 37 * (number + 1))
        assert torch.equal(got[:, span], OURS.rms_norm(x[:, span].contiguous(), weight[number], 1e-5))
    with pytest.raises(ValueError, match="does not fit"):
        OURS.rms_norm(x[:, 1:], weight, 1e-5)
    with pytest.raises(ValueError, match="rows of 37 with 3 weights are 15, not 5"):
        OURS.add_rms_norm(x, x.clone(), weight, 1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_square_of_what_is_above_0(dtype):
    x = torch.randn(7, 45, dtype=dtype)[:, :37]
    x[1, 2], x[3, 4], x[0, 36] = NAN, float("inf"), -float("inf")
    assert torch.equal(OURS.squared_relu(x).nan_to_num(-1), TORCH.squared_relu(x).nan_to_num(-1))
    assert OURS.squared_relu(x)[1, 2].isnan()
    with pytest.raises(ValueError, match="are not rows"):
        OURS.squared_relu(x.T)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_times_a_number_and_norms_in_their_own_place(dtype):
    torch.manual_seed(5)
    wide, weight = torch.randn(6, 90, dtype=dtype), torch.randn(37, dtype=dtype)
    part = wide[:, 20:57]
    assert torch.equal(OURS.times(part, 0.7), part * 0.7)
    others, want = wide.clone(), OURS.rms_norm(part, weight, 1e-5)
    OURS.norm_in_place(part, weight, 1e-5)
    others[:, 20:57] = want
    assert torch.equal(wide, others)
    with pytest.raises(ValueError, match="are not rows"):
        OURS.norm_in_place(wide.T, weight, 1e-5)


@pytest.mark.parametrize("by_gelu", [False, True])
def test_a_gate_may_lie_apart_from_what_it_is_for(by_gelu):
    gate_up, wide = torch.randn(3, 74), torch.randn(3, 200)
    wide[:, 50:87] = gate_up[:, 37:]
    gate = gate_up[:, :37].contiguous()
    assert torch.equal(OURS.act_and_mul(gate, by_gelu, wide[:, 50:87]), OURS.act_and_mul(gate_up, by_gelu))
    with pytest.raises(ValueError, match="a gate of"):
        OURS.act_and_mul(gate, by_gelu, wide[:, 50:88])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("by_gelu", [False, True])
@pytest.mark.parametrize("shape", [(1, 3072), (7, 74), (100, 3072), (0, 8)])
def test_activation(by_gelu, shape, dtype):
    torch.manual_seed(2)
    x = torch.randn(*shape, dtype=dtype) * 4
    x[:, ::9] *= 20
    got = OURS.act_and_mul(x, by_gelu)
    gate, up = x.double().chunk(2, dim=-1)
    if not by_gelu:
        assert_close(got, TORCH.act_and_mul(x, False))
    else:
        # torch's has lost the digits where 1 + tanh is near 0.
        assert_close(got, (gelu(gate, approximate="tanh").to(dtype) * up.to(dtype)).to(dtype))


@pytest.mark.parametrize("by_gelu", [False, True])
def test_activation_of_what_is_not_finite(by_gelu):
    gate = torch.tensor([NAN, float("inf"), -float("inf"), 1e4, -1e4, 3e38, -3e38, -0.0])
    gate_up = torch.cat((gate, torch.full((8,), 2.0)))[None]
    want = TORCH.act_and_mul(gate_up, by_gelu)
    torch.testing.assert_close(OURS.act_and_mul(gate_up, by_gelu), want, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_stays_in_its_row(dtype):
    x = torch.randn(40, 1040, dtype=dtype)
    weight = torch.ones(1040, dtype=dtype)
    x[3, 1039] = NAN
    others = [row for row in range(40) if row != 3]
    normed = OURS.rms_norm(x, weight, 1e-5)
    assert normed[3].isnan().all()
    assert normed[others].isfinite().all()
    residual = torch.zeros_like(x)
    added = OURS.add_rms_norm(x, residual, weight, 1e-5)
    assert added[3].isnan().all()
    assert added[others].isfinite().all()
    active = OURS.act_and_mul(x, False)
    assert active[3, 519].isnan()
    assert active[others].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(1, 5), (3, 4099), (16, 4096), (0, 7)])
def test_to_float32(shape, dtype):
    x = torch.randn(*shape).to(dtype)
    assert torch.equal(OURS.to_float32(x), x.float())


def test_rows_may_lie_apart():
    x = torch.randn(6, 200, dtype=torch.bfloat16)
    weight = torch.randn(64, dtype=torch.bfloat16)
    part = x[:, 50:114]
    assert torch.equal(OURS.rms_norm(part, weight, 1e-5), OURS.rms_norm(part.contiguous(), weight, 1e-5))
    assert torch.equal(OURS.act_and_mul(part, False), OURS.act_and_mul(part.contiguous(), False))
    assert torch.equal(
        OURS.rms_norm(x.T, weight[:6], 1e-5), OURS.rms_norm(x.T.contiguous(), weight[:6], 1e-5)
    )


ROTATIONS = [(3, 1, 16, 16), (9, 3, 64, 64), (4, 2, 80, 32), (2, 2, 34, 34), (2, 1, 8, 4)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norms", [None, "own", "float32"])
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "rotated"), ROTATIONS)
@pytest.mark.parametrize("long", [False, True])
def test_rotation_and_write(heads, kv_heads, dim, rotated, norms, dtype, long):
    """In the cache's other order, what torch writes; and nothing else is touched."""
    torch.manual_seed(3)
    rows, lens = ([90, 1, 33], [90, 40, 50]) if long else ([1, 3, 2], [18, 3, 33])
    tables = [[7, 2, 11, 4, 9, 1], [0, 12, 3], [5, 10, 6, 8]]
    total = sum(rows)
    qkv = torch.randn(total, heads + 2 * kv_heads, dim).to(dtype)
    positions = torch.cat([torch.arange(n - r, n) for n, r in zip(lens, rows, strict=True)])
    cos, sin = rope_cos_sin(positions, torch.rand(rotated // 2))
    weights = [None, None]
    if norms is not None:
        weights = [torch.randn(dim, dtype=dtype if norms == "own" else torch.float32) for _ in range(2)]
    options = {"q_norm": weights[0], "k_norm": weights[1], "eps": 1e-6}
    before = torch.randn(13, BLOCK, 2, kv_heads, dim).to(dtype)
    ours, theirs = qkv.clone(), qkv.clone()
    packed, plain = packed_cache(before), before.clone()
    device = torch.device("cpu")
    layout = torch_batch(rows, lens, tables, block_size=BLOCK, max_gather_blocks=64, device=device)
    TORCH.rotate_and_write(theirs, heads, cos, sin, plain, layout, **options)
    batch = build_attention_batch(rows, lens, tables)
    assert torch.equal(batch.slots, layout.slots)
    OURS.rotate_and_write(ours, heads, cos, sin, packed, batch, **options)
    wide = {
        "atol": 2e-6 if dtype is torch.float32 else 2e-2,
        "rtol": 1e-5 if dtype is torch.float32 else 2**-6,
    }
    torch.testing.assert_close(ours[:, :heads], theirs[:, :heads], **wide)
    torch.testing.assert_close(packed, packed_cache(plain), **wide)
    written = packed_cache(plain) != packed_cache(before)
    assert torch.equal(packed[~written], packed_cache(before)[~written])
    if norms is None and dtype is torch.bfloat16:
        assert (ours[:, :heads] != theirs[:, :heads]).float().mean() < 0.01


@pytest.mark.parametrize("ops", [OURS, TORCH], ids=["numba", "torch"])
@pytest.mark.parametrize("codes", [False, True], ids=["floats", "codes"])
def test_gates_behind_queries_change_nothing_and_stay(codes, ops):
    torch.manual_seed(5)
    rows, heads, kv_heads, dim = 6, 3, 2, 64
    plain = torch.randn(rows, heads + 2 * kv_heads, dim)
    gates, weight = torch.randn(rows, heads, dim), torch.randn(dim)
    between = torch.stack((plain[:, :heads], gates), 2).flatten(1, 2)
    gated = torch.cat((between, plain[:, heads:]), 1)
    cos, sin = rope_cos_sin(torch.arange(30, 36), torch.rand(8))
    shape = 3, BLOCK, 2, kv_heads, head_width(dim, torch.int8 if codes else torch.float32)
    caches = [torch.zeros(shape, dtype=torch.int8 if codes else torch.float32) for _ in range(2)]
    given = [rows], [36], [[2, 0, 1]]
    batch = build_attention_batch(*given)
    if ops is TORCH:
        batch = torch_batch(*given, block_size=BLOCK, max_gather_blocks=64, device=torch.device("cpu"))
    norms = {"q_norm": weight, "k_norm": weight, "eps": 1e-6}
    ops.rotate_and_write(plain, heads, cos, sin, caches[0], batch, **norms)
    ops.rotate_and_write(gated, heads, cos, sin, caches[1], batch, **norms, gated=True)
    assert torch.equal(gated[:, : 2 * heads : 2], plain[:, :heads])
    assert torch.equal(gated[:, 1 : 2 * heads : 2], gates)
    assert torch.equal(*caches)
    assert caches[0].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_has_the_same_bits_alone_and_among_any_rows(dtype):
    """Norms, activation, rotation and what lies in the cache then: 1 to 40 rows, from any position of a block."""
    torch.manual_seed(4)
    total, heads, kv_heads, dim = 40, 3, 2, 48
    x, residual = torch.randn(total, 1000).to(dtype), torch.randn(total, 1000).to(dtype)
    weight = torch.randn(1000).to(dtype)
    head_weight = torch.randn(dim).to(dtype)
    qkv = torch.randn(total, heads + 2 * kv_heads, dim).to(dtype)
    cos, sin = rope_cos_sin(torch.arange(total), torch.rand(dim // 2))

    def pass_over(first, last, cache, past=5):
        """The rows from `first` on, of one sequence whose first row has `past` positions before it."""
        rows = slice(first, last)
        total_rows, length = last - first, past + last
        batch = build_attention_batch([total_rows], [length], [list(range(-(-length // BLOCK)))])
        turned, added = qkv[rows].clone(), residual[rows].clone()
        options = {"q_norm": head_weight, "k_norm": head_weight, "eps": 1e-6}
        OURS.rotate_and_write(turned, heads, cos[rows], sin[rows], cache, batch, **options)
        return (
            turned[:, :heads].flatten(1),
            OURS.rms_norm(x[rows], weight, 1e-5),
            OURS.add_rms_norm(x[rows], added, weight, 1e-5),
            added,
            OURS.act_and_mul(x[rows], False),
            OURS.act_and_mul(x[rows], True),
        )

    def empty_cache():
        return torch.zeros(3, BLOCK, 2, kv_heads, dim, dtype=dtype)

    caches = [empty_cache()]
    alone = [pass_over(row, row + 1, caches[0]) for row in range(total)]
    wanted = [torch.cat(parts) for parts in zip(*alone, strict=True)]
    for size in range(2, total + 1):
        caches.append(empty_cache())
        found = [pass_over(first, min(first + size, total), caches[-1]) for first in range(0, total, size)]
        assert all(
            torch.equal(torch.cat(parts), want)
            for parts, want in zip(zip(*found, strict=True), wanted, strict=True)
        ), size
        assert torch.equal(caches[-1], caches[0]), size


def test_operands_that_do_not_fit_are_refused():
    x = torch.zeros(2, 8)
    with pytest.raises(ValueError, match="weight"):
        OURS.rms_norm(x, torch.ones(7), 1e-5)
    with pytest.raises(ValueError, match="can't be added"):
        OURS.add_rms_norm(x, x[:1], torch.ones(8), 1e-5)
    with pytest.raises(ValueError, match="gate"):
        OURS.act_and_mul(torch.zeros(2, 7), False)
    batch = build_attention_batch([1], [1], [[0]])
    cache = torch.zeros(1, BLOCK, 2, 1, 8)
    cos = torch.zeros(1, 1, 4)
    none = {"q_norm": None, "k_norm": None, "eps": 1e-5}
    with pytest.raises(ValueError, match="do not fit"):
        OURS.rotate_and_write(torch.zeros(1, 5, 8), 2, cos, cos, cache, batch, **none)
    with pytest.raises(ValueError, match="do not fit"):
        OURS.rotate_and_write(
            torch.zeros(2, 4, 8), 2, cos.expand(2, 1, 4), cos.expand(2, 1, 4), cache, batch, **none
        )
    with pytest.raises(ValueError, match="both normed"):
        OURS.rotate_and_write(
            torch.zeros(1, 4, 8), 2, cos, cos, cache, batch, q_norm=torch.ones(8), k_norm=None, eps=1e-5
        )
