"""A base linear over codes of 4 bits on a GPU, in several tilings: right, and how fast beside 8-bit codes, the
library's product in 16 bits.

    export PYTHONPATH=tests:server:adapters:kernels
    python3 -m bench.gpu.linears.nibbles --compile; python3 -m bench.gpu.linears.nibbles --seconds 60 --out build/gpu

Each timed run reads another copy of the weight, so that none comes from the cache. Each result is a line of JSON in
`nibbles.jsonl`, and the best of each shape a line of the table. `--small`: tiny shapes, interpreted, without a GPU.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import cycle
from pathlib import Path
from typing import Any

import torch

from bench.gpu.stopwatch import Stopwatch, measure_ceilings
from bench.gpu.timing import Ceilings, median_ms, relative_error
from loraplex.kernels.linear import dense, triton_groups, triton_nibbles
from loraplex.kernels.linear.groups import GroupedWeight
from loraplex.kernels.linear.triton_nibbles import NibblesTiling

_READ_BYTES = 256 << 20
"""Bytes of all copies of a weight, at least: several times the device's cache."""


@dataclass(frozen=True)
class Shape:
    columns: int
    inputs: int
    group: int
    offsets: bool

    @property
    def name(self) -> str:
        return f"{self.inputs} to {self.columns}, groups of {self.group}{', offsets' if self.offsets else ''}"


@dataclass(frozen=True)
class Form:
    """A tiling and the block of K that the words are laid out for."""

    block: int
    tiling: NibblesTiling


SIDES = ((28672, 4096), (4096, 14336), (6144, 4096), (128256, 4096))
SHAPES = [Shape(*side, *kind) for side in SIDES for kind in ((128, False), (32, True))]
SMALL_SHAPES = [Shape(48, 256, 128, False), Shape(40, 512, 32, True)]
ROWS = (16, 64, 1, 256)


