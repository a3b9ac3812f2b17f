"""Forms of a base's weights beside each other, on the real model:

    PYTHONPATH=tests python -m bench.cpu.quantised MODEL [--errors] [--trained] [--activations] [--steps]
        [--forms bfloat16,int8] [--gguf FILE] [--w8a8 CHECKPOINT] [--random] [--cases 1,16,16+16,prompt]

MODEL is the directory of SmolLM2-135M-Instruct. `--errors`: the Kullback-Leibler divergence, in nats a token, of codes
from the checkpoint, both computed in float32, for the base and the example adapters, over text of five kinds.
`--trained`: the same of the checkpoint from nf4 made of it: what an adapter that was trained over 4 bits loses.
`--activations`: the same of the codes of `--gguf FILE` and of `--w8a8 CHECKPOINT` (which `bench.cpu.w8a8_checkpoint`
makes of MODEL), from these codes in float32, with rows in bfloat16, with 8-bit activations, and with both; what is
served of the checkpoint from MODEL too. `--steps`: medians of whole steps of forms, of engines in turns, in processor
time, and the bytes of their weights. A form is a dtype, int8 (rows in bfloat16 over codes), gguf (the same over the
codes of `--gguf FILE`), w4a8 (these with 8-bit activations), w8 (rows in bfloat16 over the codes of `--w8a8
CHECKPOINT`), or w8a8 (these with 8-bit activations). With `--random` no model is needed: MODEL is a directory that
random weights of SmolLM2-135M's shape are written to, as gptq in 4 bits in groups of 32 with zeros, the head in 8 bits,
and as that checkpoint.
A case is the number of rows of decoding steps, "+" the number of adapters among which they are dealt out, or "prompt".
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from bench.cpu.w8a8_checkpoint import write_w8a8
from loraplex.adapters.admission.base_model import BaseWeights, load_base_spec
from loraplex.adapters.admission.inspection import inspect_adapter
from loraplex.adapters.base_weights.nf4 import quantise_nf4
from loraplex.adapters.device.arena import AdapterArena
from loraplex.adapters.device.host_image import build_image
from loraplex.adapters.device.layout import ArenaLayout
from loraplex.kernels.backend import resolve_kernels
from support.adapters.drafts import TinyBase, make_adapter, write_base
from support.engine.local_engine import LocalEngine
from support.models.checkpoints import PagedRun
from support.models.loading import load_model
from support.models.quantised_formats import write_quantised

ROOT = Path(__file__).parents[2]
ADAPTERS = ("json", "pirate", "sentiment")
TOKENS = 200
"""Tokens of each kind of text."""
CONTEXT = 128
CASES = "1,4,16,16+16,64,prompt"
PROMPT = 512
"""Tokens of the prompt that is computed in one step."""
SETTINGS: dict[str, dict[str, Any]] = {
    "bfloat16": {"dtype": "bfloat16"},
    "float32": {"dtype": "float32"},
    "int8": {"dtype": "bfloat16", "quantise": "int8"},
    "gguf": {"dtype": "bfloat16"},
    "w4a8": {"dtype": "auto"},
    "w8": {"dtype": "bfloat16"},
    "w8a8": {"dtype": "auto"},
}
"""Settings of an engine by form."""
OPTIONS = {"gguf": "gguf", "w4a8": "gguf", "w8": "w8a8", "w8a8": "w8a8"}
"""The option that names the codes of a form."""
SMOLLM2 = TinyBase(
    layers=30, hidden=576, intermediate=1536, heads=9, kv_heads=3, head_dim=64, vocab=49152, tied=True
)


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
    kv_dtype: torch.dtype | None = None,
    dtype: str = "float32",
) -> dict[str, torch.Tensor]:
    """[tokens of all prompts, V] log probabilities, of the base and of each adapter, or of those in `names`.
    `kv_dtype`: of keys and values, None for the model's."""
    model = load_model(model_dir, "cpu", dtype, quantise=quantise)
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
        run = PagedRun(model, prompts, kv_dtype=kv_dtype or model.dtype)
        for number, prompt in enumerate(prompts):
            segments = [] if slot < 0 else [(slot, 0, len(prompt))]
            lora = arena.lora_pass(segments, len(prompt)) if segments else None
            run.step({number: len(prompt)}, lora)
        found[name] = torch.cat([run.result(i) for i in range(len(prompts))]).log_softmax(-1)
    return found


