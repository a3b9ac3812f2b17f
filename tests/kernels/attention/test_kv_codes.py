"""Keys and values as codes of 8 bits: the format, and what each backend writes of it and reads from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from loraplex.kernels.attention.kernel import AttentionKernel, AttentionNeeds
from loraplex.kernels.attention.kv_codes import (
    from_codes,
    head_width,
    is_transformed,
    pack_rows,
    to_codes,
    transform_factors,
    transform_keys,
    transform_queries,
    unpack_rows,
)
from loraplex.kernels.attention.torch_attention import TorchAttention
from loraplex.kernels.attention.triton_attention import cache_operands
from loraplex.kernels.attention.triton_kernel import TritonAttention
from loraplex.kernels.attention.triton_tiling import AttentionShape
from loraplex.kernels.ops import Ops
from support.kernels.kv_write import write_kv
from support.kernels.numba_cache import unpacked_codes
from support.kernels.paged import expected_attention, paged_step
from support.kernels.poison import poison_new_memory

DEVICE = torch.device("cpu")
ROWS, LENS = [1, 2, 1, 5, 18, 1], [1, 2, 7, 13, 50, 75]
BLOCK = 16
# numba compiles for most of a minute.
BACKENDS = ["torch", "triton", pytest.param("numba", marks=pytest.mark.slow)]

pytestmark = [
    pytest.mark.usefixtures("quick_interpreter"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # what is not finite here is meant to be
]


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    poison_new_memory(monkeypatch)


@dataclass
class Backend:
    """`unpack`: the numbers [N, 16, 2, Hkv, D] of a cache of codes in the kernel's own order."""

    attention: AttentionKernel
    ops: Ops
    unpack: Callable[[torch.Tensor], torch.Tensor]


def backend_of(name: str, shape: AttentionShape, window: int | None = None) -> Backend:
    needs = AttentionNeeds(shape, (window,), False)
    if name == "triton":
        from loraplex.kernels.triton_backend import triton_ops

        attention = TritonAttention(needs, torch.float32, DEVICE)
        return Backend(attention, triton_ops(device=DEVICE), unpacked_triton)
    if name == "numba":
        from loraplex.kernels.attention.numba_kernel import NumbaAttention
        from loraplex.kernels.numba_backend import numba_ops

        return Backend(NumbaAttention(), numba_ops(), unpacked_codes)
    from loraplex.kernels.torch_backend import torch_ops

    kernel = TorchAttention(shape.num_kv_heads, shape.head_dim, torch.float32, DEVICE)
    return Backend(kernel, torch_ops(), lambda cache: unpack_rows(cache, torch.float32))


