"""The errors of adapters' sites beside the reference, and those of faults that are planted in the loader.

    PYTHONPATH=tests python -m bench.adapters.site_errors MODEL [ADAPTER…] [--dtypes bfloat16,float16,float32]

MODEL is the directory of SmolLM2-135M-Instruct, each ADAPTER a PEFT directory for it. To these come random ones, on all
linears of all layers unless their names say less. Errors are in units of the rounding of a site's outputs. "s" is what
the reference takes, "ms a step" the longest of the eight parts in which the engine measures.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from loraplex.adapters.admission.base_model import read_base_weight
from loraplex.adapters.numerics import NumbersVerdict, SiteOutputs, check_numbers
from loraplex.adapters.spec import BaseSpec
from loraplex.engine.execution.site_probe import SiteProbe
from loraplex.kernels.lora.site_groups import HEAD
from support.adapters.drafts import peft_config
from support.adapters.loader_faults import (
    Plant,
    a_of_another_layer,
    exchange,
    ignored_magnitudes,
    scaling,
    transposed_b,
)
from support.engine.local_engine import LocalEngine

RANDOM: dict[str, dict[str, Any]] = {
    "rank 8, tiny": {"rank": 8, "std": 1e-4},
    "rank 16": {"rank": 16, "std": 0.02},
    "rank 64, large": {"rank": 64, "std": 0.5, "use_rslora": True},
    "rank 8, one value": {"rank": 8, "std": None},
    "rank 8, head alone": {"rank": 8, "std": 0.02, "sites": (HEAD,)},
    "DoRA, rank 16, g = 1 ± 5 %": {"rank": 16, "std": 0.02, "use_dora": True, "spread": 0.05},
    "DoRA, rank 8, g = 1 ± 0.5 %": {"rank": 8, "std": 0.02, "use_dora": True, "spread": 0.005},
}
FAULTY = ("rank 16", "rank 64, large", "DoRA, rank 16, g = 1 ± 5 %", "DoRA, rank 8, g = 1 ± 0.5 %")
SITE = "layers.14.mlp.up_proj"


def faults(name: str) -> Iterator[tuple[str, Plant]]:
    """Of an adapter that has gate_proj and up_proj in layers 14 and 15."""
    if name.startswith("DoRA"):
        yield "magnitudes ignored", ignored_magnitudes
        return
    yield "all scalings 2 % too large", scaling(1.02)
    yield "one scaling 2 % too large", scaling(1.02, SITE)
    yield "one scaling 1 % too large", scaling(1.01, SITE)
    yield "gate and up of one layer exchanged", exchange(14, "gate_proj", "up_proj")
    yield "one B read in the other order", transposed_b(14, "up_proj")
    yield "one A of another layer", a_of_another_layer(14, "up_proj", 15)


def write_random(
    base: BaseSpec,
    out: Path,
    *,
    rank: int,
    std: float | None,
    sites: tuple[str, ...] = (),
    spread: float = 0.0,
    **config: Any,
) -> Path:
    """`std`: of A and B; None: all of them 0.0137, whose rounding errors are all alike."""
    rng = np.random.default_rng(rank)
    tensors: dict[str, np.ndarray] = {}
    for (layer, site), shape in base.sites.items():
        if site not in sites if sites else site == HEAD:
            continue
        prefix = f"base_model.model.{shape.module_path}"
        a, b = (
            np.full(size, 0.0137, np.float32)
            if std is None
            else (rng.standard_normal(size) * std).astype("f4")
            for size in ((rank, shape.in_features), (shape.out_features, rank))
        )
        tensors[f"{prefix}.lora_A.weight"], tensors[f"{prefix}.lora_B.weight"] = a, b
        if config.get("use_dora"):
            norms = np.linalg.norm(read_base_weight(base, layer, site).astype(np.float32) + 2 * b @ a, axis=1)
            gain = 1 + spread * rng.standard_normal(len(norms))
            tensors[f"{prefix}.lora_magnitude_vector"] = (norms * gain).astype(np.float32)
    out.mkdir(parents=True)
    targets = sorted({site for _, site in base.sites if (site in sites if sites else site != HEAD)})
    (out / "adapter_config.json").write_text(
        json.dumps(peft_config(r=rank, lora_alpha=2 * rank, target_modules=targets, **config))
    )
    save_file(tensors, out / "adapter_model.safetensors")
    return out


class Bench:
    def __init__(self, engine: LocalEngine, scratch: Path) -> None:
        self._engine = engine
        self._scratch = scratch
        self._count = 0

    def check(self, folder: Path) -> tuple[NumbersVerdict, float]:
        """A copy with a digest of its own, which nobody has loaded before. The verdict, and the reference's seconds."""
        self._count += 1
        copy = self._scratch / str(self._count)
        shutil.copytree(folder, copy)
        config = copy / "adapter_config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"lora_dropout": 1e-6 * self._count}))
        name = f"a{self._count}"
        self._engine.measure(name, self._engine.publish(copy, name=name))
        self._engine.run()
        event = self._engine.events[name][-1]
        outputs = event.measured
        if outputs is None:
            assert event.error is not None
            outputs = SiteOutputs(self._engine.built.info.dtype, (), b"", b"", event.error.message)
        began = time.perf_counter()
        verdict = check_numbers(config, copy / "adapter_model.safetensors", self._engine.base, outputs)
        return verdict, time.perf_counter() - began