def print_errors(trained: Path, served: Path, *, quantise: bool, dtype: str = "float32") -> None:
    """`quantise`: `served` as int8 codes; `dtype`: what it is served in."""
    prompts = prompts_of(served)
    exact = logits(trained, prompts, quantise=False)
    print_divergence(
        prompts, exact, logits(served, prompts, quantise=quantise, dtype=dtype), f"served: {dtype}"
    )


def print_activations(model_dir: Path) -> None:
    """Print how far 8-bit activations are from a quantised checkpoint's own weights."""
    prompts = prompts_of(model_dir)
    exact = logits(model_dir, prompts, quantise=False)
    with tempfile.TemporaryDirectory() as work:
        wide = in_float32(model_dir, Path(work))
        for what, folder, dtype in (
            ("rows in bfloat16", model_dir, "bfloat16"),
            ("8-bit activations, rows in float32", wide, "auto"),
            ("8-bit activations, rows in bfloat16", model_dir, "auto"),
        ):
            print_divergence(prompts, exact, logits(folder, prompts, quantise=False, dtype=dtype), what)


def in_float32(model_dir: Path, out: Path) -> Path:
    """The model directory, whose config says that rows are in float32."""
    for path in model_dir.iterdir():
        (out / path.name).symlink_to(path)
    config = json.loads((model_dir / "config.json").read_text())
    (out / "config.json").unlink()
    (out / "config.json").write_text(json.dumps(config | {"dtype": "float32", "torch_dtype": "float32"}))
    return out


def prompts_of(model_dir: Path) -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    return [tokenizer.encode(text).ids[:TOKENS] for text in texts().values()]


def print_divergence(
    prompts: list[list[int]],
    exact: dict[str, torch.Tensor],
    codes: dict[str, torch.Tensor],
    what: str = "float32",
) -> None:
    """Divergences of the log probabilities of `codes` from the exact ones, by name. `what`: how they are served."""
    print(f"{sum(map(len, prompts))} tokens of {', '.join(texts())}, {what}:")
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


def write_random(out: Path) -> dict[str, Path]:
    """Random weights of SmolLM2-135M's shape, in bfloat16 as "plain", and as checkpoints of codes, by the option that
    would name them. What is in `out` already is used again."""
    plain, codes, w8a8 = out / "plain", out / "codes", out / "w8a8"
    if not codes.exists():
        write_base(plain, SMOLLM2)
        config = json.loads((plain / "config.json").read_text())
        (plain / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 2048}))
        with tempfile.TemporaryDirectory(dir=out) as made:
            write_quantised(plain, Path(made), "gptq int4, zeros")
            (Path(made) / "quantised").rename(codes)
    if not w8a8.exists():
        write_w8a8(plain, w8a8)
    return {"plain": plain, "gguf": codes, "w8a8": w8a8}


def forms_of(options: argparse.Namespace) -> dict[str, tuple[Path, dict[str, Any]]]:
    """The model directory and the settings of each form that was asked for."""
    folders = write_random(options.model) if options.random else {"plain": options.model, **codes_of(options)}
    made = {}
    for form in options.forms.split(","):
        option = OPTIONS.get(form, "plain")
        if option not in folders:
            raise SystemExit(f"{form}: give --{option} or --random")
        # The head of the random checkpoint of 4 bits is not in codes by itself.
        beside = {"quantise": "int8"} if options.random and option == "gguf" else {}
        made[form] = folders[option], SETTINGS[form] | beside
    return made


def codes_of(options: argparse.Namespace) -> dict[str, Path]:
    """The quantised checkpoints that were given, by their options."""
    found = {"w8a8": options.w8a8} if options.w8a8 else {}
    if options.gguf:
        from loraplex.app.base_model.source import ensure_model  # much else, which the others do without

        found["gguf"] = ensure_model(options.gguf)
    return found