def forms(rows: int, *, small: bool = False) -> list[Form]:
    """The forms to compare for this number of rows."""
    if small:
        tilings = [NibblesTiling(16, 16, 1, False, 4), NibblesTiling(32, 16, 2, True, 4)]
        return [Form(block, tiling) for tiling in tilings for block in (64, 128)]
    if rows <= 16:
        return [
            *(
                Form(block, NibblesTiling(16, columns, splits, splits > 1, 4))
                for block, columns in ((128, 64), (128, 128), (256, 64), (256, 128), (512, 64))
                for splits in (1, 2, 4, 8)
            ),
            Form(128, NibblesTiling(16, 64, 4, True, 4, 4)),
            Form(256, NibblesTiling(16, 64, 4, True, 4, 4)),
            Form(256, NibblesTiling(16, 128, 4, True, 4, 4)),
            Form(256, NibblesTiling(16, 128, 4, True, 8)),
            Form(128, NibblesTiling(16, 128, 4, True, 8)),
        ]
    if rows <= 64:
        return [
            Form(block, NibblesTiling(64, columns, splits, splits > 1, warps))
            for block in (64, 128, 256)
            for columns, warps in ((64, 4), (128, 8), (128, 4))
            for splits in (1, 2, 4)
            if block < 256 or warps == columns // 16
        ]
    return [
        Form(block, NibblesTiling(block_m, columns, splits, splits > 1, warps))
        for block in (64, 128)
        for block_m, columns, warps in ((256, 128, 8), (128, 128, 4), (128, 128, 8), (128, 64, 4))
        for splits in (1, 2)
        if splits == 1 or (block_m < 256 and warps == columns // 16)
    ]


def draw_weight(shape: Shape, device: torch.device) -> GroupedWeight:
    """Codes of 4 bits, unsigned where there are offsets, and scales that a float16 holds."""
    generator = torch.Generator(device).manual_seed(shape.columns + shape.group)
    sizes = (shape.columns, shape.inputs // shape.group)
    low = 0 if shape.offsets else -8
    codes = torch.randint(
        low, low + 16, (shape.columns, shape.inputs), generator=generator, dtype=torch.int8, device=device
    )
    scales = (torch.rand(sizes, generator=generator, device=device) * 0.01).half().float()
    offsets = None
    if shape.offsets:
        offsets = (torch.randn(sizes, generator=generator, device=device) * 0.05).half().float()
    return GroupedWeight(codes, scales, offsets, shape.group)


def eight_bits(form: Form) -> triton_groups.GroupsTiling:
    """A tiling of 8-bit codes whose sums have the same order."""
    tiling = form.tiling
    return triton_groups.GroupsTiling(16, 64, 16, tiling.splits, tiling.apart and tiling.block_m == 16, 4)


class ShapeBench:
    """Everything about one weight."""

    def __init__(self, shape: Shape, device: torch.device, ceilings: Ceilings) -> None:
        self._shape, self._device, self._ceilings = shape, device, ceilings
        self._dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self._weight = draw_weight(shape, device)
        self._codes = triton_groups.pack_groups(self._weight, self._dtype, device=device)
        self._words: dict[int, Any] = {}
        self._values = self._weight.dense().to(self._dtype)
        self._times = device.type == "cuda"

    def run(self, rows: int, tried: list[Form]) -> Iterator[dict[str, Any]]:
        """A row of each form, and then one of what they are compared with."""
        x = torch.randn(
            rows,
            self._shape.inputs,
            generator=torch.Generator(self._device).manual_seed(rows),
            device=self._device,
        ).to(self._dtype)
        checked = slice(0, min(self._shape.columns, 4096))
        want = x.double() @ self._values[checked].double().T
        for form in tried:
            yield self._run_form(form, x, want, checked) | {"shape": self._shape.name, "rows": rows}
        yield self._others(x) | {"shape": self._shape.name, "rows": rows, "form": None}

    def _run_form(self, form: Form, x: torch.Tensor, want: torch.Tensor, checked: slice) -> dict[str, Any]:
        packed = self._words.get(form.block)
        if packed is None:
            packed = triton_nibbles.pack_nibbles(
                self._weight, self._dtype, device=self._device, block=form.block
            )
            self._words[form.block] = packed
        tiling = form.tiling
        found: dict[str, Any] = {"form": {"block": form.block, **asdict(tiling)}}
        if packed is None:
            return found | {"skipped": "a plane is no part of a group"}
        rows = len(x)
        y = triton_nibbles.linear(x, packed, tiling=tiling)
        error = relative_error(y[:, checked], want)
        is_lone = all(
            torch.equal(
                triton_nibbles.linear(x[row : row + 1].contiguous(), packed, tiling=tiling)[0], y[row]
            )
            for row in (0, rows - 1)
        )
        eight = eight_bits(form)
        same = torch.equal(triton_groups.linear(x, self._codes, tiling=eight), y)
        found |= {
            "ok": error < (5e-3 if self._times else 1e-5) and is_lone,
            "error": error,
            "lone": is_lone,
            "bits_of_8_bit_codes": same,
        }
        if self._times:
            copies = _copies(packed, self._bytes(packed))
            found["ms"] = self._time(
                lambda one: triton_nibbles.linear(x, one, tiling=tiling), copies, "nibbles"
            )
        return found

    def _bytes(self, packed: triton_nibbles.PackedNibbles) -> int:
        parts = (packed.words, packed.scales, packed.offsets)
        return sum(part.numel() * part.element_size() for part in parts if part is not None)

    def _others(self, x: torch.Tensor) -> dict[str, Any]:
        shape = self._shape
        packed = next(packed for packed in self._words.values() if packed is not None)
        num_bytes = self._bytes(packed) + x.element_size() * len(x) * (shape.inputs + shape.columns)
        found: dict[str, Any] = {"bytes": num_bytes}
        found["floor_ms"] = self._ceilings.floor_ms(num_bytes, 2.0 * len(x) * shape.columns * shape.inputs)
        if self._times:
            codes = _copies(self._codes, self._codes.codes.numel())
            found["codes_ms"] = self._time(lambda one: triton_groups.linear(x, one), codes, "codes")
            values = _copies(self._values, self._values.numel() * 2)
            found["library_ms"] = self._time(lambda one: dense.linear(x, one), values, "library")
        return found

    def _time(self, run: Callable[[Any], object], copies: list[Any], what: str) -> float | None:
        turns = cycle(copies)
        try:
            return median_ms(lambda: run(next(turns)), self._device, runs=max(10, len(copies)), rounds=5)
        except torch.OutOfMemoryError as error:
            raise RuntimeError(f"no memory to time {what}") from error


def _copies(weight: Any, num_bytes: int) -> list[Any]:
    """The weight, and copies of it elsewhere in memory."""
    count = min(24, math.ceil(_READ_BYTES / num_bytes))
    return [weight, *(_copy(weight) for _ in range(count - 1))]


def _copy(weight: Any) -> Any:
    if isinstance(weight, torch.Tensor):
        return weight.clone()
    parts = {
        name: value.clone()
        for name in ("words", "codes", "scales", "offsets", "arrived")
        if isinstance(value := getattr(weight, name, None), torch.Tensor)
    }
    return replace(weight, **parts)


def compile_form(form: Form, group: int, offsets: bool) -> str:
    """Compile what the form launches, in a process of its own; what went wrong, or nothing."""
    device = torch.device("cuda")
    shape = Shape(1024, max(group, form.block) * form.tiling.splits * 2, group, offsets)
    try:
        weight = draw_weight(shape, device)
        packed = triton_nibbles.pack_nibbles(weight, torch.bfloat16, device=device, block=form.block)
        if packed is not None:
            x = torch.zeros(1, shape.inputs, dtype=torch.bfloat16, device=device)
            triton_nibbles.linear(x, packed, tiling=form.tiling)
            torch.cuda.synchronize()
            codes = triton_groups.pack_groups(weight, torch.bfloat16, device=device)
            triton_groups.linear(x, codes, tiling=eight_bits(form))
            torch.cuda.synchronize()
    except Exception as error:
        return f"{form}: {type(error).__name__}: {str(error)[:300]}"
    return ""


def compile_all(processes: int = 14) -> list[str]:
    """Compile all forms beside each other, into Triton's cache on the disk. Forms that can't be."""
    jobs = {
        (form, group, offsets): None
        for rows in ROWS
        for group, offsets in ((128, False), (32, True))
        for form in forms(rows)
    }
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        said = pool.map(compile_form, *zip(*jobs, strict=True))
        return [line for line in said if line]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, default=Path("build/gpu"))
    parser.add_argument("--seconds", type=float, default=110.0, help="no shape begins after this")
    parser.add_argument("--compile", action="store_true", help="compile alone, beside each other")
    parser.add_argument("--small", action="store_true", help="tiny shapes, interpreted")
    options = parser.parse_args(argv)
    started = time.monotonic()
    device = torch.device("cpu" if options.small else "cuda")
    options.out.mkdir(parents=True, exist_ok=True)
    ceilings = Ceilings()
    if options.compile:
        failed = compile_all()
        print(f"compiled after {time.monotonic() - started:.0f} s", *failed, sep="\n")
        return 1 if failed else 0
    if not options.small:
        ceilings = measure_ceilings(Stopwatch(device))
        print(torch.cuda.get_device_name(), torch.__version__, asdict(ceilings), flush=True)
    wrong = 0
    with (options.out / "nibbles.jsonl").open("a") as file:
        for shape in SMALL_SHAPES if options.small else SHAPES:
            if time.monotonic() - started > options.seconds:
                print(f"cut off before {shape.name}")
                break
            bench = ShapeBench(shape, device, ceilings)
            for rows in (5,) if options.small else ROWS:
                found = []
                for row in _runs(bench, rows, small=options.small):
                    found.append(row)
                    file.write(json.dumps(row) + "\n")
                file.flush()
                wrong += sum(not row["ok"] for row in found if "ok" in row)
                print(_line(found), flush=True)
            del bench
            if device.type == "cuda":
                torch.cuda.empty_cache()
    print(f"{wrong} wrong, {time.monotonic() - started:.0f} s")
    return 1 if wrong else 0


def _runs(bench: ShapeBench, rows: int, *, small: bool) -> Iterator[dict[str, Any]]:
    yield from bench.run(rows, forms(rows, small=small))


def _line(found: list[dict[str, Any]]) -> str:
    """The best forms, and what they are compared with."""
    others = found[-1]
    timed = sorted((row for row in found if "ms" in row), key=lambda row: row["ms"])
    best = " | ".join(
        f"{row['ms']:.4f} {'ok' if row['ok'] else 'WRONG'} {tuple(row['form'].values())}" for row in timed[:3]
    )
    rights = [row["ok"] for row in found if "ok" in row]
    same = [row["bits_of_8_bit_codes"] for row in found if "ok" in row]
    told = {key: round(value, 4) for key, value in others.items() if key.endswith("_ms")}
    return (
        f"{others['shape']}, {others['rows']} rows: {told} right {sum(rights)}/{len(rights)}, "
        f"bits of 8-bit codes {sum(same)}/{len(same)}: {best}"
    )


if __name__ == "__main__":
    raise SystemExit(main())
