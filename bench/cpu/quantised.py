"""Forms of a base's weights beside each other, on the real model:

    PYTHONPATH=tests python -m bench.cpu.quantised MODEL [--errors] [--trained] [--steps] [--forms bfloat16,int8]

MODEL is the directory of SmolLM2-135M-Instruct. `--errors`: the Kullback-Leibler divergence, in nats a token, of codes
from the checkpoint, both computed in float32, for the base and the example adapters, over text of five kinds.
`--trained`: the same of the checkpoint from nf4 made of it: what an adapter that was trained over 4 bits loses.
`--steps`: medians of whole steps of two forms, of two engines in turns, and the bytes of their weights. A form is a
dtype, int8 (rows in bfloat16 over codes), or gguf (the same over the codes of `--gguf FILE`).
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from loraplex.adapters.admission.base_model import BaseWeights, load_base_spec
from loraplex.adapters.admission.inspection import inspect_adapter
from loraplex.adapters.base_weights.nf4 import quantise_nf4
from loraplex.adapters.device.arena import AdapterArena
from loraplex.adapters.device.host_image import build_image
from loraplex.adapters.device.layout import ArenaLayout
from loraplex.app.base_model.source import ensure_model
from loraplex.kernels.backend import resolve_kernels
from support.engine.local_engine import LocalEngine
from support.models.checkpoints import PagedRun
from support.models.loading import load_model
from support.servers.live_server import write_real_adapter

ROOT = Path(__file__).parents[2]
ADAPTERS = ("json", "pirate", "sentiment")
TOKENS = 200
"""Tokens of each kind of text."""
CONTEXT = 128
CASES = ((1, 0), (4, 0), (16, 0), (16, 16), (64, 0))
"""Rows of a decoding step, and the adapters among which they are dealt out."""
PROMPT = 512
"""Tokens of the prompt that is computed in one step."""
SETTINGS: dict[str, dict[str, Any]] = {
    "bfloat16": {"dtype": "bfloat16"},
    "float32": {"dtype": "float32"},
    "int8": {"dtype": "bfloat16", "quantise": "int8"},
    "gguf": {"dtype": "bfloat16"},
}
"""Settings of an engine by form."""


def texts() -> dict[str, str]:
    """Five kinds of text, of this repository."""
    chat = "<|im_start|>user\nWhat should I do on a rainy day in a city that I do not know?<|im_end|>\n" * 12
    return {
        "chat": chat + "<|im_start|>assistant\nYou could go to a museum, or read a book in a quiet place.",
        "code": (ROOT / "server/loraplex/engine/scheduling/scheduler.py").read_text(),
        "json": (ROOT / "examples/adapters/json/adapter_config.json").read_text() * 3,
        "docs": (ROOT / "README.md").read_text(),
        "licence": (ROOT / "LICENSE").read_text(),
    }


def logits(
    model_dir: Path,
    prompts: list[list[int]],
    *,
    quantise: bool,
    names: Sequence[str] = ("base", *ADAPTERS),
    kv_dtype: torch.dtype = torch.float32,
) -> dict[str, torch.Tensor]:
    """[tokens of all prompts, V] log probabilities, of the base and of each adapter, or of those in `names`."""
    model = load_model(model_dir, "cpu", torch.float32, quantise=quantise)
    spec = load_base_spec(model_dir, quantise="int8" if quantise else "none")
    layout = ArenaLayout(model.site_groups, model.num_layers, model.dtype, max_rank=64, head=model.head_group)
    arena = AdapterArena(layout, 1024, len(ADAPTERS), resolve_kernels("auto", torch.device("cpu")))
    used, found = 0, {}
    for slot, name in enumerate(ADAPTERS):
        folder = ROOT / "examples" / "adapters" / name
        files = folder / "adapter_config.json", folder / "adapter_model.safetensors"
        image = build_image(
            inspect_adapter(*files, spec, max_rank=64), files[1], layout, base=BaseWeights(spec)
        )
        arena.write(image, slot, tuple(range(used, used + image.num_pages)))
        used += image.num_pages
    for slot, name in enumerate(("base", *ADAPTERS), -1):
        if name not in names:
            continue
        run = PagedRun(model, prompts, kv_dtype=kv_dtype)
        for number, prompt in enumerate(prompts):
            segments = [] if slot < 0 else [(slot, 0, len(prompt))]
            lora = arena.lora_pass(segments, len(prompt)) if segments else None
            run.step({number: len(prompt)}, lora)
        found[name] = torch.cat([run.result(i) for i in range(len(prompts))]).log_softmax(-1)
    return found


def print_errors(trained: Path, served: Path, *, quantise: bool) -> None:
    """`quantise`: `served` as int8 codes."""
    prompts = prompts_of(served)
    exact = logits(trained, prompts, quantise=False)
    print_divergence(prompts, exact, logits(served, prompts, quantise=quantise))


def prompts_of(model_dir: Path) -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    return [tokenizer.encode(text).ids[:TOKENS] for text in texts().values()]


def print_divergence(
    prompts: list[list[int]], exact: dict[str, torch.Tensor], codes: dict[str, torch.Tensor]
) -> None:
    """Divergences of the log probabilities of `codes` from the exact ones, by name."""
    print(f"{sum(map(len, prompts))} tokens of {', '.join(texts())}, float32:")
    for name, expected in exact.items():
        divergence = (expected.exp() * (expected - codes[name])).sum(-1)
        same = (expected.argmax(-1) == codes[name].argmax(-1)).float().mean()
        print(f"  {name:10} KL {divergence.mean():.5f} nat, largest {divergence.max():.3f}; top-1 {same:.3f}")


def write_nf4(model_dir: Path, out: Path) -> None:
    """The checkpoint, its layers' linears as nf4 stands for them, in float32."""
    for path in model_dir.glob("*.json"):
        shutil.copy(path, out)
    tensors = load_file(model_dir / "model.safetensors")
    for name, weight in tensors.items():
        found = weight.float()
        is_linear = name.endswith("_proj.weight")
        tensors[name] = torch.from_numpy(quantise_nf4(found.numpy())) if is_linear else found
    save_file(tensors, out / "model.safetensors", {"format": "pt"})


