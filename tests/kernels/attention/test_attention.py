"""Paged attention against the formula, position by position, in float64."""

from __future__ import annotations

import random

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from loraplex.kernels.attention import torch_attention as attention_torch
from loraplex.kernels.attention.torch_attention import build_attention_batch, paged_attention, write_kv

BLOCK = 4
CPU = torch.device("cpu")


def reference(q, k, v, start, *, scale, window, softcap):
    """q [n, Hq, D] at positions start…; k, v [L, Hkv, D]; the formula of `attention.torch_attention`."""
    out = torch.empty(q.shape, dtype=torch.float64)
    group = q.shape[1] // k.shape[1]
    for t in range(q.shape[0]):
        position = start + t
        first = 0 if window is None else max(0, position - window + 1)
        for h in range(q.shape[1]):
            keys = k[first : position + 1, h // group].double()
            scores = keys @ q[t, h].double() * scale
            if softcap is not None:
                scores = torch.tanh(scores / softcap) * softcap
            out[t, h] = scores.softmax(0) @ v[first : position + 1, h // group].double()
    return out


def scatter(tables, keys, values, num_blocks, dtype):
    """A cache with the sequences' past in it; what nobody wrote is zero inside their blocks, NaN elsewhere."""
    _, heads, dim = keys[0].shape
    cache = torch.full((num_blocks, BLOCK, 2, heads, dim), float("nan"), dtype=dtype)
    for table, k, v in zip(tables, keys, values, strict=True):
        cache[table] = 0
        for position in range(len(k)):
            cache[table[position // BLOCK], position % BLOCK] = torch.stack((k[position], v[position]))
    return cache


@pytest.mark.parametrize("window", [None, 1, 5])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 4, 8), (6, 2, 16), (9, 3, 64), (3, 1, 8)])
@pytest.mark.parametrize("limit", [1, 5, 1000])
def test_ragged_batches_equal_the_formula(window, softcap, heads, kv_heads, dim, limit):
    rng = random.Random(f"{window}{heads}{limit}")
    torch.manual_seed(heads)
    lens = [1, 2, 4, 5, 13, 21, 30, 7, 8]
    rows = [1, 2, 1, 1, 5, 21, 1, 3, 1]
    blocks = list(range(sum(-(-n // BLOCK) for n in lens) + 2))
    rng.shuffle(blocks)
    tables = [[blocks.pop() for _ in range(-(-n // BLOCK))] for n in lens]
    keys = [torch.randn(n, kv_heads, dim) for n in lens]
    values = [torch.randn(n, kv_heads, dim) for n in lens]
    past = [n - r for n, r in zip(lens, rows, strict=True)]
    cache = scatter(
        tables, [k[:p] for k, p in zip(keys, past, strict=True)], [v[:p] for v, p in zip(values, past, strict=True)],
        max(max(t) for t in tables) + 3, torch.float32,
    )  # fmt: skip
    batch = build_attention_batch(rows, lens, tables, block_size=BLOCK, max_gather_blocks=limit, device=CPU)
    q = torch.randn(sum(rows), heads, dim)
    new = torch.cat([torch.stack((k[p:], v[p:]), 1) for k, v, p in zip(keys, values, past, strict=True)])
    write_kv(new, cache, batch)
    scale = 0.3
    got = paged_attention(q, cache, batch, scale=scale, window=window, softcap=softcap)
    first = 0
    for n, r, k, v, p in zip(lens, rows, keys, values, past, strict=True):
        want = reference(q[first : first + r], k, v, p, scale=scale, window=window, softcap=softcap)
        torch.testing.assert_close(
            got[first : first + r].double(), want, atol=1e-5, rtol=1e-5, msg=f"length {n}"
        )
        first += r


def test_long_prompts_are_tiled(monkeypatch):
    """The mask of a long chunk is made piece by piece, and the answer is the same."""
    torch.manual_seed(0)
    k, v, q = torch.randn(50, 2, 8), torch.randn(50, 2, 8), torch.randn(20, 4, 8)
    table = [list(range(13))]
    cache = scatter(table, [k[:30]], [v[:30]], 13, torch.float32)
    batch = build_attention_batch([20], [50], table, block_size=BLOCK, max_gather_blocks=9, device=CPU)
    write_kv(torch.stack((k[30:], v[30:]), 1), cache, batch)
    monkeypatch.setattr(attention_torch, "_MAX_MASK_ELEMENTS", 170)
    got = paged_attention(q, cache, batch, scale=0.5)
    assert [view.mask for view in batch.prefill_views.values()] == [None]
    want = reference(q, k, v, 30, scale=0.5, window=None, softcap=None)
    torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("limit", [2000, 170])
def test_softcapped_scores_are_tiled(monkeypatch, limit):
    """With a softcap, the scores of all heads exist at once: a chunk is cut into pieces that bound them, whether its
    mask is small enough to be kept or not."""
    torch.manual_seed(0)
    k, v, q = torch.randn(50, 2, 8), torch.randn(50, 2, 8), torch.randn(20, 4, 8)
    table = [list(range(13))]
    cache = scatter(table, [k[:30]], [v[:30]], 13, torch.float32)
    batch = build_attention_batch([20], [50], table, block_size=BLOCK, max_gather_blocks=9, device=CPU)
    write_kv(torch.stack((k[30:], v[30:]), 1), cache, batch)
    monkeypatch.setattr(attention_torch, "_MAX_MASK_ELEMENTS", limit)
    sizes = []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.tanh_.default:
                sizes.append(args[0].numel())
            return func(*args, **(kwargs or {}))

    with Sizes():
        got = paged_attention(q, cache, batch, scale=0.5, softcap=2.0)
    assert sum(sizes) == 4 * 20 * 50
    assert max(sizes) <= max(limit, 4 * 50)
    kept = [view.mask is not None for view in batch.prefill_views.values()]
    assert kept == [limit >= 20 * 50]
    want = reference(q, k, v, 30, scale=0.5, window=None, softcap=2.0)
    torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("window", [1, 3, 4, 5, 8, 9])
@pytest.mark.parametrize("rows", [1, 2, 7])
def test_blocks_before_a_window_are_not_read(window, rows):
    """Sequences of many lengths: what lies in blocks that no query sees may be anything."""
    torch.manual_seed(window)
    lens = [rows + n for n in (0, 3, 4, 9, 18, 21, 40)]
    tables, blocks = [], iter(torch.randperm(200).tolist())
    keys, values = [torch.randn(n, 2, 8) for n in lens], [torch.randn(n, 2, 8) for n in lens]
    tables = [[next(blocks) for _ in range(-(-n // BLOCK))] for n in lens]
    past = [n - rows for n in lens]
    cache = scatter(
        tables, [k[:p] for k, p in zip(keys, past, strict=True)], [v[:p] for v, p in zip(values, past, strict=True)],
        200, torch.float32,
    )  # fmt: skip
    for table, start in zip(tables, past, strict=True):
        cache[table[: max(0, start - window + 1) // BLOCK]] = float("nan")
    batch = build_attention_batch(
        [rows] * len(lens), lens, tables, block_size=BLOCK, max_gather_blocks=100, device=CPU
    )
    new = [torch.stack((k[p:], v[p:]), 1) for k, v, p in zip(keys, values, past, strict=True)]
    write_kv(torch.cat(new), cache, batch)
    q = torch.randn(rows * len(lens), 4, 8)
    for softcap in (None, 2.0):
        got = paged_attention(q, cache, batch, scale=0.5, window=window, softcap=softcap).double()
        for i, (k, v, p) in enumerate(zip(keys, values, past, strict=True)):
            part = slice(i * rows, (i + 1) * rows)
            want = reference(q[part], k, v, p, scale=0.5, window=window, softcap=softcap)
            torch.testing.assert_close(got[part], want, atol=1e-5, rtol=1e-5)


def test_bfloat16_is_as_near_as_its_rounding():
    torch.manual_seed(0)
    k, v, q = (torch.randn(40, heads, 16).bfloat16() for heads in (2, 2, 4))
    table = [list(range(10))]
    cache = scatter(table, [k[:20]], [v[:20]], 10, torch.bfloat16)
    batch = build_attention_batch([20], [40], table, block_size=BLOCK, max_gather_blocks=9, device=CPU)
    write_kv(torch.stack((k[20:], v[20:]), 1), cache, batch)
    got = paged_attention(q[:20], cache, batch, scale=0.25)
    want = reference(q[:20], k, v, 20, scale=0.25, window=None, softcap=None)
    torch.testing.assert_close(got.double(), want, atol=1e-2, rtol=2e-2)


def test_gathers_keep_to_their_limit_and_lengths_are_alike():
    lens = [400, 390, 40, 36, 33, 9, 1]
    tables = [[0] * -(-n // BLOCK) for n in lens]
    batch = build_attention_batch([1] * 7, lens, tables, block_size=BLOCK, max_gather_blocks=150, device=CPU)
    sizes = [(group.num_blocks, len(group.rows)) for group in batch.decode]
    assert sum(rows for _, rows in sizes) == 7
    assert all(blocks * rows <= 150 or rows == 1 for blocks, rows in sizes)
    assert sizes == [(100, 1), (98, 1), (10, 3), (3, 2)]


def test_a_table_that_is_too_short_raises():
    with pytest.raises(ValueError, match="do not fit"):
        build_attention_batch([1], [17], [[0]], block_size=16, max_gather_blocks=9, device=CPU)
