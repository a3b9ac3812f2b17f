"""A recorded decoding step with adapters on an H200, by launches, rounds and bytes: tables, without a GPU.

    python -m bench.gpu.decoding.simulator [--refit]

A launch takes a ramp, then the longer of two: its bytes at the part of the bandwidth that they reach, and the rounds in
which its programs share the items out, times what an item takes. The constants of `Fit` were fitted to one H200
(docs/lab/2026-11-27-h200.md), whose B sides of decoding were computed in the kernels that read them. ERROR, PARTS_ERROR
and APART_ERROR say how far its figures are from the simulator's. Both sides by rows, and A sides that begin early, are
a prediction from the constants of `Planned`, which were assumed: the first run on a device replaces them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from math import exp, log

from loraplex.kernels.lora.triton_fields import ROW_ROWS
from loraplex.kernels.lora.triton_tiling import LoraTiling

BANDWIDTH = 4.23e6
"""Bytes a µs of an H200 that copies."""
MULTIPROCESSORS = 132
LAYERS = 32
GROUPS = {"qkv": (4096, 6144, 3), "o": (4096, 4096, 1), "gate_up": (4096, 28672, 2), "down": (14336, 4096, 1)}
"""K, N and sites of each group of Llama-3.1-8B."""
TODAY = LoraTiling()
BY_ROWS = LoraTiling(row_programs=12)
BOTH_BY_ROWS = replace(BY_ROWS, row_block_k=1024)
EARLY = replace(BOTH_BY_ROWS, early=True)
READER_US = 2.1
"""A launch of the base that a B side of the H200's took the place of: RoPE, an activation or a norm."""
ERROR = 0.15
"""The largest relative error of the time that adapters take in a cell."""
PARTS_ERROR = 0.4
"""The largest relative error of one kernel of a step of 64 rows."""
APART_ERROR = 0.2
"""The largest relative error of a whole step whose B sides are launches of their own: too fast at 256 rows of 64
adapters."""