def unpacked_triton(cache: torch.Tensor) -> torch.Tensor:
    num_blocks, positions, _, heads, width = cache.shape
    operands = cache_operands(cache)
    codes = cache.as_strided((num_blocks, positions, 2, heads, width - 2), (*operands.strides, 1))
    strides = (cache.stride(0) // 2, 1, operands.scales_kind, positions)
    return from_codes(
        codes, operands.scales.as_strided((num_blocks, positions, 2, heads), strides), torch.float32
    )


def cache_of_anything(kernel: AttentionKernel, num_blocks: int, kv_heads: int, dim: int) -> torch.Tensor:
    """Scales that are NaN, unless the kernel reads what is not written. Blocks of one head lie apart."""
    return make_cache(num_blocks, kv_heads, dim, 0 if kernel.reads_unwritten else 127)


def make_cache(num_blocks: int, kv_heads: int, dim: int, value: int) -> torch.Tensor:
    shape, gap = (BLOCK, 2, kv_heads, head_width(dim, torch.int8)), 64 if kv_heads == 1 else 0
    memory = torch.full((num_blocks, gap + prod(shape)), value, dtype=torch.int8)
    return memory[:, gap:].view(num_blocks, *shape)


def transformed(x: torch.Tensor, which: int) -> torch.Tensor:
    """[…, D] by the matrix H of its definition, of queries (`which` 0) or keys (1); as it is where there is none."""
    dim = x.shape[-1]
    if not is_transformed(dim):
        return x
    signs = [[-1.0 if (i & j).bit_count() % 2 else 1.0 for j in range(dim)] for i in range(dim)]
    return (x.double() @ torch.tensor(signs, dtype=torch.float64) * transform_factors(dim)[which]).float()


def test_a_code_is_within_half_a_step_of_its_number() -> None:
    x = torch.randn(50, 2, 3, 64) * torch.logspace(-3, 3, 50)[:, None, None, None]
    codes, scales = to_codes(x)
    assert codes.dtype is torch.int8
    assert scales.dtype is torch.float16
    assert scales.shape == x.shape[:-1]
    steps = scales.double()[..., None]
    # The scale is rounded too: the largest numbers may lie half a thousandth beyond 127 steps.
    assert ((x.double() - from_codes(codes, scales, torch.float64)).abs() <= 0.57 * steps).all()
    assert (codes.abs().amax(-1) == 127).all()
    assert torch.equal(unpack_rows(pack_rows(x), torch.float32), from_codes(codes, scales, torch.float32))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_spoils_its_own_head_alone(bad: float) -> None:
    x = torch.randn(4, 2, 3, 16)
    clean = unpack_rows(pack_rows(x), torch.float32)
    x[2, 1, 0, 5] = bad
    got = unpack_rows(pack_rows(x), torch.float32)
    assert got[2, 1, 0].isnan().all()
    got[2, 1, 0] = clean[2, 1, 0]
    assert torch.equal(got, clean)


def test_zeros_and_the_largest_numbers() -> None:
    assert not unpack_rows(pack_rows(torch.zeros(3, 8)), torch.float32).any()
    huge = unpack_rows(pack_rows(torch.tensor([[3e38, -1.0]])), torch.float32)
    assert huge.isfinite().all()
    assert huge[0, 0] == 127 * 65504.0


@pytest.mark.parametrize("dim", [16, 64, 128, 256])
def test_a_transform_changes_no_score_and_spreads_a_large_number(dim: int) -> None:
    """A channel of keys that is 30 times the others leaves scores over codes four times as exact, or more."""
    generator = torch.Generator().manual_seed(dim)
    q, k = torch.randn(2, 400, dim, generator=generator)
    k[:, 5] *= 30
    right = (q.double() * k).sum(-1)
    turned, keys = transform_queries(q), transform_keys(k)
    torch.testing.assert_close((turned.double() * keys).sum(-1), right, atol=1e-4, rtol=1e-5)

    def error(queries: torch.Tensor, numbers: torch.Tensor) -> float:
        read = from_codes(*to_codes(numbers), torch.float64)
        return float(((queries * read).sum(-1) - right).square().mean().sqrt())

    assert error(turned, keys) < error(q, k) / (4 if dim > 16 else 1.5)


@pytest.mark.parametrize("dim", [8, 80, 96])
def test_heads_of_other_sizes_keep_their_numbers(dim: int) -> None:
    x = torch.randn(3, 2, dim)
    assert torch.equal(transform_queries(x), x)
    assert torch.equal(transform_keys(x), x)


@pytest.mark.parametrize(
    ("backend", "heads", "kv_heads", "dim", "window", "softcap", "dtype"),
    [
        pytest.param(backend, *asked, marks=mark)
        for backend, marks in (
            ("torch", ((), (), ())),
            ("triton", ((), (), ())),
            # numba compiles for most of a minute, and for float16 again.
            ("numba", (pytest.mark.slow, pytest.mark.slow, pytest.mark.soak)),
        )
        for asked, mark in zip(
            (
                (4, 2, 64, None, None, torch.float32),
                (7, 1, 34, 5, 1.5, torch.float32),
                (8, 2, 16, 33, None, torch.float16),
            ),
            marks,
            strict=True,
        )
    ],
)
def test_attention_over_codes_equals_the_formula(
    backend: str, heads: int, kv_heads: int, dim: int, window: int | None, softcap: float | None, dtype: Any
) -> None:
    step = paged_step(
        ROWS, LENS, heads=heads, kv_heads=kv_heads, head_dim=dim, block_size=BLOCK, dtype=dtype, window=window
    )
    kernel = backend_of(backend, AttentionShape(heads, kv_heads, dim, BLOCK), window).attention
    cache = cache_of_anything(kernel, len(step.cache), kv_heads, dim)
    if window is None or kernel.reads_unwritten:
        written = [torch.stack((k, v), 1) for k, v in zip(step.keys, step.values, strict=True)]
        write_kv(kernel, torch.cat(written), cache, kernel.lay_out(LENS, LENS, step.tables))
    else:  # what lies before the window may be anybody's
        for count, length, table, k, v in zip(ROWS, LENS, step.tables, step.keys, step.values, strict=True):
            at = range(max(0, length - count - window + 1), length)
            slots = torch.tensor([table[p // BLOCK] * BLOCK + p % BLOCK for p in at])
            write_kv(kernel, torch.stack((k, v), 1)[at], cache, SimpleNamespace(slots=slots))
    batch = kernel.lay_out(ROWS, LENS, step.tables)
    got = kernel.run(step.q, cache, batch, scale=0.3, window=window, softcap=softcap)
    for numbers in (step.keys, step.values):
        numbers[:] = [from_codes(*to_codes(x), torch.float64) for x in numbers]
    want = expected_attention(step, scale=0.3, window=window, softcap=softcap)
    assert got.dtype is dtype
    tolerance = 1e-5 if dtype is torch.float32 else 4e-3
    torch.testing.assert_close(got.double(), want, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "rotated"),
    [(4, 2, 16, 16), (3, 1, 34, 20), (8, 2, 64, 40), (2, 1, 128, 128)],
)
@pytest.mark.parametrize("normed", [False, True])
def test_keys_and_values_are_rotated_and_written_as_codes(
    backend: str, heads: int, kv_heads: int, dim: int, rotated: int, normed: bool
) -> None:
    """As the reference writes them without codes, and nowhere else."""
    rows, lens, tables = [3, 1, 20], [3, 18, 20], [[4], [0, 6], [2, 1]]
    generator = torch.Generator().manual_seed(heads)
    qkv = torch.randn(sum(rows), heads + 2 * kv_heads, dim, generator=generator)
    angles = torch.rand(sum(rows), 1, rotated // 2, generator=generator)
    weights = {"q_norm": torch.rand(dim), "k_norm": torch.rand(dim)} if normed else {}
    norms: Any = {"q_norm": None, "k_norm": None, "eps": 1e-6} | weights
    shape = AttentionShape(heads, kv_heads, dim, BLOCK)
    plain = backend_of("torch", shape)
    want = torch.full((8, BLOCK, 2, kv_heads, dim), float("nan"))
    turned = qkv.clone()
    plain.ops.rotate_and_write(
        turned,
        heads,
        angles.cos(),
        angles.sin(),
        want,
        plain.attention.lay_out(rows, lens, tables),
        **norms,
    )
    tested = backend_of(backend, shape)
    cache = make_cache(8, kv_heads, dim, 127)
    tested.ops.rotate_and_write(
        qkv, heads, angles.cos(), angles.sin(), cache, tested.attention.lay_out(rows, lens, tables), **norms
    )
    got = tested.unpack(cache)
    torch.testing.assert_close(qkv[:, :heads], transformed(turned[:, :heads], 0), atol=1e-5, rtol=1e-5)
    want[:, :, 0] = transformed(want[:, :, 0], 1)
    assert torch.equal(got.isnan(), want.isnan())
    # A number that lies between two codes may go to either, by its last digit.
    steps = want.abs().amax(-1, keepdim=True) / 127
    assert ((got - want).abs() <= 0.57 * steps)[~want.isnan()].all()
    values, expected = got[:, :, 1], from_codes(*to_codes(want[:, :, 1]), torch.float32)
    assert torch.equal(values.nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kinds", [0, 1, 2])
@pytest.mark.parametrize(("dim", "rotated"), [(16, 16), (34, 20)])
@pytest.mark.parametrize("codes", [False, True])
def test_values_are_normed_are_the_keys_or_another_layers(
    backend: str, kinds: int, dim: int, rotated: int, codes: bool
) -> None:
    """What the backend does with values that were normed beforehand, or with queries alone. Whole numbers, so that
    sums are exact in any order."""
    rows, lens, tables = [3, 1, 20], [3, 18, 20], [[4], [0, 6], [2, 1]]
    heads, kv_heads, total = 4, 2, 24
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randint(-9, 9, (total, n, dim), generator=generator).float() for n in (heads, 2, 2))
    angles = torch.rand(total, 1, rotated // 2, generator=generator)
    norms: Any = {"q_norm": torch.rand(dim), "k_norm": torch.rand(dim), "eps": 1e-6}
    v_norm = torch.rand(dim)
    tested = backend_of(backend, AttentionShape(heads, kv_heads, dim, BLOCK))
    laid_out = tested.attention.lay_out(rows, lens, tables)
    width, dtype = (head_width(dim, torch.int8), torch.int8) if codes else (dim, torch.float32)

    def written(given: torch.Tensor, **norms: Any) -> tuple[torch.Tensor, torch.Tensor]:
        cache = torch.full((8, BLOCK, 2, kv_heads, width), 77, dtype=dtype)
        tested.ops.rotate_and_write(given, heads, angles.cos(), angles.sin(), cache, laid_out, **norms)
        return given[:, :heads], cache

    own = v if kinds == 2 else k
    normed = tested.ops.rms_norm(own.reshape(-1, dim), v_norm, 1e-6).view_as(own)
    queries, cache = written(torch.cat((q, k, normed), 1), **norms)
    if kinds == 0:
        cache = torch.full_like(cache, 77)
    found = written(torch.cat((q, k, v)[: 1 + kinds], 1), **norms, v_norm=v_norm)
    assert torch.equal(found[0], queries)
    assert torch.equal(found[1], cache)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_key_that_is_not_finite_shows_in_its_own_head_alone(backend: str) -> None:
    tested = backend_of(backend, AttentionShape(2, 1, 16, BLOCK))
    qkv = torch.randn(5, 4, 16, generator=torch.Generator().manual_seed(0))
    qkv[3, 2, 5] = float("inf")
    ones, zeros = torch.ones(5, 1, 8), torch.zeros(5, 1, 8)
    cache = torch.zeros(1, BLOCK, 2, 1, 18, dtype=torch.int8)
    batch = tested.attention.lay_out([5], [5], [[0]])
    tested.ops.rotate_and_write(qkv, 2, ones, zeros, cache, batch, q_norm=None, k_norm=None, eps=0.0)
    spoilt = tested.unpack(cache).isnan()
    assert spoilt[0, 3, 0].all()
    assert int(spoilt.sum()) == 16
