"""A recurrent layer's sequences in random steps, and the rule in float64."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass

import pytest
import torch

from loraplex.kernels.recurrent import WINDOW
from loraplex.kernels.recurrent.kernel import RecurrentOps
from loraplex.kernels.recurrent.types import (
    RecurrentHeads,
    RecurrentMemory,
    RecurrentRows,
    RecurrentUnit,
    lay_out_units,
    recurrent_bytes,
    recurrent_memory,
)

STATES, WINDOWS = 6, 3
INTERPRETED = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="operands are the CPU's")


@dataclass
class Sequence:
    """What a layer is given of each position, and its parameters."""

    heads: RecurrentHeads
    x: torch.Tensor
    decay: torch.Tensor
    beta: torch.Tensor
    weight: torch.Tensor
    skip: torch.Tensor | None = None
    """None: of a delta net; else of a Mamba-2, whose rows have values before keys before queries."""

    def __len__(self) -> int:
        return len(self.x)


def sequence(
    heads: RecurrentHeads,
    length: int,
    strength: float,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    mamba: bool = False,
) -> Sequence:
    """Decays down to e^-strength."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(length, heads.channels, generator=generator).to(dtype)
    decay = torch.exp(-torch.rand(length, heads.value_heads, generator=generator) * strength)
    beta = torch.rand(length, heads.value_heads, generator=generator)
    weight = torch.randn(heads.width, heads.channels, generator=generator) / 2
    skip = torch.randn(heads.value_heads, generator=generator) if mamba else None
    return Sequence(heads, x, decay, beta, weight, skip)


def spoilt_memory(heads: RecurrentHeads, dtype: torch.dtype) -> RecurrentMemory:
    """All of it NaN, as the last owner may have left it. Rows hold another layer's bytes too."""
    sizes = zip((STATES, WINDOWS), recurrent_bytes(heads, dtype), strict=True)
    storage = [torch.full((count, num_bytes + 128), 255, dtype=torch.uint8) for count, num_bytes in sizes]
    return recurrent_memory(heads, dtype, *(rows[:, 64:-64] for rows in storage))


def targets_of(start: int, count: int, state: int) -> tuple[int, ...]:
    return (state,) * ((start + count) // WINDOW - start // WINDOW)


def run_rows(
    ops: RecurrentOps, own: Sequence, rows: RecurrentRows, memory: RecurrentMemory, x, decay, beta
) -> torch.Tensor:
    convolved = ops.convolve(x, own.weight, rows, memory)
    return ops.rule(convolved, decay, beta, rows, memory, own.heads, own.skip)


def run_whole(ops: RecurrentOps, own: Sequence, memory: RecurrentMemory) -> torch.Tensor:
    unit = RecurrentUnit(range(len(own)), 0, 1, 2, targets_of(0, len(own), 2))
    return run_rows(ops, own, lay_out_units([unit]), memory, own.x, own.decay, own.beta)


def run_in_steps(ops: RecurrentOps, own: Sequence, memory: RecurrentMemory, seed: int) -> torch.Tensor:
    """The outputs of all positions, from random steps: others' rows among its own, drafts that are thrown away, a fresh
    state at some ends of a window."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    heads = own.heads
    out, done, state = torch.empty(len(own), heads.value_heads * heads.value_dim, dtype=own.x.dtype), 0, 2
    while done < len(own):
        count = min(len(own) - done, rng.choice((1, 1, 2, 3, 7, 16, 17, 40, 100)))
        last = (done + count - 1) % WINDOW
        drafted = min(rng.choice((0, 0, 3, 8)), 15 if last == 15 else 14 - last)
        fresh = [rng.choice((state, 5 - state)) for _ in targets_of(done, count, 0)]
        places = rng.sample((0, 2), rng.randrange(3))
        others = [(rng.randrange(1, 40), rng.randrange(80), place, place * 2) for place in places]
        total = count + drafted + sum(rows for rows, *_ in others)
        where = rng.sample(range(total), total)
        x = torch.randn(total, heads.channels, generator=generator).to(own.x.dtype)
        decay, beta = (torch.rand(total, heads.value_heads, generator=generator) for _ in range(2))
        mine = sorted(where[: count + drafted])
        units, at = [RecurrentUnit(mine, done, 1, state, fresh)], count + drafted
        for rows, start, window, other in others:
            units.append(
                RecurrentUnit(where[at : at + rows], start, window, other, targets_of(start, rows, other))
            )
            at += rows
        span = slice(done, done + count)
        x[mine[:count]], decay[mine[:count]], beta[mine[:count]] = (
            own.x[span],
            own.decay[span],
            own.beta[span],
        )
        rng.shuffle(units)
        out[span] = run_rows(ops, own, lay_out_units(units), memory, x, decay, beta)[mine[:count]]
        state = fresh[-1] if fresh else state
        done += count
    return out


def in_float64(own: Sequence) -> torch.Tensor:
    """The recurrence of the rule, of convolved rows, in float64: [T, Hv·Dv]."""
    heads, length = own.heads, len(own)
    padded = torch.cat((torch.zeros(heads.width - 1, heads.channels), own.x.float())).double()
    rows = sum(padded[step : step + length] * own.weight[step].double() for step in range(heads.width))
    return rule_in_float64(own, torch.nn.functional.silu(rows))


def rule_in_float64(own: Sequence, rows: torch.Tensor) -> torch.Tensor:
    """Answers of the rule for rows [T, C] that are convolved."""
    heads, length = own.heads, len(own)
    keys, values, skip = heads.key_heads * heads.key_dim, heads.value_heads * heads.value_dim, own.skip
    q, k, v = (
        rows.split((keys, keys, values), 1) if skip is None else rows.split((values, keys, keys), 1)[::-1]
    )
    q, k = (part.unflatten(1, (heads.key_heads, -1)) for part in (q, k))
    if skip is None:
        q, k = (part / (part.square().sum(-1, keepdim=True) + 1e-6).sqrt() for part in (q, k))
        q = q * heads.key_dim**-0.5
    group = heads.value_heads // heads.key_heads
    q, k = (part.repeat_interleave(group, 1) for part in (q, k))
    v = v.unflatten(1, (heads.value_heads, -1))
    state = torch.zeros(heads.value_heads, heads.key_dim, heads.value_dim, dtype=torch.float64)
    out = torch.empty_like(v)
    for t in range(length):
        state = state * own.decay[t].double()[:, None, None]
        known = torch.einsum("hkv,hk->hv", state, k[t]) if skip is None else 0.0
        update = (v[t] - known) * own.beta[t].double()[:, None]
        state = state + k[t][:, :, None] * update[:, None]
        out[t] = torch.einsum("hkv,hk->hv", state, q[t])
        if skip is not None:
            out[t] += skip.double()[:, None] * v[t]
    return out.flatten(1)
