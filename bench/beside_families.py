"""Loraplex beside vLLM's CPU build and llama.cpp on one random checkpoint, the same cores for each:

    PYTHONPATH=tests .venv/bin/python -m bench.beside_families WORKDIR --setup [--family qwen3_5]
    PYTHONPATH=tests .venv/bin/python -m bench.beside_families WORKDIR [--family qwen3_5] [--rounds 3] [--cores 1]
        [--sides loraplex,vllm] [--requests 1,16] [--prompt 64] [--output 32]

Families: qwen3_5 has the sizes of Qwen3.5-0.8B (1.5 GB), qwen3_moe 32 experts, 4 for each row (1.7 GB).
`--setup` makes the checkpoint, an environment with vLLM (`bench.beside_vllm`), and, where llama.cpp is a side, that as
`node-llama-cpp` brings it, with the checkpoint converted by the script in llama-cpp-python's sources. The second
command measures: all servers stand at once, each held to the last `--cores` cores and that many threads, and answer in
turns, all in bfloat16, greedy, no drafts. Two rates are told: tokens in a second of the processor's time, of all
threads of a server, which is what counts where other programs use the machine, and tokens in a second by the clock.
llama.cpp has no HTTP and no tokenizer around it: its figures are its engine's alone.
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
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import httpx
import psutil

from bench.beside_vllm import install_peer, ours, peer, place
from bench.hybrid import FAMILIES, save_base

NODE_LLAMA, LLAMA_SOURCE = "3.22.1", "0.3.36"
OURS, VLLM, LLAMA = "loraplex", "vllm", "llama.cpp"
SIDES = {"qwen3_5": (OURS, VLLM, LLAMA), "qwen3_moe": (OURS, VLLM)}
"""The servers that are asked on a family's checkpoint unless others are named."""


class Rates(NamedTuple):
    """Tokens in a second of the processor's time, and in a second."""

    processor: float
    clock: float


Ask = Callable[[int], Rates]
"""Answers this many requests at once."""


@dataclass(frozen=True)
class Place:
    """The folder of one family's checkpoint (`base`, `base.gguf`) and the one that all families share, and what each
    server may use and is asked."""

    work: Path
    family: str
    cores: int
    requests: tuple[int, ...]
    prompt: int
    output: int

    @property
    def base(self) -> Path:
        return self.work / self.family

    @property
    def gguf(self) -> Path:
        return self.work / f"{self.family}.gguf"


def set_up(where: Place, sides: Sequence[str]) -> None:
    """Make what is missing in the folder."""
    work = where.work
    work.mkdir(parents=True, exist_ok=True)
    save_base(where.base, FAMILIES[where.family])
    install_peer(work)
    packages = next((work / "vv/lib").glob("python3.*")) / "site-packages"
    if not (packages / "torchvision").exists():
        # Its registrations are for another build of torch. Text does not need them.
        subprocess.run([work / "vv/bin/pip", "install", "-q", "--no-deps", "torchvision==0.28.0"], check=True)
        (packages / "torchvision/_meta_registrations.py").write_text("import torchvision.extension\n")
    if LLAMA in sides:
        set_up_llama(where)


def set_up_llama(where: Place) -> None:
    """llama.cpp, and the checkpoint as it reads it."""
    work = where.work
    if not (work / "node/node_modules").exists():
        (work / "node").mkdir(exist_ok=True)
        command = ["npm", "install", "--ignore-scripts", f"node-llama-cpp@{NODE_LLAMA}"]
        subprocess.run(command, cwd=work / "node", check=True)
    if where.gguf.exists():
        return
    source = work / f"llama_cpp_python-{LLAMA_SOURCE}/vendor/llama.cpp"
    if not source.exists():
        name = f"llama-cpp-python=={LLAMA_SOURCE}"
        download = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "-q",
            "--no-deps",
            "--no-binary",
            "llama-cpp-python",
            name,
        ]
        subprocess.run([*download, "-d", work], check=True)
        with tarfile.open(next(work.glob(f"llama_cpp_python-{LLAMA_SOURCE}*.tar.gz"))) as archive:
            archive.extractall(work, filter="data")
    convert = [work / "vv/bin/python", source / "convert_hf_to_gguf.py", where.base, "--no-mtp"]
    environment = os.environ | {"PYTHONPATH": str(source / "gguf-py")}
    subprocess.run([*convert, "--outtype", "bf16", "--outfile", where.gguf], env=environment, check=True)


def processor_time(root: psutil.Process) -> float:
    """Seconds of a process and all below it."""
    total = 0.0
    for process in [root, *root.children(recursive=True)]:
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            total += times.user + times.system
    return total


