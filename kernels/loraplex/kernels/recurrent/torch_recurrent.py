"""Gated delta nets in torch's operations: the formulas, and what other implementations are compared with.

Yang, Kautz and Hatamizadeh, "Gated Delta Networks", 2024; rounded where transformers rounds Qwen3.5's layers. A row of
position t, with the state S [Dk, Dv] of a value head:

    S ← decay·S;   u = beta·(v - Sᵀk);   S ← S + k·uᵀ;   o = Sᵀq

S is kept of the last multiple of 16 positions, and u and k of the positions behind it:

    Sᵀx at t = (c₀·S)ᵀx + Σᵢ cᵢ·(kᵢ·x)·uᵢ,   cᵢ: the product of the decays behind position i

Coefficients are products, without logarithms, so strong decay loses no digits. Those below 1e-24 count as zero: they
would become subnormal numbers, which are slow and change nothing.

Mamba-2 (Dao and Gu, "Transformers are SSMs", 2024; rounded as in transformers' Granite 4) has the same state and
window: B and C are its keys and queries, of one group for several heads, x its values. Nothing that the state knows
already is taken off, and a part of x goes by:

    S ← decay·S + B·uᵀ;   u = step·x;   o = SᵀC + skip·x
"""

from __future__ import annotations

import torch
from torch.nn.functional import silu, softplus

from loraplex.kernels.layers.norm import rms_norm
from loraplex.kernels.recurrent import COLUMNS, SMALLEST, WINDOW
from loraplex.kernels.recurrent.kernel import RecurrentOps
from loraplex.kernels.recurrent.types import RecurrentHeads, RecurrentMemory, RecurrentRows, RecurrentUnit

_NORM_EPS = 1e-6


def recurrent_ops() -> RecurrentOps:
    return RecurrentOps(convolve, delta_gates, rule, gated_norm, output_gate, by_part, step_gates)


