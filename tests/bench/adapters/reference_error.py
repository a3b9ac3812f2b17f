"""How far the engine's log probabilities are from a float32 reference, and which planted errors show in them.

    PYTHONPATH=tests python -m bench.adapters.reference_error MODEL ADAPTER… [--dtype bfloat16]

MODEL is the directory of SmolLM2-135M-Instruct, each ADAPTER a PEFT directory for it. Two prompts of 16 tokens; of each
position but the first the log probability of the token itself and of the engine's 20 most likely ones. An error is
planted in the reference: all scalings 2 % too large, two linears of the same shape exchanged, one B read in the other
order of its dimensions. "slope" is the regression of the error on the adapter's effect.
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from transformers import AutoTokenizer

from bench.adapters.float32_reference import AdaptedLinear, ReferenceModel, read_adapter
from loraplex.adapters.ref import AdapterRef
from support.engine.local_engine import LocalEngine

TEXT = (
    "The quick brown fox jumps over the lazy dog. In 2024, Anna's team shipped 37 parcels to Oslo; how many were late? "
    "def add(a, b): return a + b"
)
NUM_PROMPTS, LENGTH, NUM_TOP = 2, 16, 20
Ids = list[list[tuple[int, ...]]]
"""The tokens that are compared, by prompt and position."""


def engine_log_probs(
    engine: LocalEngine, name: str, prompts: list[list[int]], adapter: AdapterRef | None
) -> tuple[np.ndarray, Ids]:
    for number, prompt in enumerate(prompts):
        engine.add(f"{name}-{number}", prompt, adapter, max_tokens=0, prompt_logprobs=NUM_TOP)
    engine.run()
    values: list[float] = []
    ids: Ids = []
    for number, prompt in enumerate(prompts):
        events = engine.events[f"{name}-{number}"]
        assert events[-1].error is None, events[-1].error
        parts = [event.scores.prompt for event in events if event.scores is not None]
        rows = [row for part in parts if part is not None for row in part.rows()]
        ids.append([])
        for token, (own, top) in zip(prompt[1:], rows, strict=True):
            values += [own, *(value for _, value in top)]
            ids[-1].append((token, *(other for other, _ in top)))
    return np.array(values), ids


def gather(log_probs: list[torch.Tensor], ids: Ids) -> np.ndarray:
    parts = [
        rows[:-1].gather(1, torch.tensor(wanted)).flatten()
        for rows, wanted in zip(log_probs, ids, strict=True)
    ]
    return torch.cat(parts).numpy()


def planted(adapter: Mapping[str, AdaptedLinear]) -> Iterator[tuple[str, dict[str, AdaptedLinear]]]:
    """What is wrong, and the adapter read so."""
    yield "nothing", dict(adapter)
    yield (
        "scaling x 1.02",
        {path: dataclasses.replace(site, scaling=site.scaling * 1.02) for path, site in adapter.items()},
    )
    paths = list(adapter)
    middle = paths[len(paths) // 2]
    site = adapter[middle]
    alike = [
        path
        for path in paths
        if path != middle and adapter[path].a.shape == site.a.shape and adapter[path].b.shape == site.b.shape
    ]
    if alike:
        yield "two linears exchanged", {**adapter, middle: adapter[alike[-1]], alike[-1]: site}
    turned = site.b.reshape(site.b.shape[::-1]).T.contiguous()
    yield "one B turned", {**adapter, middle: dataclasses.replace(site, b=turned)}


def main() -> None:
    parser = argparse.ArgumentParser(description="The engine's log probabilities beside a float32 reference.")
    parser.add_argument("model", type=Path)
    parser.add_argument("adapters", type=Path, nargs="+")
    parser.add_argument("--dtype", default="bfloat16")
    arguments = parser.parse_args()
    tokens = AutoTokenizer.from_pretrained(arguments.model)(TEXT)["input_ids"]
    prompts = [tokens[number * LENGTH : (number + 1) * LENGTH] for number in range(NUM_PROMPTS)]
    reference = ReferenceModel(arguments.model)
    base = reference.log_probs(prompts, {})
    print(
        "| adapter | planted | mean error | largest error | mean effect | slope |\n|---|---|---|---|---|---|"
    )
    with tempfile.TemporaryDirectory() as work:
        engine = LocalEngine(
            arguments.model,
            Path(work),
            dtype=arguments.dtype,
            adapter_memory=256 << 20,
            kv_cache_memory=256 << 20,
        )
        values, ids = engine_log_probs(engine, "base", prompts, None)
        errors = np.abs(values - gather(base, ids))
        print(f"| none | | {errors.mean():.4f} | {errors.max():.3f} | | |", flush=True)
        for folder in arguments.adapters:
            adapter = read_adapter(folder / "adapter_config.json", folder / "adapter_model.safetensors")
            values, ids = engine_log_probs(engine, folder.name, prompts, engine.publish(folder))
            for what, read in planted(adapter):
                expected = gather(reference.log_probs(prompts, read), ids)
                error, effect = values - expected, expected - gather(base, ids)
                print(
                    f"| {folder.name} | {what} | {np.abs(error).mean():.4f} | {np.abs(error).max():.3f} "
                    f"| {np.abs(effect).mean():.4f} | {error @ effect / (effect @ effect):+.4f} |",
                    flush=True,
                )
        engine.close()


if __name__ == "__main__":
    main()
