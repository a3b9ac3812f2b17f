"""A linear over 4-bit weights by humming-kernels, where it is installed: right, the same bits alone, and how fast.

It quantises random weights itself, so that it is compared with float64 over its own values. `invariant`: with its
option of that name.

    export PYTHONPATH=tests:server:adapters:kernels:build/gpu-site
    python3 -m bench.gpu.linears.humming --compile; python3 -m bench.gpu.linears.humming --out build/gpu
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from itertools import cycle
from pathlib import Path
from typing import Any

import torch

from bench.gpu.timing import median_ms, relative_error

SIDES = ((28672, 4096), (4096, 14336), (6144, 4096), (128256, 4096))
ROWS = (16, 64, 1, 256)
GROUP = 128
_READ_BYTES = 256 << 20
_WAYS: dict[str, dict[str, bool] | None] = {
    "humming": None,
    "humming, invariant": {"use_batch_invariant": True},
}


@cache
def _import() -> Any:
    """humming's modules, or why they can't be used."""
    try:
        from humming.layer import HummingLayer
        from humming.schema import HummingWeightSchema
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:300]}"
    return HummingLayer, HummingWeightSchema


def run_shape(columns: int, inputs: int, group: int, rows: Sequence[int]) -> Iterator[dict[str, Any]]:
    """A row for each number of rows and each way."""
    device = torch.device("cuda")
    found = _import()
    if isinstance(found, str):
        yield {"humming": found}
        return
    layer_type, schema_type = found
    try:
        layer, values = _make(layer_type, schema_type, columns, inputs, group)
        copies = [layer] + [
            _make(layer_type, schema_type, columns, inputs, group)[0]
            for _ in range(min(12, math.ceil(_READ_BYTES / (columns * inputs / 2))) - 1)
        ]
    except Exception as error:
        yield {"humming": f"no layer: {type(error).__name__}: {str(error)[:300]}"}
        return
    for count in rows:
        x = torch.randn(count, inputs, device=device).bfloat16()
        checked = slice(0, min(columns, 4096))
        want = x.double() @ values[checked].double().T
        for way, option in _WAYS.items():
            row: dict[str, Any] = {"way": way, "rows": count}
            try:
                y = layer(x, compute_config=option)
                row["error"] = relative_error(y[:, checked], want)
                row["lone"] = [
                    torch.equal(layer(x[at : at + 1].contiguous(), compute_config=option)[0], y[at])
                    for at in (0, count - 1)
                ]
                turns = cycle(copies)
                row["ms"] = median_ms(
                    lambda turns=turns, x=x, option=option: next(turns)(x, compute_config=option),  # type: ignore[misc]
                    device,
                    runs=max(10, len(copies)),
                    rounds=5,
                )
            except Exception as error:
                row["failed"] = f"{type(error).__name__}: {str(error)[:300]}"
            yield row


def _make(
    layer_type: Any, schema_type: Any, columns: int, inputs: int, group: int
) -> tuple[Any, torch.Tensor]:
    """A layer of random weights on the GPU, and the values that it holds."""
    config = {"dtype": "int4", "group_size": group}
    layer = layer_type(columns, inputs, weight_config=config, torch_dtype=torch.bfloat16).cuda()
    weight = torch.randn(columns, inputs, device="cuda", dtype=torch.bfloat16) * 0.02
    tensors = schema_type.quant_tensor(weight, layer.weight_schema, torch.bfloat16)
    values = layer.weight_schema.dequant_tensors(tensors).to(torch.bfloat16)
    layer.load_from_tensors(tensors)
    layer.transform()
    return layer, values


def compile_shape(columns: int, inputs: int, group: int, rows: Sequence[int]) -> str:
    """Compile what `run_shape` launches, into humming's cache on the disk; what went wrong, or nothing."""
    found = _import()
    if isinstance(found, str):
        return found
    try:
        layer, _ = _make(*found, columns, inputs, group)
        for count in {1, *rows}:
            for option in _WAYS.values():
                layer(torch.zeros(count, inputs, device="cuda", dtype=torch.bfloat16), compute_config=option)
        torch.cuda.synchronize()
    except Exception as error:
        return f"humming, {inputs} to {columns}: {type(error).__name__}: {str(error)[:300]}"
    return ""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, default=Path("build/gpu"))
    parser.add_argument("--compile", action="store_true", help="compile alone, beside each other")
    options = parser.parse_args(argv)
    if options.compile:
        with ProcessPoolExecutor(len(SIDES), multiprocessing.get_context("spawn")) as pool:
            jobs = [pool.submit(compile_shape, *side, GROUP, ROWS) for side in SIDES]
            print(*(job.result() for job in jobs), sep="\n")
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    with (options.out / "humming.jsonl").open("a") as file:
        for columns, inputs in SIDES:
            for row in run_shape(columns, inputs, GROUP, ROWS):
                row |= {"shape": f"{inputs} to {columns}, groups of {GROUP}"}
                file.write(json.dumps(row) + "\n")
                print(row, flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
