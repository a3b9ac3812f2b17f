"""Gated delta nets and Mamba-2 on a GPU: the rule against float64, the same bits in any step, and how near its floor.

Without a GPU it runs interpreted, and gives no times.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from bench.gpu.timing import Ceilings, median_ms, relative_error
from loraplex.kernels.recurrent import WINDOW
from loraplex.kernels.recurrent.types import (
    RecurrentHeads,
    RecurrentMemory,
    RecurrentRows,
    RecurrentUnit,
    lay_out_units,
    recurrent_bytes,
    recurrent_memory,
)
from loraplex.kernels.triton_backend import triton_ops
from support.kernels.recurrent import Sequence, in_float64, run_rows, sequence, targets_of

_TOLERANCE = 1e-6
_CUTS = (1, 14, 15, 16, 39, 40)
"""Ends of steps; the last is that of the sequence which is checked."""


@dataclass(frozen=True)
class RecurrentCase:
    """`units` sequences of `rows` rows each."""

    name: str
    heads: RecurrentHeads
    units: int
    rows: int
    mamba: bool = False


def small_cases() -> list[RecurrentCase]:
    return [
        RecurrentCase("3 value heads of each key head", RecurrentHeads(1, 3, 32, 64), 2, 3),
        RecurrentCase("Mamba-2 of 2 groups", RecurrentHeads(2, 4, 32, 32), 2, 3, mamba=True),
    ]


def full_cases() -> list[RecurrentCase]:
    """The sizes of Qwen3.5, and of Granite 4.0 H-1B."""
    shapes = {
        "0.8B": RecurrentHeads(16, 16, 128, 128),
        "9B": RecurrentHeads(16, 32, 128, 128),
        "27B": RecurrentHeads(16, 48, 128, 128),
        "H-1B": RecurrentHeads(1, 48, 128, 64),
    }
    decodes = [
        RecurrentCase(f"{name} decode, {rows} rows", heads, rows, 1, name == "H-1B")
        for name, heads in shapes.items()
        for rows in (64, 16, 1, 256)
    ]
    prompts = [
        RecurrentCase(f"{name}, {units} prompts of {rows}", heads, units, rows, name == "H-1B")
        for name, heads in shapes.items()
        for units, rows in ((1, 2048), (4, 512))
    ]
    return decodes + prompts


def run_case(case: RecurrentCase, device: torch.device, ceilings: Ceilings | None = None) -> dict[str, Any]:
    """`ok`: in float32 the convolution and the rule are those of float64, and steps of a few rows have the bits of one
    step. With `ceilings` a layer's kernels are timed in bfloat16. `floor_ms`, of the rule: one read of states, keys and
    updates, or of a prompt's rows."""
    own = sequence(case.heads, _CUTS[-1], 30.0, mamba=case.mamba)
    want = in_float64(own)
    whole, cut = (_in_steps(own, cuts, device) for cuts in (_CUTS[-1:], _CUTS))
    error, same = relative_error(whole, want), torch.equal(whole, cut)
    found: dict[str, Any] = {
        "case": case.name, "dtype": "bfloat16", "error": error, "same_bits": same,
        "ok": error <= _TOLERANCE and same,
    }  # fmt: skip
    if ceilings is None:
        return found
    layer = _Layer(case, device)
    ms = {name: median_ms(run, device) for name, run in layer.parts().items()}
    floor = ceilings.floor_ms(layer.num_bytes)
    found |= {"bytes": layer.num_bytes, "floor_ms": floor, "graph_ms": ms["rule"]}
    found |= {f"{name}_ms": took for name, took in ms.items() if name != "rule"}
    if ms["rule"] is not None:
        found["times_floor"] = ms["rule"] / floor
    return found