def convolve(
    x: torch.Tensor,
    weight: torch.Tensor,
    rows: RecurrentRows,
    memory: RecurrentMemory,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """silu(conv(x)), causal, by channel. x: [T, C]; weight [W, C] float32, that of the row itself last; bias: [C]
    float32. The sum is rounded, and the activation. Returns [T, C]. Inputs of the open window are kept, and those
    before its end with the state."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    before = len(weight) - 1
    for unit in rows.units:
        index = torch.tensor(unit.rows, device=x.device)
        own, start = x[index], unit.start
        inputs = torch.cat((_history(unit, memory, before), own))
        total = torch.zeros_like(own, dtype=torch.float32) if bias is None else bias.expand(own.shape).clone()
        for step in range(before + 1):
            total.add_(inputs[step : step + len(own)].float() * weight[step])
        out[index] = silu(total.to(x.dtype))
        end = start + len(own)
        for number, target in enumerate(unit.targets):
            last = (start // WINDOW + 1 + number) * WINDOW - start
            memory.tails[target] = inputs[last : last + before]
        for position in range(max(start, end // WINDOW * WINDOW), end):
            memory.inputs[unit.window, position % WINDOW] = own[position - start]
    return out


def _history(unit: RecurrentUnit, memory: RecurrentMemory, before: int) -> torch.Tensor:
    """The `before` inputs before a unit's first row, [before, C]: of its window, and of its state or zeros."""
    behind = unit.start % WINDOW
    window = memory.inputs[unit.window, max(0, behind - before) : behind]
    tail = memory.tails[unit.state] if unit.start >= WINDOW else torch.zeros_like(memory.tails[0])
    return torch.cat((tail[behind:], window))


def delta_gates(
    b: torch.Tensor, a: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor, scale: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """beta = scale·sigmoid(b), rounded to b's dtype, and decay = exp(-exp(a_log)·softplus(a + dt_bias)). b, a: [T, Hv];
    a_log, dt_bias: [Hv] float32. Returns both [T, Hv] float32."""
    beta = b.sigmoid() * scale
    return beta.float(), torch.exp(-a_log.exp() * softplus(a.float() + dt_bias))


def step_gates(
    dt: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor, low: float, high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """step = softplus(dt + dt_bias), rounded to dt's dtype twice, within low and high, and
    decay = exp(-exp(a_log)·step). dt: [T, Hv]; a_log, dt_bias: [Hv] float32. Returns both [T, Hv] float32."""
    step = softplus(dt + dt_bias.to(dt.dtype)).clamp(low, high).float()
    return step, torch.exp(-a_log.exp() * step)


def rule(
    x: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    rows: RecurrentRows,
    memory: RecurrentMemory,
    heads: RecurrentHeads,
    skip: torch.Tensor | None = None,
) -> torch.Tensor:
    """The delta rule, of x [T, C]: queries, then keys, then values. Queries and keys are divided by √(Σx² + 1e-6) by
    head, and queries by √Dk. With `skip` [Hv] float32 it is Mamba-2's rule: x has values, then keys (B), then queries
    (C), and beta is the step. decay, beta: [T, Hv] float32. Returns [T, Hv·Dv] in the dtype of x."""
    out = torch.empty(len(x), heads.value_heads, heads.value_dim, dtype=x.dtype, device=x.device)
    for unit in rows.units:
        index = torch.tensor(unit.rows, device=x.device)
        q, k, v = _parts(x[index].float(), heads, delta=skip is None)
        done, state, targets = 0, unit.state, iter(unit.targets)
        while done < len(index):
            position = unit.start + done
            count = min(WINDOW - position % WINDOW, len(index) - done)
            span = slice(done, done + count)
            target = next(targets) if (position + count) % WINDOW == 0 else None
            rows_of = index[span]
            out[rows_of] = _window(
                q[span], k[span], v[span], decay[rows_of], beta[rows_of], skip, memory,
                (unit.window, state, target, position),
            ).to(x.dtype)  # fmt: skip
            state = state if target is None else target
            done += count
    return out.flatten(1)


def _parts(
    x: torch.Tensor, heads: RecurrentHeads, *, delta: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries and keys [n, Hk, Dk], and values [n, Hv, Dv], of convolved rows [n, C]."""
    places = heads.first_columns(delta=delta)
    q, k = (
        x[:, first : first + heads.key_heads * heads.key_dim].view(len(x), -1, heads.key_dim)
        for first in places[:2]
    )
    v = x[:, places[2] : places[2] + heads.value_heads * heads.value_dim].view(len(x), -1, heads.value_dim)
    if not delta:
        return q, k, v
    factor = torch.tensor(heads.key_dim, dtype=torch.float32).rsqrt().to(x.device)
    return _unit_length(q) * factor, _unit_length(k), v


def _unit_length(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _NORM_EPS)


def _window(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    skip: torch.Tensor | None,
    memory: RecurrentMemory,
    places: tuple[int, int, int | None, int],
) -> torch.Tensor:
    """Rows of one window, of (window, state, target, position of the first row). q, k: [n, Hk, Dk]; v: [n, Hv, Dv].
    Returns [n, Hv, Dv] float32."""
    window, state, target, position = places
    first, group = position % WINDOW, v.shape[1] // k.shape[1]
    strips = v.reshape(*v.shape[:2], -1, COLUMNS)
    memory.keys[window, :, first : first + len(k)] = k.transpose(0, 1)
    keys = memory.keys[window].repeat_interleave(group, 0)
    updates, decays = memory.updates[window], memory.decays[window]
    whole = memory.states[state] if position >= WINDOW else torch.zeros_like(memory.states[0])
    own = torch.ones_like(decays[:, 0])
    behind = torch.ones_like(decays)
    out = torch.empty_like(strips)
    for here in range(first + len(k)):
        row = here - first
        if row >= 0:
            decays[:, here] = decay[row]
        own = _product(own, decays[:, here])
        behind[:, :here] = _product(behind[:, :here], decays[:, here : here + 1])
        if row < 0:
            continue
        query, key = (x[row].repeat_interleave(group, 0) for x in (q, k))
        read = [
            own[:, None, None] * torch.einsum("hskc,hk->hsc", whole, x)
            + torch.einsum(
                "hi,hsic->hsc", behind[:, :here] * (keys[:, :here] @ x[:, :, None])[..., 0], updates[:, :, :here]
            )
            for x in (key, query)
        ]  # fmt: skip
        known = read[0] if skip is None else 0.0
        updates[:, :, here] = (strips[row] - known) * beta[row][:, None, None]
        out[row] = read[1] + (key * query).sum(-1)[:, None, None] * updates[:, :, here]
        if skip is not None:
            out[row] += skip[:, None, None] * strips[row]
    if target is not None:
        added = torch.einsum("hi,hik,hsic->hskc", behind, keys, updates)
        memory.states[target] = own[:, None, None, None] * whole + added
    return out.flatten(2)


def _product(coefficient: torch.Tensor, decay: torch.Tensor) -> torch.Tensor:
    product = coefficient * decay
    return torch.where(product < SMALLEST, 0.0, product)


def gated_norm(o: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """rms_norm(o)·silu(z) by head, of o that is normed and rounded, then weighted and rounded. o: [T, H·D]; z:
    [T, H·D], its rows may lie apart; weight: [D] in their dtype. Returns [T, H·D]."""
    heads = o.view(len(o), -1, len(weight))
    normed = rms_norm(heads.float(), torch.ones_like(weight, dtype=torch.float32), eps).to(o.dtype) * weight
    return (normed.flatten(1) * silu(z.float())).to(o.dtype)


def output_gate(attended: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """attended·sigmoid(gate). attended: [T, H, D]; gate: [T, H, D] of the same dtype, rows and heads may lie apart.
    Returns [T, H·D]."""
    return (attended * gate.sigmoid()).flatten(1)


def by_part(x: torch.Tensor, heads: int, sizes: tuple[int, ...]) -> torch.Tensor:
    """The columns of x [T, H·Σ sizes], which has all parts of a head one behind the other, with the heads of a part one
    behind the other: [T, H·size₀ … H·sizeₙ]. At most four parts."""
    parts = torch.split(x.reshape(len(x), heads, -1), list(sizes), 2)
    return torch.cat([part.flatten(1) for part in parts], 1)