class Decoding:
    """An engine of one form, whose steps are timed."""

    def __init__(self, model_dir: Path, work: Path, threads: int, adapters: int, **settings: Any) -> None:
        sizes = {"max_model_len": 2048, "kv_cache_memory": 1 << 30, "adapter_memory": 256 << 20}
        self._engine = LocalEngine(
            model_dir, work, num_threads=threads, max_num_batched_tokens=PROMPT, **sizes, **settings
        )
        # Of one thread, what runs beside does not count.
        self._clock = time.process_time if threads == 1 else time.perf_counter
        self._refs = []
        for number in range(adapters):
            folder = work / f"a{number}"
            make_adapter(folder, SMOLLM2, seed=number, rank=16, scale=0.02)
            self._refs.append(self._engine.publish(folder, name=f"a{number}"))
        memory = self._engine.built.info.memory
        self.weights = 0 if memory is None else memory.weights

    def begin(self, rows: int, adapters: int) -> None:
        """`rows` sequences that decode."""
        for row in range(rows):
            prompt = [100 + row * 7 + place for place in range(CONTEXT)]
            ref = self._refs[row % adapters] if adapters else None
            self._engine.add(f"r{row}", prompt, ref, max_tokens=1500)
        while len(self._engine.events) < rows:
            self._engine.step()

    def begin_prompt(self, turn: int) -> None:
        prompt = [100 + (turn * 31 + place * 7) % 20_000 for place in range(PROMPT)]
        self._engine.add(f"p{turn}", prompt, max_tokens=1)

    def seconds_of_step(self) -> float:
        start = self._clock()
        self._engine.step()
        return self._clock() - start

    def end(self) -> None:
        """Abort all requests."""
        for name in self._engine.events:
            self._engine.core.abort(name)
        self._engine.run()
        self._engine.events.clear()

    def close(self) -> None:
        self._engine.close()


def print_steps(
    forms: dict[str, tuple[Path, dict[str, Any]]], cases: Sequence[str], turns: int, threads: int
) -> None:
    """`forms`: each with its model directory and its settings."""
    with tempfile.TemporaryDirectory() as work:
        most = max(int(case.partition("+")[2] or 0) for case in cases)
        engines = [
            Decoding(path, Path(work) / form, threads, most, **settings)
            for form, (path, settings) in forms.items()
        ]
        held = " / ".join(f"{engine.weights / 1e6:.0f}" for engine in engines)
        print(f"{' / '.join(forms)}; {held} MB of weights")
        for case in cases:
            if case == "prompt":
                print(f"a prompt of {PROMPT} tokens: {ratios(prompt_seconds(engines, turns))}")
                continue
            rows, _, adapters = case.partition("+")
            for engine in engines:
                engine.begin(int(rows), int(adapters or 0))
            seconds = [[engine.seconds_of_step() for engine in engines] for _ in range(4 * turns)]
            for engine in engines:
                engine.end()
            print(f"{rows:>3} rows, {adapters or 0:>2} adapters: {ratios(seconds)}")
        for engine in engines:
            engine.close()


def prompt_seconds(engines: list[Decoding], turns: int) -> list[list[float]]:
    seconds = []
    for turn in range(turns):
        for engine in engines:
            engine.begin_prompt(turn)
        seconds.append([engine.seconds_of_step() for engine in engines])
        for engine in engines:
            engine.end()
    return seconds


def ratios(seconds: list[list[float]]) -> str:
    """Medians of each form, and the first over each of the others."""
    medians = [1e3 * statistics.median(each) for each in zip(*seconds, strict=True)]
    times = ", ".join(f"{medians[0] / each:.2f}" for each in medians[1:])
    return f"{' / '.join(f'{each:6.2f}' for each in medians)} ms; {times} times"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--errors", action="store_true")
    parser.add_argument("--trained", action="store_true")
    parser.add_argument("--activations", action="store_true")
    parser.add_argument("--steps", action="store_true")
    parser.add_argument("--forms", default="bfloat16,int8", help="of " + ", ".join(SETTINGS))
    parser.add_argument("--gguf", default="")
    parser.add_argument("--w8a8", type=Path)
    parser.add_argument("--random", action="store_true")
    parser.add_argument("--cases", default=CASES)
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
    if options.activations:
        torch.set_num_threads(options.threads)
        for option, folder in codes_of(options).items():
            print(f"--{option}:")
            print_activations(folder)
            if option == "w8a8":
                print("from the checkpoint of 16 bits, in float32")
                print_errors(options.model, folder, quantise=False, dtype="auto")
    if options.steps:
        print_steps(forms_of(options), options.cases.split(","), options.turns, options.threads)


if __name__ == "__main__":
    main()
