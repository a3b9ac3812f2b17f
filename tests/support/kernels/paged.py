"""Steps over a paged KV cache that holds NaN wherever nothing may be read, and their attention in float64."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class PagedStep:
    """Sequence i has num_rows[i] rows of q [T, Hq, D], the last of its seq_lens[i] positions, whose keys[i] and
    values[i] [L, Hkv, D] lie in the blocks tables[i] of cache [N, P, 2, Hkv, D]."""

    num_rows: list[int]
    seq_lens: list[int]
    tables: list[list[int]]
    q: torch.Tensor
    cache: torch.Tensor
    keys: list[torch.Tensor]
    values: list[torch.Tensor]


def paged_step(
    num_rows: Sequence[int],
    seq_lens: Sequence[int],
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int = 4,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    window: int | None = None,
    seed: int = 0,
) -> PagedStep:
    """Random numbers, blocks in any order. NaN are: blocks of nobody, what is behind a sequence's end in its last
    block, and with a window what lies before that of a sequence's first row."""
    generator = torch.Generator(device).manual_seed(seed)
    needed = [-(-length // block_size) for length in seq_lens]
    blocks = list(range(sum(needed) + 3))
    random.Random(seed).shuffle(blocks)
    tables = [[blocks.pop() for _ in range(count)] for count in needed]

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(dtype)

    cache = torch.full(
        (sum(needed) + 3, block_size, 2, kv_heads, head_dim), float("nan"), dtype=dtype, device=device
    )
    flat = cache.view(-1, 2, kv_heads, head_dim)
    keys, values = [], []
    for count, length, table in zip(num_rows, seq_lens, tables, strict=True):
        k, v = draw(length, kv_heads, head_dim), draw(length, kv_heads, head_dim)
        first = 0 if window is None else max(0, length - count - window + 1)
        positions = torch.arange(first, length, device=device)
        at = torch.tensor(table, device=device)[positions // block_size] * block_size + positions % block_size
        flat[at] = torch.stack((k[first:], v[first:]), 1)
        keys.append(k)
        values.append(v)
    q = draw(sum(num_rows), heads, head_dim)
    return PagedStep(list(num_rows), list(seq_lens), tables, q, cache, keys, values)


def expected_attention(
    step: PagedStep,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """The formula of `loraplex.kernels.attention.torch_attention` in float64, [T, Hq, D]."""
    out = torch.empty(step.q.shape, dtype=torch.float64, device=step.q.device)
    row = 0
    for count, length, k, v in zip(step.num_rows, step.seq_lens, step.keys, step.values, strict=True):
        position = torch.arange(length - count, length, device=k.device)[:, None]
        j = torch.arange(length, device=k.device)
        hidden = j > position
        if window is not None:
            hidden |= j <= position - window
        group = step.q.shape[1] // k.shape[1]
        for head in range(step.q.shape[1]):
            scores = step.q[row : row + count, head].double() @ k[:, head // group].double().T * scale
            if softcap is not None:
                scores = torch.tanh(scores / softcap) * softcap
            scores = scores.masked_fill(hidden, float("-inf"))
            if sinks is not None:
                scores = torch.cat((scores, sinks[head].double().expand(count, 1)), 1)
            weights = scores.softmax(1)[:, :length]
            out[row : row + count, head] = weights @ v[:, head // group].double()
        row += count
    return out