def over_http(port: int, key: str, where: Place, root: psutil.Process) -> Ask:
    url, rng = f"http://127.0.0.1:{port}/v1/completions", random.Random(port)

    def one(ids: list[int]) -> int:
        asked = {
            "model": "base",
            "prompt": ids,
            "max_tokens": where.output,
            "ignore_eos": True,
            "temperature": 0,
        }
        answer = httpx.post(url, json=asked, headers={"authorization": f"Bearer {key}"}, timeout=900)
        answer.raise_for_status()
        tokens: int = answer.json()["usage"]["completion_tokens"]
        return tokens

    def ask(requests: int) -> Rates:
        prompts = [[rng.randrange(100, 40_000) for _ in range(where.prompt)] for _ in range(requests)]
        used, begun = processor_time(root), time.monotonic()
        with ThreadPoolExecutor(requests) as pool:
            tokens = sum(pool.map(one, prompts))
        took = time.monotonic() - begun
        return Rates(tokens / (processor_time(root) - used), tokens / took)

    return ask


@contextlib.contextmanager
def llama(where: Place) -> Iterator[Ask]:
    program = where.work / "node/llama_sequences.mjs"  # beside the packages that it imports
    program.write_text(Path(__file__).with_name(program.name).read_text())
    length = where.prompt + where.output + 8
    command = ["node", program.name, str(where.gguf), str(max(where.requests)), str(length), str(where.cores)]
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

        def ask(requests: int) -> Rates:
            print(requests, where.prompt, where.output, file=process.stdin, flush=True)
            found = told()
            return Rates(*(found["tokens"] / found[clock] * 1e3 for clock in ("processor", "wall")))

        told()
        try:
            yield ask
        finally:
            process.stdin.close()


@contextlib.contextmanager
def server(side: str, where: Place) -> Iterator[Ask]:
    """One side on the last cores, and so on as many threads."""
    before, all_cores = {child.pid for child in psutil.Process().children()}, os.sched_getaffinity(0)
    cores = sorted(all_cores)[-where.cores :]
    os.sched_setaffinity(0, cores)  # its processes inherit it
    try:
        with contextlib.ExitStack() as stack:
            if side == LLAMA:
                yield stack.enter_context(llama(where))
                return
            if side == OURS:
                started = ours(where.work, model=where.base, adapters=0, options=["--speculation", "off"])
            else:
                os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores))
                started = peer(where.work, 0, model=where.base)
            port, key = stack.enter_context(started)
            os.sched_setaffinity(0, all_cores)
            root = next(child for child in psutil.Process().children() if child.pid not in before)
            yield over_http(port, key, where, root)
    finally:
        os.sched_setaffinity(0, all_cores)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workdir", type=Path)
    parser.add_argument("--setup", action="store_true", help="make WORKDIR, and measure nothing")
    parser.add_argument("--family", choices=SIDES, default="qwen3_5")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sides", help="of the servers, Loraplex first; without it, all that the family has")
    parser.add_argument("--cores", type=int, default=1)
    parser.add_argument("--requests", default="1,16")
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--output", type=int, default=32)
    given = parser.parse_args()
    sides = given.sides.split(",") if given.sides else SIDES[given.family]
    counts = tuple(map(int, given.requests.split(",")))
    where = Place(given.workdir.resolve(), given.family, given.cores, counts, given.prompt, given.output)
    if given.setup:
        set_up(where, sides)
        return
    print(place(), flush=True)
    rates: dict[tuple[str, int], list[Rates]] = {(side, count): [] for count in counts for side in sides}
    with contextlib.ExitStack() as stack:
        asks = {side: stack.enter_context(server(side, where)) for side in sides}
        for number in range(given.rounds + 1):
            for count in counts:
                for side, ask in asks.items():
                    rate = ask(count)
                    if number:  # the first one warms up
                        rates[side, count].append(rate)
                    told = f"{rate.processor:.2f} by the processor, {rate.clock:.2f} by the clock"
                    print(f"{side}, {count}: {told}, load {os.getloadavg()[0]:.1f}", flush=True)
    print("| requests | server | by the processor | Loraplex's ÷ it | by the clock | Loraplex's ÷ it |")
    print("|---|---|---|---|---|---|")
    for (side, count), found in rates.items():
        cells = []
        for mine, theirs in zip(zip(*rates[OURS, count], strict=True), zip(*found, strict=True), strict=True):
            ratio = statistics.median(one / other for one, other in zip(mine, theirs, strict=True))
            cells += [
                f"{statistics.median(theirs):.1f} ({min(theirs):.1f} to {max(theirs):.1f})",
                f"{ratio:.2f}",
            ]
        print(" | ".join((f"| {count}", side, *cells)) + " |")


if __name__ == "__main__":
    main()
