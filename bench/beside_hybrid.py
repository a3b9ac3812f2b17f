"""Loraplex, vLLM's CPU build and llama.cpp on one random checkpoint of Qwen3.5-0.8B's sizes, a core for each:

    PYTHONPATH=tests .venv/bin/python -m bench.beside_hybrid WORKDIR [--setup] [--rounds 3] [--sides loraplex,llama.cpp]
        [--prompt 64] [--output 64]

`--setup` makes the checkpoint, an environment with vLLM (`bench.beside_vllm`), and llama.cpp as `node-llama-cpp` brings
it, with the checkpoint converted by the script in llama-cpp-python's sources. All servers stand at once, each held to
one core and so to one thread, and answer in turns: 1 and 16 requests, all in bfloat16, greedy, no drafts. What counts
is tokens in a second of the processor's time, of all threads of a server, as other programs use the machine.
llama.cpp has no HTTP and no tokenizer around it: its figure is its engine's alone.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil

from bench.beside_vllm import install_peer, ours, peer, place
from bench.hybrid import save_base

NODE_LLAMA, LLAMA_SOURCE = "3.22.1", "0.3.36"
REQUESTS = (1, 16)
OURS, VLLM, LLAMA = "loraplex", "vllm", "llama.cpp"
Ask = Callable[[int], float]
"""Answers this many requests at once; tokens in a second of the processor's time."""


def set_up(work: Path) -> None:
    """Make what is missing in WORKDIR."""
    base, file = save_base(work / "base"), work / "base.gguf"
    install_peer(work)
    packages = next((work / "vv/lib").glob("python3.*")) / "site-packages"
    if not (packages / "torchvision").exists():
        # Its registrations are for another build of torch. Text does not need them.
        subprocess.run([work / "vv/bin/pip", "install", "-q", "--no-deps", "torchvision==0.28.0"], check=True)
        (packages / "torchvision/_meta_registrations.py").write_text("import torchvision.extension\n")
    if not (work / "node/node_modules").exists():
        (work / "node").mkdir()
        command = ["npm", "install", "--ignore-scripts", f"node-llama-cpp@{NODE_LLAMA}"]
        subprocess.run(command, cwd=work / "node", check=True)
    if not file.exists():
        name = f"llama-cpp-python=={LLAMA_SOURCE}"
        download = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:", name]
        subprocess.run([*download, "-d", work], check=True)
        with tarfile.open(next(work.glob(f"llama_cpp_python-{LLAMA_SOURCE}*.tar.gz"))) as archive:
            archive.extractall(work, filter="data")
        source = work / f"llama_cpp_python-{LLAMA_SOURCE}/vendor/llama.cpp"
        convert = [work / "vv/bin/python", source / "convert_hf_to_gguf.py", base, "--no-mtp"]
        environment = os.environ | {"PYTHONPATH": str(source / "gguf-py")}
        subprocess.run([*convert, "--outtype", "bf16", "--outfile", file], env=environment, check=True)


def processor_time(root: psutil.Process) -> float:
    """Seconds of a process and all below it."""
    total = 0.0
    for process in [root, *root.children(recursive=True)]:
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            total += times.user + times.system
    return total


def over_http(port: int, key: str, prompt: int, output: int, root: psutil.Process) -> Ask:
    url, rng = f"http://127.0.0.1:{port}/v1/completions", random.Random(port)

    def one(ids: list[int]) -> int:
        asked = {"model": "base", "prompt": ids, "max_tokens": output, "ignore_eos": True, "temperature": 0}
        answer = httpx.post(url, json=asked, headers={"authorization": f"Bearer {key}"}, timeout=900)
        answer.raise_for_status()
        tokens: int = answer.json()["usage"]["completion_tokens"]
        return tokens

    def ask(requests: int) -> float:
        prompts = [[rng.randrange(100, 40_000) for _ in range(prompt)] for _ in range(requests)]
        begun = processor_time(root)
        with ThreadPoolExecutor(requests) as pool:
            tokens = sum(pool.map(one, prompts))
        return tokens / (processor_time(root) - begun)

    return ask


@contextlib.contextmanager
def llama(work: Path, prompt: int, output: int) -> Iterator[Ask]:
    program = work / "node/llama_sequences.mjs"  # beside the packages that it imports
    program.write_text(Path(__file__).with_name(program.name).read_text())
    command = ["node", program.name, work / "base.gguf", str(max(REQUESTS)), str(prompt + output + 8)]
    with subprocess.Popen(
        command, cwd=program.parent, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None

        def told() -> dict[str, float]:
            for line in process.stdout or ():
                if line.startswith("{"):
                    found: dict[str, float] = json.loads(line)
                    return found
            raise SystemExit("llama.cpp ended")

        def ask(requests: int) -> float:
            print(requests, prompt, output, file=process.stdin, flush=True)
            found = told()
            return found["tokens"] / found["processor"] * 1e3

        told()
        try:
            yield ask
        finally:
            process.stdin.close()


@contextlib.contextmanager
def server(side: str, work: Path, prompt: int, output: int) -> Iterator[Ask]:
    """One side on the last core, and so on one thread."""
    before, cores = {child.pid for child in psutil.Process().children()}, os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(cores)})  # its processes inherit it
    try:
        with contextlib.ExitStack() as stack:
            if side == LLAMA:
                yield stack.enter_context(llama(work, prompt, output))
                return
            if side == OURS:
                started = ours(work, model=work / "base", adapters=0, options=["--speculation", "off"])
            else:
                os.environ["VLLM_CPU_OMP_THREADS_BIND"] = str(max(cores))
                started = peer(work, 0, model=work / "base")
            port, key = stack.enter_context(started)
            os.sched_setaffinity(0, cores)
            root = next(child for child in psutil.Process().children() if child.pid not in before)
            yield over_http(port, key, prompt, output, root)
    finally:
        os.sched_setaffinity(0, cores)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workdir", type=Path)
    parser.add_argument("--setup", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sides", default=f"{OURS},{VLLM},{LLAMA}")
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--output", type=int, default=64)
    given = parser.parse_args()
    work = given.workdir.resolve()
    if given.setup:
        work.mkdir(parents=True, exist_ok=True)
        set_up(work)
    print(place(), flush=True)
    sides = given.sides.split(",")
    rates: dict[tuple[str, int], list[float]] = {(side, count): [] for side in sides for count in REQUESTS}
    with contextlib.ExitStack() as stack:
        asks = {side: stack.enter_context(server(side, work, given.prompt, given.output)) for side in sides}
        for number in range(given.rounds + 1):
            for count in REQUESTS:
                for side, ask in asks.items():
                    rate = ask(count)
                    if number:  # the first one warms up
                        rates[side, count].append(rate)
                    print(f"{side}, {count}: {rate:.2f}, load {os.getloadavg()[0]:.1f}", flush=True)
    for (side, count), found in rates.items():
        ratios = [mine / theirs for mine, theirs in zip(rates[OURS, count], found, strict=True)]
        print(
            f"| {count} | {side} | {statistics.median(found):.1f} ({min(found):.1f} to {max(found):.1f}) "
            f"| {statistics.median(ratios):.2f} |"
        )


if __name__ == "__main__":
    main()