def decoding(model_dir: Path, work: Path, rows: int, adapters: int, **settings: Any) -> LocalEngine:
    """An engine with `rows` sequences, all of them decoding."""
    engine = LocalEngine(
        model_dir, work, max_model_len=2048, kv_cache_memory=1 << 30, adapter_memory=256 << 20, **settings
    )
    folders = [write_real_adapter(work / f"a{number}", seed=number, rank=16) for number in range(adapters)]
    refs = [engine.publish(folder, name=f"a{number}") for number, folder in enumerate(folders)]
    for row in range(rows):
        prompt = [100 + row * 7 + place for place in range(CONTEXT)]
        engine.add(f"r{row}", prompt, refs[row % len(refs)] if refs else None, max_tokens=1500)
    while len(engine.events) < rows:
        engine.step()
    return engine


def print_steps(forms: dict[str, Path], turns: int, threads: int) -> None:
    """`forms`: two, each with its model directory."""
    for rows, adapters in CASES:
        with compared(forms, rows, adapters, threads) as engines:
            seconds = [[seconds_of_step(engine) for engine in engines] for _ in range(4 * turns)]
            sizes = [engine.built.info.memory for engine in engines]
        held = " / ".join(f"{size.weights / 1e6:.0f} MB" for size in sizes if size is not None)
        print(f"{rows:3} rows, {adapters:2} adapters: {ratio(seconds)}; {held}")
    with compared(forms, 0, 0, threads, max_num_batched_tokens=PROMPT) as engines:
        seconds = []
        for turn in range(turns):
            prompt = [100 + (turn * 31 + place * 7) % 20_000 for place in range(PROMPT)]
            for engine in engines:
                engine.add(f"p{turn}", prompt, max_tokens=1)
            seconds.append([seconds_of_step(engine) for engine in engines])
            for engine in engines:
                engine.step()
    print(f"a prompt of {PROMPT} tokens: {ratio(seconds)}")


@contextmanager
def compared(
    forms: dict[str, Path], rows: int, adapters: int, threads: int, **settings: Any
) -> Iterator[list[LocalEngine]]:
    with tempfile.TemporaryDirectory() as work:
        engines = [
            decoding(
                path,
                Path(work) / form,
                rows,
                adapters,
                num_threads=threads,
                **SETTINGS[form],
                **settings,
            )
            for form, path in forms.items()
        ]
        yield engines
        for engine in engines:
            engine.close()


def seconds_of_step(engine: LocalEngine) -> float:
    start = time.perf_counter()
    engine.step()
    return time.perf_counter() - start


def ratio(seconds: list[list[float]]) -> str:
    first, second = (1e3 * statistics.median(each) for each in zip(*seconds, strict=True))
    return f"{first:6.2f} / {second:6.2f} ms = {first / second:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--errors", action="store_true")
    parser.add_argument("--trained", action="store_true")
    parser.add_argument("--steps", action="store_true")
    parser.add_argument("--forms", default="bfloat16,int8", help="two of " + ", ".join(SETTINGS))
    parser.add_argument("--gguf", default="")
    parser.add_argument("--turns", type=int, default=25)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    if options.errors:
        torch.set_num_threads(options.threads)
        print_errors(options.model, options.model, quantise=True)
    if options.trained:
        torch.set_num_threads(options.threads)
        with tempfile.TemporaryDirectory() as made:
            write_nf4(options.model, Path(made))
            print_errors(Path(made), options.model, quantise=False)
    if options.steps:
        forms = {
            form: ensure_model(options.gguf) if form == "gguf" else options.model
            for form in options.forms.split(",")
        }
        print_steps(forms, options.turns, options.threads)


if __name__ == "__main__":
    main()
