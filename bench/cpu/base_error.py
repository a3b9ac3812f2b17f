"""The measurement of versions' base errors, on the real model and on one of an 8B's shapes:

    PYTHONPATH=tests python -m bench.cpu.base_error MODEL [--large WORK] [--layers 4]

MODEL is the directory of SmolLM2-135M-Instruct. Prints kl and top-1 by forms and adapter, as a server's reports have
them: of the base alone (an adapter of zeros), of the example adapters, and of one of them times three. Then the
processor time of the last measurement, and the most memory that one took. `--large`: those of a random checkpoint of
Llama-3.1-8B's shapes, of `--layers` layers, written to WORK unless it is there, and an adapter of rank 16.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import shutil
import tempfile
from collections.abc import Iterator
from multiprocessing import get_context
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer

from bench.cpu.large_base import FILES, linears
from bench.cpu.quantised import ADAPTERS, ROOT
from loraplex.adapters.admission.trained_base import FULL_PRECISION, INT8_ROWS, NF4
from loraplex.app.plan.shapes import SHAPES
from loraplex.engine.base_error.messages import BaseErrorTask
from loraplex.engine.base_error.prompts import prompt_tokens
from loraplex.engine.model.config_fields import read_config_json
from loraplex.engine.model.family import decoder_spec
from loraplex.engine.model.loading import read_model_config
from loraplex.engine.model.plans import FusedPlan, KeptPlans
from loraplex.lifecycle.base_errors import measure_in_process

FORMS = ((NF4, "none"), (NF4, "int8"), (INT8_ROWS, "none"), (FULL_PRECISION, "int8"))
"""The form of the training, and `--quantise` of the server."""


def scaled(adapter: Path, out: Path, factor: float) -> Path:
    """A copy of an adapter, with `factor` times its effect."""
    shutil.copytree(adapter, out)
    path = out / "adapter_model.safetensors"
    save_file({k: v * v.dtype.type(factor if "lora_B" in k else 1) for k, v in load_file(path).items()}, path)
    return out


def adapters(work: Path) -> Iterator[tuple[str, Path]]:
    folders = {name: ROOT / "examples" / "adapters" / name for name in ADAPTERS}
    yield "none", scaled(folders["json"], work / "zero", 0.0)
    yield from folders.items()
    yield "json × 3", scaled(folders["json"], work / "three", 3.0)


def keep_plan(model: Path, folder: Path) -> None:
    """Keep the plan of the model, as a server's engine does: the measurement need not import transformers then."""
    _, part = read_model_config(model)
    plan = FusedPlan(decoder_spec(part.config, part.raw), "bfloat16", part.unread)
    KeptPlans(folder).save_plan(read_config_json(model)[0], 0, plan)


def measure(model: Path, adapter: Path, trained_on: str, quantise: str, work: Path) -> str:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    task = BaseErrorTask(
        model_dir=str(model),
        quantise=quantise,
        trained_on=trained_on,
        config_path=str(adapter / "adapter_config.json"),
        tensors_path=str(adapter / "adapter_model.safetensors"),
        digest="0" * 64,
        max_rank=64,
        prompts=prompt_tokens(lambda text: list(tokenizer.encode(text).ids)),
        cache_dir=str(work),
        plan_dir=str(work),
    )
    found = asyncio.run(measure_in_process(task))
    if found.kl is None or found.top1 is None:
        return f"no figure: {found.reason}"
    return f"KL {found.kl:.4f} nat, top-1 {found.top1:.3f} of {found.tokens} tokens"


def print_cost(before: float) -> None:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = used.ru_utime + used.ru_stime - before
    print(f"processor time {seconds:.1f} s; at most {used.ru_maxrss / 1024:.0f} MiB", flush=True)


def spent() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def write_large(model: Path, out: Path, layers: int) -> None:
    """Random weights in bfloat16, one file a layer, and an adapter in `out`/adapter."""
    out.mkdir(parents=True)
    config = SHAPES["llama-3.1-8b"] | {"num_hidden_layers": layers}
    (out / "config.json").write_text(json.dumps(config))
    for name in FILES:
        shutil.copy(model / name, out)
    rng = np.random.default_rng(0)
    ones = np.ones(config["hidden_size"], ml_dtypes.bfloat16)
    places: dict[str, str] = {}

    def save(file: str, tensors: dict[str, np.ndarray]) -> None:
        save_file(tensors, out / file, {"format": "pt"})
        places.update(dict.fromkeys(tensors, file))

    def drawn(rows: int, inputs: int) -> np.ndarray:
        values = rng.standard_normal((rows, inputs), np.float32) / np.float32(inputs**0.5)
        return values.astype(ml_dtypes.bfloat16)

    lora: dict[str, np.ndarray] = {}
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        norms = ("input_layernorm", "post_attention_layernorm")
        tensors = {f"{prefix}{norm}.weight": ones for norm in norms}
        for name, (rows, inputs) in linears(config).items():
            tensors[f"{prefix}{name}.weight"] = drawn(rows, inputs)
            lora[f"base_model.model.{prefix}{name}.lora_A.weight"] = drawn(16, inputs)
            lora[f"base_model.model.{prefix}{name}.lora_B.weight"] = drawn(rows, 16)
        save(f"layer-{layer}.safetensors", tensors)
    for name in ("model.embed_tokens", "lm_head"):
        save(f"{name}.safetensors", {f"{name}.weight": drawn(config["vocab_size"], config["hidden_size"])})
    save("norm.safetensors", {"model.norm.weight": ones})
    index = {"metadata": {"total_size": 0}, "weight_map": places}
    (out / "model.safetensors.index.json").write_text(json.dumps(index))
    adapter = out / "adapter"
    adapter.mkdir()
    save_file(lora, adapter / "adapter_model.safetensors", {"format": "pt"})
    targets = sorted(name.rpartition(".")[2] for name in linears(config))
    fields = {"peft_type": "LORA", "r": 16, "lora_alpha": 4, "target_modules": targets}
    (adapter / "adapter_config.json").write_text(json.dumps(fields))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--large", type=Path)
    parser.add_argument("--layers", type=int, default=4)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        if options.large is not None:
            large = options.large / f"bfloat16-{options.layers}"
            if not large.exists():
                # A child's largest memory counts that of its parent at its start.
                writer = get_context("spawn").Process(
                    target=write_large, args=(options.model, large, options.layers)
                )
                writer.start()
                writer.join()
            keep_plan(large, work)
            before = spent()
            print(f"{options.layers} layers: {measure(large, large / 'adapter', NF4, 'none', work)}")
            print_cost(before)
            return
        keep_plan(options.model, work)
        made = dict(adapters(work))
        for trained_on, quantise in FORMS:
            print(f"trained on {trained_on}, --quantise {quantise}:")
            for name, adapter in made.items():
                before = spent()
                found = measure(options.model, adapter, trained_on, quantise, work)
                print(f"  {name:10} {found}", flush=True)
            print_cost(before)


if __name__ == "__main__":
    main()
