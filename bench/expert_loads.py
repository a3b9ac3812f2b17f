"""An adapter on all experts of a Qwen3-30B-A3B, halved in layers (18,432 tensors): the processor time of its upload's
inspection and of its load, beside the floor, and how long another thread waits meanwhile:

    .venv/bin/python bench/expert_loads.py DIR [--layers 24] [--rank 8]

Times are of one thread. The floor of a load hashes the bytes of the file and copies them. The other thread asks to wake
each millisecond; its delays beside nothing stand first. DIR gets the files, 0.4 GB."""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import torch
from safetensors.numpy import save_file

from loraplex.adapters.admission.inspection import inspect_adapter
from loraplex.adapters.device.host_image import build_image
from loraplex.adapters.device.layout import ArenaLayout
from loraplex.adapters.spec import BaseSpec, ExpertShape
from loraplex.kernels.experts.lora_types import ExpertSiteGroup
from loraplex.kernels.lora.site_groups import SiteGroup

HIDDEN, INNER, EXPERTS = 2048, 768, 128
TICK_S = 1e-3


def save(folder: Path, layers: int, rank: int) -> tuple[Path, Path]:
    random, tensors = np.random.default_rng(0), {}
    for layer in range(layers):
        for expert in range(EXPERTS):
            for leaf, k, n in (
                ("gate_proj", HIDDEN, INNER),
                ("up_proj", HIDDEN, INNER),
                ("down_proj", INNER, HIDDEN),
            ):
                for side, shape in (("A", (rank, k)), ("B", (n, rank))):
                    name = f"base_model.model.model.layers.{layer}.mlp.experts.{expert}.{leaf}.lora_{side}.weight"
                    tensors[name] = random.standard_normal(shape, np.float32).astype(ml_dtypes.bfloat16)
    folder.mkdir(parents=True, exist_ok=True)
    config, path = folder / "adapter_config.json", folder / "adapter_model.safetensors"
    save_file(tensors, path)
    names = ["gate_proj", "up_proj", "down_proj"]
    config.write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": 16, "target_modules": names}))
    return config, path


def layout_of(layers: int) -> ArenaLayout:
    columns, each = ((0, INNER), (INNER, 2 * INNER), (0, 2 * INNER)), tuple(range(layers))
    return ArenaLayout(
        (SiteGroup("o", ("o_proj",), HIDDEN, (HIDDEN,)),),
        layers,
        torch.bfloat16,
        max_rank=64,
        experts=(
            ExpertSiteGroup("experts.gate_up", ("gate", "up", "gate_up"), HIDDEN, columns, EXPERTS, each),
            ExpertSiteGroup("experts.down", ("down",), INNER, ((0, HIDDEN),), EXPERTS, each),
        ),
    )


def copy_and_hash(path: Path) -> None:
    held, at, digest = bytearray(path.stat().st_size), 0, hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(memoryview(held)[at : at + (1 << 20)]):
            digest.update(memoryview(held)[at : at + count])
            at += count


def beside(work: Callable[[], object]) -> tuple[float, list[float]]:
    """The processor time of `work` in its thread, and the delays of another thread, in seconds."""
    delays: list[float] = []
    taken: list[float] = []

    def run() -> None:
        begun = time.thread_time()
        work()
        taken.append(time.thread_time() - begun)

    thread = threading.Thread(target=run)
    thread.start()
    while thread.is_alive():
        begun = time.perf_counter()
        time.sleep(TICK_S)
        delays.append(time.perf_counter() - begun - TICK_S)
    return taken[0], sorted(delays)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--rank", type=int, default=8)
    given = parser.parse_args()
    torch.set_num_threads(1)
    gc.freeze()  # as an engine does behind its imports
    config, path = save(given.folder, given.layers, given.rank)
    experts = {
        layer: ExpertShape(layer, f"model.layers.{layer}.mlp.experts", EXPERTS, HIDDEN, INNER)
        for layer in range(given.layers)
    }
    (given.folder / "config.json").write_text(json.dumps({"model_type": "qwen3_moe"}))
    base = BaseSpec("0" * 64, "qwen3_moe", given.layers, {}, str(given.folder), experts=experts)
    layout, spec = layout_of(given.layers), inspect_adapter(config, path, base, max_rank=64)
    print(f"{2 * len(spec.experts)} tensors, {path.stat().st_size / 1e6:.0f} MB")
    digest = hashlib.sha256()
    for name, work in (
        ("nothing beside", lambda: time.sleep(2)),
        ("floor of a load", lambda: copy_and_hash(path)),
        ("inspection of an upload", lambda: inspect_adapter(config, path, base, max_rank=64)),
        ("inspection of a load", lambda: inspect_adapter(config, path, base, max_rank=64, deep=False)),
        ("load", lambda: build_image(spec, path, layout, feed=digest.update)),
    ):
        took, delays = beside(work)
        print(
            f"{name:<24} {took:6.2f} s   delays: median {delays[len(delays) // 2] * 1e3:.1f}, "
            f"99 % {delays[len(delays) * 99 // 100] * 1e3:.1f}, longest {delays[-1] * 1e3:.1f} ms"
        )


if __name__ == "__main__":
    main()