def _in_steps(own: Sequence, ends: tuple[int, ...], device: torch.device) -> torch.Tensor:
    memory, start, parts = _memory(own.heads, 1, torch.float32, device), 0, []
    moved = Sequence(
        own.heads,
        *(part.to(device) for part in (own.x, own.decay, own.beta, own.weight)),
        None if own.skip is None else own.skip.to(device),
    )
    for end in ends:
        unit = RecurrentUnit(range(end - start), start, 0, 0, targets_of(start, end - start, 0))
        rows, span = lay_out_units([unit], device), slice(start, end)
        ops = triton_ops(device=device).recurrent
        parts.append(
            run_rows(ops, moved, rows, memory, moved.x[span], moved.decay[span], moved.beta[span]).cpu()
        )
        start = end
    return torch.cat(parts)


def _memory(heads: RecurrentHeads, count: int, dtype: torch.dtype, device: torch.device) -> RecurrentMemory:
    """The memory of `count` states and windows, filled with small numbers."""
    sizes = recurrent_bytes(heads, dtype)
    storage = [torch.full((count, size), 0x3C, dtype=torch.uint8, device=device) for size in sizes]
    return recurrent_memory(heads, dtype, *storage)


class _Layer:
    """One layer in bfloat16, of sequences that decode or begin."""

    def __init__(self, case: RecurrentCase, device: torch.device) -> None:
        heads, total = case.heads, case.units * case.rows
        self.mamba, self.heads, self.ops = case.mamba, heads, triton_ops(device=device).recurrent
        self.memory = _memory(heads, case.units, torch.bfloat16, device)
        self.rows = self._lay_out(case, device)
        values = heads.value_heads * heads.value_dim
        self.y = torch.randn(total, heads.channels + values, device=device).bfloat16()
        self.gates = torch.randn(total, 2 * heads.value_heads, device=device).bfloat16()
        self.weight = torch.randn(heads.width, heads.channels, device=device)
        self.rates = torch.zeros(heads.value_heads, device=device)
        self.norm = torch.ones(heads.value_dim, device=device).bfloat16()
        window = heads.key_heads * heads.key_dim + heads.value_heads * heads.value_dim
        state = heads.value_heads * heads.value_dim * heads.key_dim
        if case.rows == 1:
            # Half of a window on average.
            self.num_bytes = 4 * case.units * (state + window * WINDOW // 2)
        else:
            self.num_bytes = 2 * total * (heads.channels + values) + 4 * case.units * state

    @staticmethod
    def _lay_out(case: RecurrentCase, device: torch.device) -> RecurrentRows:
        units = []
        for unit in range(case.units):
            start = 32 + unit % (WINDOW - 1) if case.rows == 1 else 0
            own = range(unit * case.rows, (unit + 1) * case.rows)
            units.append(RecurrentUnit(own, start, unit, unit, targets_of(start, case.rows, unit)))
        return lay_out_units(units, device)

    def parts(self) -> dict[str, Any]:
        heads, ops = self.heads, self.ops
        b, a = self.gates.chunk(2, 1)
        if self.mamba:
            return self._mamba_parts(a)
        x, z = self.y[:, : heads.channels], self.y[:, heads.channels :]
        qkv = ops.convolve(x, self.weight, self.rows, self.memory)
        beta, decay = ops.delta_gates(b, a, self.rates, self.rates)
        out = ops.rule(qkv, decay, beta, self.rows, self.memory, heads)
        return {
            "rule": lambda: ops.rule(qkv, decay, beta, self.rows, self.memory, heads),
            "convolution": lambda: ops.convolve(x, self.weight, self.rows, self.memory),
            "gates": lambda: ops.delta_gates(b, a, self.rates, self.rates),
            "norm": lambda: ops.gated_norm(out, z, self.norm, 1e-6),
        }

    def _mamba_parts(self, dt: torch.Tensor) -> dict[str, Any]:
        """Steps, convolution and rule; the norm is that of other layers."""
        x, ops = self.y[:, -self.heads.channels :], self.ops
        xbc = ops.convolve(x, self.weight, self.rows, self.memory)
        step, decay = ops.step_gates(dt, self.rates, self.rates, 0.0, 3e38)
        return {
            "rule": lambda: ops.rule(xbc, decay, step, self.rows, self.memory, self.heads, self.rates),
            "convolution": lambda: ops.convolve(x, self.weight, self.rows, self.memory),
            "gates": lambda: ops.step_gates(dt, self.rates, self.rates, 0.0, 3e38),
        }