@dataclass(frozen=True)
class Cell:
    """A decoding step: `rows` of `adapters` of this rank, dealt out evenly, and what an H200 took without and with
    adapters, in ms."""

    rows: int
    adapters: int
    rank: int
    base_ms: float
    lora_ms: float

    @property
    def layer_us(self) -> float:
        """µs that adapters took in a layer, as measured."""
        return (self.lora_ms - self.base_ms) * 1e3 / LAYERS

    @property
    def blocks(self) -> int:
        """Blocks of 16 ranks."""
        return -(-self.rank // 16)

    def pieces(self, height: int) -> int:
        """Pieces of up to `height` rows of one adapter."""
        return self.adapters * -(-(self.rows // self.adapters) // height)

    def left(self, layer_us: float) -> float:
        """The part of the base's speed that is left where adapters take `layer_us` in each layer."""
        return self.base_ms / (self.base_ms + layer_us * LAYERS / 1e3)


CELLS = (
    Cell(1, 1, 16, 4.79, 5.78),
    Cell(16, 8, 16, 5.16, 7.80),
    Cell(64, 1, 16, 6.93, 8.63),
    Cell(64, 8, 16, 6.81, 9.11),
    Cell(64, 64, 16, 6.81, 12.82),
    Cell(64, 8, 64, 6.94, 14.05),
    Cell(64, 64, 64, 6.93, 25.49),
    Cell(256, 8, 16, 15.16, 19.54),
    Cell(256, 64, 16, 14.92, 32.85),
    Cell(256, 256, 16, 14.99, 40.67),
    Cell(256, 256, 64, 14.98, 94.63),
)
"""Steps measured on an H200 (docs/lab/2026-11-27-h200.md)."""
WAIT_US = 4.7
"""The profiler counts a B side's wait for its A side as the B side's."""
PARTS = {
    8: {"A": 0.73, "activation": 1.20, "RoPE": 0.50, "norm": 0.62},
    64: {"A": 1.61, "activation": 3.63, "RoPE": 1.03, "norm": 0.68},
}
"""ms of a step of 64 rows, by adapters and kernel, with those waits."""
APART_MS = {(64, 8): 9.11 * 0.975, (64, 64): 12.82 * 1.037, (256, 64): 29.1 * 1.109}
"""A step whose B sides are launches of their own, by rows and adapters of rank 16."""


@dataclass(frozen=True)
class Fit:
    """Constants of an H200 with the kernels of that day, in µs except `reached`."""

    ramp: float = 2.76
    """From a launch's begin until its first load is on the way, and its end."""
    shrink_item: float = 0.46
    """An item of an A side, by itself."""
    shrink_block: float = 0.15
    """Each of its blocks of 512 columns of K."""
    expand_item: float = 2.50
    """Piece, record and unit of a B side's item, one behind the other."""
    one_row: float = 1.98
    """16 ranks of a site for a single row: tile, B, hidden values, y."""
    few_rows: float = 8.17
    """The same for two to four rows."""
    many_rows: float = 5.77
    """The same for up to 16 rows, on tensor cores."""
    norm_item: float = 0.81
    """A row of a B side in a norm."""
    norm_block: float = 1.06
    """Each of its blocks of 16 ranks."""
    reached: float = 0.51
    """The part of the bandwidth that loads reach at most."""


@dataclass(frozen=True)
class Planned:
    """Assumed of sums by rows (`LoraTiling.row_programs` and `row_block_k`) and of `early`; no device has run them."""

    programs: int = 12
    """B sides that share a multiprocessor."""
    ramp: float = 1.5
    """With the first tiles on the way before the wait for the kernel before."""
    item: float = 0.6
    turn: float = 0.9
    """Ranks that are loaded at once: of B 16 for one row and 8 for several, of A 8, by 1,024 columns."""
    reached: float = 0.85


def floors(cell: Cell) -> dict[str, float]:
    """µs a layer that reading every adapter's tiles once takes, by part."""
    a = sum(inputs * sites for inputs, _, sites in GROUPS.values())
    of = {"A": a, **{name: outputs for name, (_, outputs, _) in GROUPS.items()}}
    return {name: cell.adapters * width * cell.rank * 2 / BANDWIDTH for name, width in of.items()}


def launch_us(
    ramp: float, item_us: float, items: int, programs: int, num_bytes: float, reached: float
) -> float:
    """µs of a launch whose programs take `items` by turns, in whole rounds."""
    return ramp + max(num_bytes / BANDWIDTH / reached, -(-items // programs) * item_us)


def measured_form(cell: Cell, fit: Fit) -> dict[str, float]:
    """µs a layer over the base of the kernels that were measured, by kernel: B sides in RoPE, in the activation, and up
    to 128 rows in norms."""
    pieces, programs = cell.pieces(16), MULTIPROCESSORS * LoraTiling().expand_programs
    step = cell.blocks * _row_cost(cell, fit)
    found = {"A": shrink_us(cell, fit)}
    for name, group, units, sites in (("activation", "gate_up", 112, 2), ("RoPE", "qkv", 24, 1)):
        num_bytes = _bytes(cell, group, moved=3 if name == "activation" else 4)
        item = fit.expand_item + sites * step
        found[name] = launch_us(fit.ramp, item, pieces * units, programs, num_bytes, fit.reached)
    if cell.rows <= 128:
        item, num_bytes = fit.norm_item + cell.blocks * fit.norm_block, _bytes(cell, "o", moved=6)
        found["norm"] = 2 * launch_us(fit.ramp, item, cell.rows, MULTIPROCESSORS, num_bytes, fit.reached)
    else:
        item, num_bytes = fit.expand_item + step, _bytes(cell, "o", moved=4)
        found["norm"] = 2 * (
            launch_us(fit.ramp, item, 16 * pieces, programs, num_bytes, fit.reached) + READER_US
        )
    # What they took the place of: longer where there are more rows.
    return found | {"replaced": -4 * READER_US * (1.0 if cell.rows <= 64 else 1.6)}


def apart_form(cell: Cell, fit: Fit) -> dict[str, float]:
    """µs a layer over the base, by kernel, of B sides that are launches of their own, as they are now."""
    programs = MULTIPROCESSORS * LoraTiling().expand_programs
    item = fit.expand_item + cell.blocks * _row_cost(cell, fit)
    return {"A": shrink_us(cell, fit)} | _expands(
        cell, fit.ramp, item, cell.pieces(16), programs, fit.reached
    )


def by_rows_form(cell: Cell, fit: Fit, planned: Planned, tiling: LoraTiling = BY_ROWS) -> dict[str, float]:
    """A prediction of the same for B sides of up to four rows by programs of one warp, and for the A sides of a
    tiling."""
    one = cell.rows == cell.adapters
    item = planned.item + -(-cell.rank // (16 if one else 8)) * planned.turn
    programs = MULTIPROCESSORS * planned.programs
    shrunk = shrink_us(cell, fit, tiling, planned)
    return {"A": shrunk} | _expands(
        cell, planned.ramp, item, cell.pieces(ROW_ROWS), programs, planned.reached
    )


def _expands(
    cell: Cell, ramp: float, item_us: float, pieces: int, programs: int, reached: float
) -> dict[str, float]:
    """µs of one B side for each group, whose units have 256 columns."""
    return {
        name: launch_us(
            ramp, item_us, pieces * (outputs // 256), programs, _bytes(cell, name, moved=4), reached
        )
        for name, (_, outputs, _) in GROUPS.items()
    }


def shrink_us(cell: Cell, fit: Fit, tiling: LoraTiling = TODAY, planned: Planned | None = None) -> float:
    """The A sides of a layer. `planned`: of what the tiling has that no device has run."""
    planned, total = planned or Planned(), 0.0
    programs = MULTIPROCESSORS * tiling.shrink_programs
    by_rows = tiling.row_block_k > 0 and cell.rows <= 2 * cell.adapters
    for inputs, _, sites in GROUPS.values():
        items = cell.pieces(16) * cell.blocks * sites
        columns, planes = tiling.split(inputs, -(-programs // items))
        item = fit.shrink_item + columns // tiling.block_k * fit.shrink_block
        if by_rows:
            item = planned.item + 2 * -(-columns // tiling.row_block_k) * planned.turn
        num_bytes = cell.adapters * sites * inputs * cell.rank * 2 + cell.rows * inputs * 2
        ramp = planned.ramp if tiling.early else fit.ramp
        reached = planned.reached if by_rows else fit.reached
        total += launch_us(ramp, item, items * planes, programs, num_bytes, reached)
    return total


def refined(fit: Fit, cells: Sequence[Cell] = CELLS, rounds: int = 60) -> Fit:
    """The constants with the least squares of the logarithms, by steps along one constant at a time."""

    def loss(one: Fit) -> float:
        return sum(log(sum(measured_form(cell, one).values()) / cell.layer_us) ** 2 for cell in cells)

    best, step = fit, 0.1
    for _ in range(rounds):
        before = best
        for field in fields(Fit):
            for factor in (exp(step), exp(-step)):
                other = replace(best, **{field.name: getattr(best, field.name) * factor})
                if loss(other) < loss(best):
                    best = other
        if best == before:
            step /= 2
    return best


def _row_cost(cell: Cell, fit: Fit) -> float:
    rows = cell.rows // cell.adapters
    return fit.one_row if rows == 1 else fit.few_rows if rows <= ROW_ROWS else fit.many_rows


def _bytes(cell: Cell, group: str, *, moved: int) -> int:
    """B once for each adapter, and `moved` bytes a value of y."""
    outputs = GROUPS[group][1]
    return cell.adapters * outputs * cell.rank * 2 + cell.rows * outputs * moved


def by_parts(adapters: int) -> dict[str, float]:
    """PARTS in µs a layer, without the waits."""
    waits = {"A": 0, "activation": 1, "RoPE": 1, "norm": 2}
    return {part: ms * 1e3 / LAYERS - waits[part] * WAIT_US for part, ms in PARTS[adapters].items()}


def tables(fit: Fit, planned: Planned) -> str:
    """Floors, the measured cells, and what is predicted, as Markdown."""

    def table(heads: str, row: Callable[[Cell], Sequence[float]]) -> list[str]:
        names = ["rows", "adapters", "rank", *heads.split(", ")]
        return [
            "",
            f"| {' | '.join(names)} |",
            "|---" * len(names) + "|",
            *(
                f"| {cell.rows} | {cell.adapters} | {cell.rank} | "
                + " | ".join(f"{value:.2f}" if value < 10 else f"{value:.0f}" for value in row(cell))
                + " |"
                for cell in CELLS
            ),
        ]

    def floor_row(cell: Cell) -> list[float]:
        floor = floors(cell)
        total = sum(floor.values())
        return [cell.layer_us, *floor.values(), total, cell.layer_us / total, cell.left(total)]

    def measured_row(cell: Cell) -> list[float]:
        parts = measured_form(cell, fit)
        total = sum(parts.values())
        rounds = cell.pieces(16) * 112 / (MULTIPROCESSORS * LoraTiling().expand_programs)
        return [cell.layer_us, total, total / cell.layer_us, rounds, *list(parts.values())[:4]]

    def predicted_row(cell: Cell) -> list[float]:
        forms = [apart_form(cell, fit)]
        forms += [by_rows_form(cell, fit, planned, tiling) for tiling in (BY_ROWS, BOTH_BY_ROWS, EARLY)]
        us = [sum(form.values()) for form in forms]
        rounds = cell.pieces(ROW_ROWS) * 112 / (MULTIPROCESSORS * planned.programs)
        return [*us, rounds, cell.left(cell.layer_us), *map(cell.left, us)]

    return "\n".join(
        [
            "Floors: every tile read once, µs a layer; LoRA ÷ base beside the measured base",
            *table("measured, A, qkv, o, gate_up, down, floor, × floor, ÷ base", floor_row),
            "",
            f"Measured and simulated, µs a layer over the base, ± {ERROR:.0%}; rounds of the activation's B side",
            *table("measured, simulated, ÷ measured, rounds, A, activation, RoPE, norms", measured_row),
            "",
            f"Simulated (B sides apart, a step ± {APART_ERROR:.0%}) and PREDICTED, not measured (B sides by rows,"
            " A sides too, and these early)",
            *table(
                "apart µs, B µs, A and B µs, early µs, rounds of gate_up, ÷ base measured, ÷ base apart, ÷ base B, "
                "÷ base A and B, ÷ base early",
                predicted_row,
            ),
        ]
    )


if __name__ == "__main__":
    constants = refined(Fit()) if "--refit" in sys.argv[1:] else Fit()
    print(constants)
    print(tables(constants, Planned()))