def with_weights(folder: Path, out: Path, kinds: str, size: float) -> Path:
    """A copy in which A, B or both of one site have weights around `size`."""
    shutil.copytree(folder, out)
    path = out / "adapter_model.safetensors"
    tensors = load_file(path)
    for name, tensor in tensors.items():
        if SITE in name and any(f"lora_{kind}" in name for kind in kinds):
            tensors[name] = (tensor / np.abs(tensor).max() * size).astype(np.float32)
    save_file(tensors, path)
    return out


def row(dtype: str, name: str, fault: str, verdict: NumbersVerdict, seconds: float) -> None:
    report = verdict.report
    relative = f"{report['relative']['mean']:.1e}" if report["verdict"] != "overflow" else ""
    error = f"{report['max']:.3g} | {report['mean']:.3g}" if report["verdict"] != "overflow" else " | "
    print(
        f"| {dtype} | {name} | {fault} | {error} | {relative} | {report['verdict']} | {seconds:.2f} |",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("adapters", type=Path, nargs="*")
    parser.add_argument("--dtypes", default="bfloat16,float16,float32")
    options = parser.parse_args()
    torch.set_num_threads(1)
    steps: list[float] = []
    measure = SiteProbe._measure

    def timed(self: SiteProbe, asked: Any) -> Any:
        began = time.perf_counter()
        found = measure(self, asked)
        steps.append(time.perf_counter() - began)
        return found

    print(
        "| dtype | adapter | planted | max | mean | relative | verdict | s |\n|---|---|---|---|---|---|---|---|"
    )
    for dtype in options.dtypes.split(","):
        with tempfile.TemporaryDirectory() as scratch, pytest.MonkeyPatch.context() as patch:
            patch.setattr(SiteProbe, "_measure", timed)
            engine = LocalEngine(
                options.model, Path(scratch) / "work", dtype=dtype, num_threads=1, max_num_seqs=4
            )
            bench = Bench(engine, Path(scratch))
            folders = {folder.name: folder for folder in options.adapters}
            for name, given in RANDOM.items():
                folders[name] = write_random(engine.base, Path(scratch) / "made" / name, **given)
            for name, folder in folders.items():
                row(dtype, name, "", *bench.check(folder))
            for name in FAULTY:
                for fault, plant in faults(name):
                    with pytest.MonkeyPatch.context() as planted:
                        plant(planted)
                        row(dtype, name, fault, *bench.check(folders[name]))
            for kinds, size in (("B", 1e20), ("A", 1e20), ("AB", 1e20), ("A", 1e38), ("B", 1e38)):
                folder = with_weights(folders["rank 16"], Path(scratch) / f"{kinds}{size}", kinds, size)
                row(dtype, "rank 16", f"one {' and '.join(kinds)} of {size:g}", *bench.check(folder))
            engine.close()
            print(f"{dtype}: {1000 * max(steps):.1f} ms a step at most", flush=True)
            steps.clear()


if __name__ == "__main__":
    main()
